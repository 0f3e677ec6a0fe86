"""The file that learned projections and the methods that use them are kept in."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from radar_core import PRISM, SEKA, AdaSEKA
from radar_core.methods import seka
from tests.models.oracle import made_up
from tests.models.tiny import FAMILIES, tiny_model


def test_what_is_saved_comes_back(tmp_path):
    model = tiny_model("Llama")
    found = made_up(model, layers=(0, 2))
    found.save(tmp_path / "keys.safetensors")
    again = seka.load(tmp_path / "keys.safetensors", model)
    assert again == found and again != made_up(model, seed=3, layers=(0, 2))
    for name, tensor in found.tensors().items():
        assert torch.equal(again.tensors()[name], tensor)
    for method in [
        SEKA(found, 1.5, 0.1, 0.8, 0.2, layers=[2]),
        PRISM(found, 2.0),
        AdaSEKA((found, made_up(model, seed=1, layers=(0, 2))), 0.5, rank=4),
    ]:
        method.save(tmp_path / "method.safetensors")
        assert seka.load(tmp_path / "method.safetensors", model) == method
    with safe_open(tmp_path / "keys.safetensors", framework="pt") as file:
        says = json.loads(file.metadata()["projections"])[0]
    assert says == {
        "model_type": "llama",
        "num_layers": 3,
        "layers": [0, 2],
        "key_heads": 2,
        "head_size": 16,
        "tokens": 40,
    }


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("format", "format 'other'; expected|format 'other' and version '1'; expected"),
        ("version", "version '9'"),
        ("layers", r"\[2, 16, 16, 16\]|expected \[1, key heads"),
        ("beyond", r"expected 0\.\.2"),
        ("heads", "says .*'key_heads': 4.*are of .*'key_heads': 2"),
        ("size", "says .*'head_size': 8"),
        ("missing", "lacks the tensor 0.negative.values"),
        ("dtype", "float16"),
        ("nan", "not finite"),
        ("method", "the method 'Other'; expected one of"),
        ("parameters", r"parameters \['loudness'\]"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path, damage, says):
    model, path = tiny_model("Llama"), tmp_path / "keys.safetensors"
    SEKA(made_up(model, layers=(0, 2))).save(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    described = json.loads(metadata["projections"])
    match damage:
        case "format" | "version" | "method":
            metadata[damage] = {"format": "other", "version": "9", "method": "Other"}[damage]
        case "layers" | "beyond":
            described[0]["layers"] = [0] if damage == "layers" else [0, 5]
        case "heads":
            described[0]["key_heads"] = 4
        case "size":
            described[0]["head_size"] = 8
        case "missing":
            del tensors["0.negative.values"]
        case "dtype":
            tensors["0.positive.vectors"] = tensors["0.positive.vectors"].half()
        case "nan":
            tensors["0.mean_distance"][0, 0] = math.nan
        case "parameters":
            metadata["parameters"] = '{"loudness": 3}'
    metadata["projections"] = json.dumps(described)
    save_file(tensors, path, metadata)
    with pytest.raises(ValueError, match=says):
        seka.load(path)


def test_other_files_and_other_models_are_refused(tmp_path):
    path = tmp_path / "keys.safetensors"
    with pytest.raises(ValueError, match="which is no file"):
        seka.load(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="no safetensors file"):
        seka.load(path)
    made_up(tiny_model("Llama")).save(path)
    for family, change, says in [
        ("Qwen3", {}, "model_type 'llama'; expected 'qwen3'"),
        ("Llama", {"num_hidden_layers": 4}, "num_layers 3; expected 4"),
        ("Llama", {"num_key_value_heads": 3}, "key_heads 2; expected 3"),
        ("Llama", {"head_dim": 32}, "head_size 16; expected 32"),
    ]:
        model = tiny_model(family, shape=FAMILIES[family] | change)
        with pytest.raises(ValueError, match=says):
            seka.load(path, model)
