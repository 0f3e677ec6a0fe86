"""AttentionBias and TargetMass against transformers' eager attention with a float mask."""

from __future__ import annotations

import math

import pytest
import torch

from radar_core import GUIDE, PASTA, AttentionBias, InstABoost, NoSteering, TargetMass
from tests.models.oracle import BATCH, GREEDY, close_at_every_step
from tests.models.tiny import FAMILIES, MIXED, biased_logits, eager_twin, prompts, tiny_model

TWELVE = GREEDY | {"max_new_tokens": 12}


def check(model, inputs, method, bias, first_query=0, **options):
    """Check the prefill's and every step's logits against uncached eager passes."""
    twin = eager_twin(model)
    anchors = inputs["anchors"]
    asked = {k: v for k, v in inputs.items() if k != "anchors"}
    with method.applied_to(model, anchors=anchors) as steering:
        out = model.generate(**asked, **TWELVE, **options)
    assert set(steering.calls) == set(range(model.config.num_hidden_layers))

    def expected(ids):
        return biased_logits(twin, ids, asked["attention_mask"], anchors, bias, first_query)

    close_at_every_step(out, expected, asked["input_ids"].shape[1])
    return out


def all_heads(model, value):
    heads = model.config.num_attention_heads
    return {layer: torch.full((heads,), value) for layer in range(model.config.num_hidden_layers)}


@pytest.mark.smoke
@pytest.mark.parametrize("family", list(FAMILIES))
def test_equals_eager_with_a_float_mask(family):
    model, inputs = tiny_model(family), prompts(**BATCH)
    steered = check(model, inputs, AttentionBias(2.0), all_heads(model, 2.0))
    plain = model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], **TWELVE)
    assert (steered.logits[0] - plain.logits[0]).abs().max() > 0.01


def test_only_chosen_heads_and_layers():
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    chosen = torch.zeros(6)
    chosen[[1, 4]] = 3.0
    method = AttentionBias(3.0, heads=[1, 4], layers=[-1, 0])
    check(model, inputs, method, {0: chosen, 2: chosen})


@pytest.mark.parametrize("family", list(MIXED))
@pytest.mark.parametrize("steered", ["first", "last", "generated"])
def test_models_that_mix_full_and_windowed_layers(family, steered):
    """A prompt longer than the window, with layers or queries left to the model's own attention."""
    model = tiny_model(family, "eager", shape=MIXED[family])
    inputs = prompts(**BATCH)
    every = all_heads(model, 3.0)
    if steered == "generated":
        method, bias = AttentionBias(3.0, queries="generated"), every
    else:
        layers = [0, 1] if steered == "first" else [2, 3]
        method = AttentionBias(3.0, layers=layers)
        bias = {layer: every[layer] for layer in layers}
    first_query = inputs["input_ids"].shape[1] - 1 if steered == "generated" else 0
    check(model, inputs, method, bias, first_query)


@pytest.mark.parametrize("family", [f for f in MIXED if f not in ("Gemma2", "GptOss")])
@pytest.mark.parametrize("moved", [False, True])
def test_layers_left_alone_get_their_own_masks(family, moved):
    """Bit for bit, also where a mask arrives as another tensor, as between devices."""
    model = tiny_model(family, shape=MIXED[family])
    inputs = prompts(**BATCH)
    anchors = inputs.pop("anchors")

    def copy_mask(module, args, kwargs):
        mask = kwargs.get("attention_mask")
        return args, kwargs | {"attention_mask": None if mask is None else mask.clone()}

    if moved:
        for module in model.modules():
            if "Attention" in type(module).__name__:
                module.register_forward_pre_hook(copy_mask, with_kwargs=True)
    plain = model.generate(**inputs, **TWELVE)
    for options in ({}, {"cache_implementation": "static", "disable_compile": True}):
        with AttentionBias(1e-6, layers=[3]).applied_to(model, anchors=anchors):
            steered = model.generate(**inputs, **TWELVE, **options)
        assert torch.equal(plain.sequences, steered.sequences)
        for one, other in zip(plain.logits, steered.logits, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


def test_heads_by_layer():
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    zero = torch.zeros(6)
    bias = {
        0: zero.index_fill(0, torch.tensor([5]), 1.0),
        1: zero.index_fill(0, torch.tensor([0, 2]), 1.0),
    }
    check(model, inputs, AttentionBias(1.0, heads={0: [5], 1: [0, 2]}), bias)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_only_generated_queries(implementation):
    model, inputs = tiny_model("Llama", implementation), prompts(**BATCH)
    method = AttentionBias(3.0, queries="generated")
    prompt = inputs["input_ids"].shape[1]
    check(model, inputs, method, all_heads(model, 3.0), first_query=prompt - 1)


def test_left_out_layers_run_the_models_own_attention_bit_for_bit():
    """With only the last layer steered, the cache of the layers below is untouched."""
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    anchors = inputs.pop("anchors")
    plain = model(**inputs, output_hidden_states=True)
    with AttentionBias(3.0, layers=[2]).applied_to(model, anchors=anchors):
        steered = model(**inputs, output_hidden_states=True)
    for below, same in zip(plain.hidden_states[:3], steered.hidden_states[:3], strict=True):
        assert torch.equal(below, same)
    assert not torch.equal(plain.logits, steered.logits)


@pytest.mark.parametrize("cache", ["static", "dynamic"])
@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_caches(cache, family):
    model, options = tiny_model(family), dict(cache_implementation=cache, disable_compile=True)
    check(model, prompts(**BATCH), AttentionBias(2.0), all_heads(model, 2.0), **options)


def test_chunked_prefill_gives_the_same():
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    anchors = inputs.pop("anchors")
    with AttentionBias(2.0, queries="generated").applied_to(model, anchors=anchors):
        whole = model.generate(**inputs, **TWELVE)
        chunks = model.generate(**inputs, **TWELVE, prefill_chunk_size=5)
    assert torch.equal(whole.sequences, chunks.sequences)
    torch.testing.assert_close(whole.logits[-1], chunks.logits[-1], atol=1e-4, rtol=0)


def test_factors_scale_the_bias():
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    inputs["anchors"] = inputs["anchors"] * 0.5
    check(model, inputs, AttentionBias(4.0), all_heads(model, 4.0))


def test_named_methods_are_biases():
    assert PASTA(0.01).bias == pytest.approx(math.log(100))
    assert InstABoost(3.0).bias == pytest.approx(math.log(3))
    assert GUIDE(2.0) == AttentionBias(2.0)
    assert PASTA(1.0).is_identity and InstABoost(1.0).is_identity and GUIDE(0.0).is_identity


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("method", [AttentionBias(2.5), TargetMass(0.3)])
def test_batch_gives_each_prompts_own_result(family, method):
    model, inputs = tiny_model(family), prompts(**BATCH)
    anchors = inputs.pop("anchors")
    with method.applied_to(model, anchors=anchors):
        together = model.generate(**inputs, **TWELVE)
    for row, length in enumerate(BATCH["lengths"]):
        ids = inputs["input_ids"][row : row + 1, -length:]
        with method.applied_to(model, anchors=anchors[row : row + 1, -length:]):
            alone = model.generate(ids, attention_mask=torch.ones_like(ids), **TWELVE)
        for one, many in zip(alone.logits, together.logits, strict=True):
            torch.testing.assert_close(one[0], many[row], atol=1e-4, rtol=0)


def test_no_steering_equals_the_model_to_rounding():
    model, inputs = tiny_model("Mistral"), prompts(**BATCH)
    inputs.pop("anchors")
    plain = model.generate(**inputs, **TWELVE)
    with NoSteering().applied_to(model) as steering:
        radar = model.generate(**inputs, **TWELVE)
    assert steering.active and torch.equal(plain.sequences, radar.sequences)
    torch.testing.assert_close(plain.logits[-1], radar.logits[-1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", ["at_least", "exact"])
@pytest.mark.parametrize("heads", [None, [0, 3]])
def test_target_mass_is_reached(mode, heads):
    """The share of attention after steering, computed from eager attention's own weights."""
    model, inputs = tiny_model("Llama"), prompts(lengths=[23], anchored=[[3, 4, 12]])
    anchors = inputs["anchors"]
    twin = eager_twin(model)
    own = twin(inputs["input_ids"], output_attentions=True).attentions[0]
    share = own[0, :, :, anchors[0]].sum(-1)[:, 3:]
    target = 0.3
    wanted = torch.full_like(share, target) if mode == "exact" else share.clamp(min=target)
    if heads is not None:
        others = [head for head in range(6) if head not in heads]
        wanted[others] = share[others]
    bias = torch.logit(wanted) - torch.logit(share)
    added = torch.zeros(1, 6, 23, 23)
    added[0, :, 3:, :] = bias[:, :, None] * anchors[0].float()
    handle = twin.model.layers[0].self_attn.register_forward_pre_hook(
        lambda m, a, k: (a, k | {"attention_mask": k["attention_mask"] + added}), with_kwargs=True
    )
    expected = twin(inputs["input_ids"]).logits
    handle.remove()
    with TargetMass(target, mode=mode, heads=heads, layers=[0]).applied_to(model, anchors=anchors):
        steered = model(inputs["input_ids"]).logits
    torch.testing.assert_close(steered, expected, atol=1e-4, rtol=0)


def test_target_mass_while_decoding():
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    anchors = inputs.pop("anchors")
    with TargetMass(0.4).applied_to(model, anchors=anchors):
        cached = model.generate(**inputs, **TWELVE)
        again = model.generate(**inputs, **TWELVE, use_cache=False)
    torch.testing.assert_close(cached.logits[-1], again.logits[-1], atol=1e-4, rtol=0)
