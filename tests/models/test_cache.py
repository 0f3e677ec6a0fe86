"""The growing cache layer holds what transformers' own layer holds, whatever is done to it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicCache, DynamicLayer

from radar_core import SPA, AttentionBias
from radar_core.hooks.cache import GrowingLayer, let_grow
from tests.models.tiny import prompts, tiny_model

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.integers(1, 300)),
        st.tuples(st.just("crop"), st.integers(1, 3)),
        st.tuples(st.just("reorder"), st.permutations([0, 1])),
        st.tuples(st.just("select"), st.lists(st.integers(0, 1), min_size=2, max_size=2)),
        st.tuples(st.just("reset"), st.none()),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, seed=st.integers(0, 2**31))
def test_equals_the_plain_layer_after_any_sequence(steps, seed):
    generator = torch.Generator().manual_seed(seed)
    plain, growing = DynamicLayer(), GrowingLayer()
    for name, value in [("update", 4), *steps]:
        if name == "update":
            new = torch.randn(2, 2, 3, value, 4, generator=generator)
            for layer in (plain, growing):
                layer.update(new[0], new[1])
        elif name == "crop":
            if plain.get_seq_length() <= value:
                continue
            for layer in (plain, growing):
                layer.crop(-value)
        elif name == "reorder":
            for layer in (plain, growing):
                layer.reorder_cache(torch.tensor(value))
        elif name == "select":
            for layer in (plain, growing):
                layer.batch_select_indices(torch.tensor(value))
        else:
            for layer in (plain, growing):
                layer.reset()
        assert plain.get_seq_length() == growing.get_seq_length()
        if plain.get_seq_length():
            assert torch.equal(plain.keys, growing.keys)
            assert torch.equal(plain.values, growing.values)


def test_a_step_copies_one_token():
    layer = GrowingLayer()
    layer.update(torch.randn(1, 2, 100, 4), torch.randn(1, 2, 100, 4))
    layer.update(torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4))
    place = layer.keys.data_ptr()
    for _ in range(50):
        layer.update(torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4))
    assert layer.keys.data_ptr() == place and layer.keys.shape == (1, 2, 151, 4)


def test_only_plain_layers_of_plain_caches_grow():
    model = tiny_model("Mistral")
    sliding = DynamicCache(config=model.config)
    kinds = [type(layer) for layer in sliding.layers]
    let_grow(sliding)
    assert [type(layer) for layer in sliding.layers] == kinds
    let_grow(None)

    class Own(DynamicCache):
        pass

    own = Own(config=tiny_model("Llama").config)
    let_grow(own)
    assert all(type(layer) is DynamicLayer for layer in own.layers)


@pytest.mark.parametrize("method", [AttentionBias(2.0), SPA(2.0)])
@pytest.mark.parametrize("gradient", [False, True])
def test_a_prefill_in_inference_mode_and_a_step_outside(method, gradient):
    """Tensors of inference mode cannot be written in place elsewhere."""
    model, inputs = tiny_model("Llama"), prompts([20], [[9, 10]])
    anchors, ids = inputs["anchors"][:, :17], inputs["input_ids"]
    cache = DynamicCache(config=model.config)
    with method.applied_to(model, anchors=anchors), torch.no_grad():
        with torch.inference_mode():
            for start, stop in ((0, 17), (17, 18), (18, 19)):
                model(ids[:, start:stop], past_key_values=cache)
        with torch.set_grad_enabled(gradient):
            logits = model(ids[:, 19:], past_key_values=cache).logits[:, -1]
        expected = model(ids).logits[:, -1]
    torch.testing.assert_close(logits.detach(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_copies_of_a_branched_cache_are_their_own(duplicate):
    """Beam search from a copied prefix, as when many replies share one."""
    model, inputs = tiny_model("Llama"), prompts([20], [[12, 13]])
    anchors, ids = inputs["anchors"], inputs["input_ids"]
    options = dict(num_beams=3, max_new_tokens=6, do_sample=False)
    plain = model.generate(ids, **options)
    prefix = DynamicCache(config=model.config)
    with SPA(2.0).applied_to(model, anchors=anchors), torch.no_grad():
        expected = model.generate(ids, **options)
        model(ids[:, :8], past_key_values=prefix)
        prefix.batch_repeat_interleave(3)
        held = prefix.layers[0].keys.clone()
        copied = duplicate(prefix)
        steered = model.generate(ids, past_key_values=copied, **options)
    assert torch.equal(steered, expected) and torch.equal(prefix.layers[0].keys, held)
    assert torch.equal(model.generate(ids, past_key_values=duplicate(prefix), **options), plain)
    assert torch.equal(prefix.layers[0].keys, held)
