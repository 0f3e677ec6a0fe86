"""Prompts in chunks on a static cache, whose counter lives on the device and moves by itself."""

from __future__ import annotations

import pytest
import torch
from transformers import StaticCache

from radar_core import SPA, AttentionBias, TargetMass
from tests.models.tiny import MIXED, prompts, tiny_model

BATCH = {"lengths": [21, 14], "anchored": [[3, 4, 12], [6, 13]]}
GREEDY = dict(max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True)
STATIC = {"cache_implementation": "static", "disable_compile": True}
METHODS = [
    SPA(1.7),
    SPA([1.0, -0.5]),
    AttentionBias(2.0, queries="generated"),
    AttentionBias(2.0, layers=[1, -1], queries="generated"),
    TargetMass(0.5, queries="generated"),
]


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("family", ["Llama", "Gemma3Text"])
@pytest.mark.parametrize("chunk", [1, 7, 20])
def test_equals_the_whole_prompt_on_a_dynamic_cache(family, method, chunk):
    model = tiny_model(family, shape=MIXED.get(family))
    inputs = prompts(**BATCH)
    anchors = inputs.pop("anchors")
    with method.applied_to(model, anchors=anchors):
        whole = model.generate(**inputs, **GREEDY)
        chunked = model.generate(**inputs, **GREEDY, **STATIC, prefill_chunk_size=chunk)
    assert torch.equal(whole.sequences, chunked.sequences)
    for one, other in zip(whole.logits, chunked.logits, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)


def test_an_empty_static_cache_that_was_made_for_one_branch_serves_both():
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    anchors = inputs.pop("anchors")
    cache = StaticCache(config=model.config, max_cache_len=40)
    model.generate(**inputs, **GREEDY, past_key_values=cache)
    cache.reset()
    with SPA(1.7).applied_to(model, anchors=anchors):
        fresh = model.generate(**inputs, **GREEDY)
        again = model.generate(**inputs, **GREEDY, past_key_values=cache)
    for one, other in zip(fresh.logits, again.logits, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)


def test_a_static_cache_with_tokens_of_one_branch_is_branched():
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    anchors = inputs.pop("anchors")
    cache = StaticCache(config=model.config, max_cache_len=40)
    with torch.no_grad():
        model(inputs["input_ids"][:, :2], past_key_values=cache)
    with SPA(1.7).applied_to(model, anchors=anchors):
        ours = model.generate(**inputs, **GREEDY, past_key_values=cache)
        fresh = model.generate(**inputs, **GREEDY)
    for one, other in zip(ours.logits, fresh.logits, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["Llama", "Gemma3Text"])
def test_beams_reorder_both_branches(family):
    model, inputs = tiny_model(family, shape=MIXED.get(family)), prompts(**BATCH)
    anchors = inputs.pop("anchors")
    beams = dict(num_beams=3, num_return_sequences=2, max_new_tokens=8, do_sample=False)
    with SPA(1.7).applied_to(model, anchors=anchors):
        expected = model.generate(**inputs, **beams)
        assert torch.equal(expected, model.generate(**inputs, **beams, **STATIC))
