"""PASTA with the heads of a published file, against the package's numbers and eager attention."""

from __future__ import annotations

import json
import math

import pytest
import torch

from radar_core import PASTA, AttentionBias
from tests.models import pastalib_numbers as package
from tests.models.tiny import eager_twin, extended, prompts, tiny_model

GREEDY = dict(do_sample=False, max_new_tokens=6, output_logits=True, return_dict_in_generate=True)


@pytest.fixture
def head_file(tmp_path):
    path = tmp_path / "top3.json"
    path.write_text(json.dumps(package.HEADS, indent=4))
    return path


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("cache", [{}, {"use_cache": False}, {"cache_implementation": "static"}])
def test_one_span_gives_the_packages_numbers(head_file, implementation, cache):
    numbers = json.loads(package.PATH.read_text())
    model = package.small_llama(implementation)
    ids = torch.tensor([package.PROMPT])
    anchors = torch.zeros_like(ids, dtype=torch.bool)
    anchors[:, slice(*package.SPAN)] = True
    method = PASTA(package.ALPHA, heads=str(head_file), keep_generated=True)
    with method.applied_to(model, anchors):
        out = model.generate(ids, **GREEDY, **cache, disable_compile=True)
    assert out.sequences[0].tolist() == numbers["sequence"]
    expected = torch.tensor(numbers["logits"])
    torch.testing.assert_close(torch.cat(out.logits), expected, atol=1e-4, rtol=0)
    with PASTA(package.ALPHA, heads=head_file).applied_to(model, anchors):
        damped = model.generate(ids, **GREEDY)
    torch.testing.assert_close(damped.logits[0][0], expected[0], atol=1e-4, rtol=0)
    assert (damped.logits[1][0] - expected[1]).abs().max() > 1e-2
    plain = model.generate(ids, **GREEDY)
    assert (plain.logits[0][0] - expected[0]).abs().max() > 1e-2


@torch.no_grad()
def weighed_down(twin, ids, inputs, heads, alpha):
    """Return the last logits with log(alpha) on every key of the prompt outside all spans."""
    seen = extended(inputs["attention_mask"], ids.shape[1], 1)
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    outside = extended(~inputs["anchors"], ids.shape[1], False).float()
    handles = []
    for layer, chosen in heads.items():
        steered = torch.zeros(6).index_fill(0, torch.tensor(chosen), math.log(alpha))
        added = steered[None, :, None, None] * outside[:, None, None, :]

        def add(module, args, kwargs, added=added):
            return args, kwargs | {"attention_mask": kwargs["attention_mask"] + added}

        attention = twin.model.layers[int(layer)].self_attn
        handles.append(attention.register_forward_pre_hook(add, with_kwargs=True))
    try:
        return twin(ids, attention_mask=seen, position_ids=positions).logits[:, -1]
    finally:
        for handle in handles:
            handle.remove()


def test_several_spans_count_once_each(head_file):
    """No anchored token loses weight, in a padded batch, at any step."""
    model = tiny_model("Llama")
    inputs = prompts([23, 17], [[3, 4, 5, 12, 13, 20], [2, 9, 10]])
    asked = {name: value for name, value in inputs.items() if name != "anchors"}
    twin = eager_twin(model)
    method = PASTA(0.05, heads=head_file, keep_generated=True)
    with method.applied_to(model, inputs["anchors"]):
        out = model.generate(**asked, **GREEDY)
    for step, logits in enumerate(out.logits):
        ids = out.sequences[:, : 23 + step]
        expected = weighed_down(twin, ids, inputs, package.HEADS, 0.05)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_a_file_is_the_mapping_that_it_holds(tmp_path, head_file):
    assert PASTA(0.1, heads=head_file) == AttentionBias(
        -math.log(0.1), heads={2: (5, 0), 0: (3, 1), 1: (2,)}
    )
    path = tmp_path / "layers.json"
    path.write_text("[2, 0]")
    assert PASTA(0.1, heads=path) == AttentionBias(-math.log(0.1), layers=(2, 0))
    with pytest.raises(ValueError, match="lists layers itself"):
        PASTA(0.1, heads=path, layers=[1])
    path.write_text('{"1": [0], "2": []}')
    assert PASTA(0.1, heads=path).heads == {1: (0,)}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"1": [0, 1], "x": [2]}', 'holds {"1": \\[0, 1\\], "x"'),
        ('{"1": 3}', "expected layers and their heads"),
        ('{"1": [-1]}', "expected layers and their heads"),
        ('{"1": []}', "expected layers and their heads"),
        ("[]", "expected layers and their heads"),
        ("3", "holds 3"),
        ("{", "is no JSON"),
        ('{"1": [2, 2]}', "names one twice"),
    ],
)
def test_other_files_are_refused(tmp_path, text, says):
    path = tmp_path / "heads.json"
    with pytest.raises(ValueError, match="which is no file"):
        PASTA(heads=path)
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        PASTA(heads=str(path))


def test_heads_that_the_model_lacks_are_refused(head_file):
    head_file.write_text('{"1": [6]}')
    model, inputs = tiny_model("Llama"), prompts([9], [[2]])
    with (
        pytest.raises(ValueError, match="heads names 6, but this model has 6"),
        PASTA(heads=head_file).applied_to(model, inputs["anchors"]),
    ):
        pass
