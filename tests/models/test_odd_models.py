"""Models whose layers do what others do not: share keys, choose keys, or attend elsewhere."""

from __future__ import annotations

import pytest
import torch
from transformers.masking_utils import causal_mask_function

from radar_core import SPA, AttentionBias, NoSteering, TargetMass, attention_mass
from tests.models.oracle import Oracle, close_at_every_step
from tests.models.tiny import (
    FAMILIES,
    HEADS,
    MIXED,
    SHAPE,
    biased_logits,
    eager_twin,
    full_logits,
    hidden_logits,
    prompts,
    tiny_model,
)

BATCH = {"lengths": [20, 13], "anchored": [[3, 4, 9], [6, 12]]}
GREEDY = dict(max_new_tokens=3, do_sample=False, output_logits=True, return_dict_in_generate=True)
SHARED_KEYS = HEADS | {
    "sliding_window": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
    "global_head_dim": 16,
}
LATENT = SHAPE | {
    "num_key_value_heads": 6,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 6,
}
LONGCAT = {
    "vocab_size": 97,
    "hidden_size": 96,
    "ffn_hidden_size": 96,
    "num_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 16,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "moe_topk": 2,
}
METHODS = [SPA(1.5), AttentionBias(2.0), TargetMass(0.4), NoSteering()]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("keep", [1, 3])
def test_layers_that_run_the_last_queries_alone(implementation, keep):
    """Gemma 4 runs its upper layers, which share keys, only where logits are wanted."""
    model = tiny_model("Gemma4Text", implementation, shape=SHARED_KEYS)
    twin, inputs = eager_twin(model), prompts(**BATCH)
    anchors, ids, mask = inputs["anchors"], inputs["input_ids"], inputs["attention_mask"]
    every = {layer: torch.full((6,), 2.0) for layer in range(4)}
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for method, bias, first_query in [
        (AttentionBias(2.0, queries="generated"), every, ids.shape[1] - 1),
        (AttentionBias(2.0, layers=[0, 3]), {0: every[0], 3: every[3]}, 0),
    ]:
        expected = biased_logits(twin, ids, mask, anchors, bias, first_query)
        with torch.no_grad(), method.applied_to(model, anchors=anchors):
            out = model(ids, attention_mask=mask, position_ids=positions, logits_to_keep=keep)
        torch.testing.assert_close(out.logits[:, -1], expected, atol=1e-4, rtol=0)


def test_the_last_queries_alone_of_an_unpadded_prompt():
    model = tiny_model("Gemma4Text", shape=SHARED_KEYS)
    inputs = prompts([20], [[3, 4]])
    with torch.no_grad():
        plain = model(inputs["input_ids"]).logits[:, -3:]
        with AttentionBias(1e-6, layers=[0]).applied_to(model, anchors=inputs["anchors"]):
            kept = model(inputs["input_ids"], logits_to_keep=3).logits
    torch.testing.assert_close(kept, plain, atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["DeepseekV32", "GlmMoeDsa"])
def test_models_that_choose_keys_by_an_indexer_are_refused(family, method):
    """They hand only "sdpa" and "eager" the choice as a mask: Radar would attend to all keys."""
    model, inputs = tiny_model(family, shape=LATENT), prompts(**BATCH)
    plain = model(inputs["input_ids"]).logits
    with (
        pytest.raises(ValueError, match="indexer"),
        method.applied_to(model, anchors=inputs["anchors"]),
    ):
        pass
    assert torch.equal(plain, model(inputs["input_ids"]).logits)


@pytest.mark.parametrize("method", METHODS)
def test_a_model_with_a_mask_of_its_own_is_refused(method):
    model, inputs = tiny_model("Doge", shape=SHAPE), prompts(**BATCH)
    with (
        pytest.raises(ValueError, match="dynamic mask of its own"),
        method.applied_to(model, anchors=inputs["anchors"]),
    ):
        pass


def test_latent_attention_by_another_name():
    """LongCat-Flash has two attentions in a layer, of a class that is not called an attention."""
    model = tiny_model("LongcatFlash", shape=LONGCAT)
    twin, inputs = eager_twin(model), prompts(**BATCH)
    anchors, ids, mask = inputs["anchors"], inputs["input_ids"], inputs["attention_mask"]
    bias = {layer: torch.full((6,), 2.0) for layer in range(4)}
    expected = {
        AttentionBias(2.0): biased_logits(twin, ids, mask, anchors, bias),
        SPA(1.5): 1.5 * full_logits(twin, ids, mask)
        - 0.5 * hidden_logits(twin, ids, mask, anchors),
    }
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for method, logits in expected.items():
        with torch.no_grad(), method.applied_to(model, anchors=anchors) as steering:
            out = model(ids, attention_mask=mask, position_ids=positions, logits_to_keep=1)
        assert sorted(steering.calls) == [0, 1, 2, 3]
        torch.testing.assert_close(out.logits[:, -1], logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", [SPA(1.5), SPA(1.5, branch="direct"), *METHODS[1:]])
@pytest.mark.parametrize("shape", ["a row for all queries", "one for all prompts too", "whole"])
def test_a_mask_that_lets_every_token_see_all(method, shape):
    """A caller's mask of one row for all queries means what it says, and is not causal."""
    model, inputs = tiny_model("Llama"), prompts([20, 20], [[3, 4, 9], [6, 12]])
    ids, anchors = inputs["input_ids"], inputs["anchors"]
    rows, queries = {"whole": (2, 20), "a row for all queries": (2, 1)}.get(shape, (1, 1))
    mask = torch.ones(rows, 1, queries, 20, dtype=torch.bool)
    whole = torch.ones(2, 1, 20, 20, dtype=torch.bool)
    twin = eager_twin(model)
    with torch.no_grad():
        full = twin(ids, attention_mask=torch.zeros(2, 1, 20, 20)).logits[:, -1]
        if isinstance(method, NoSteering):
            expected = full
        elif isinstance(method, SPA):
            hidden = whole & ~anchors[:, None, None]
            if method.branch == "direct":
                hidden[:, :, :-1] = True
            added = torch.zeros(2, 1, 20, 20).masked_fill(~hidden, -1e30)
            expected = 1.5 * full - 0.5 * twin(ids, attention_mask=added).logits[:, -1]
        elif isinstance(method, AttentionBias):
            added = 2.0 * anchors[:, None, None].float().expand(2, 1, 20, 20)
            expected = twin(ids, attention_mask=added).logits[:, -1]
        else:
            with method.applied_to(model, anchors=anchors):
                expected = model(ids, attention_mask=whole).logits[:, -1]
        with method.applied_to(model, anchors=anchors):
            out = model(ids, attention_mask=mask).logits[:, -1]
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_an_attention_that_is_given_what_radar_does_not_know_is_refused(method):
    model, inputs = tiny_model("Llama"), prompts([20], [[3, 4]])
    with (
        method.applied_to(model, anchors=inputs["anchors"]),
        pytest.raises(ValueError, match="position_bias"),
    ):
        model(inputs["input_ids"], position_bias=torch.zeros(1, 6, 20, 20))


@pytest.mark.parametrize("method", METHODS)
def test_a_mask_that_the_model_wants_whole_is_whole(method):
    """Some models read the mask themselves, and say so by forbidding to leave it out."""
    model, inputs = tiny_model("Llama"), prompts([20], [[3, 4]])
    with method.applied_to(model, anchors=inputs["anchors"]) as steering:
        mask = steering.attention.make_mask(
            1, 20, 20, allow_is_causal_skip=False, mask_function=causal_mask_function
        )
    assert torch.equal(mask[0, 0], torch.ones(20, 20, dtype=torch.bool).tril())


@pytest.mark.parametrize("method", METHODS)
def test_cross_attention_is_refused(method):
    shape = {"vocab_size": 97, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64}
    model = tiny_model("GPT2", shape=shape | {"add_cross_attention": True})
    inputs = prompts(**BATCH)
    with (
        pytest.raises(ValueError, match="attend to other inputs than the prompt"),
        method.applied_to(model, anchors=inputs["anchors"]),
    ):
        pass


@pytest.mark.parametrize("method", METHODS)
def test_states_of_an_encoder_are_refused(method):
    """A decoder of Bart's kind has the layers for them always, and needs none."""
    shape = {"vocab_size": 97, "d_model": 48, "decoder_layers": 2, "decoder_ffn_dim": 48}
    model = tiny_model(
        "Bart", shape=shape | {"decoder_attention_heads": 6, "max_position_embeddings": 64}
    )
    inputs = prompts(**BATCH)
    anchors = inputs.pop("anchors")
    with torch.no_grad(), method.applied_to(model, anchors=anchors):
        model(**inputs)
        with pytest.raises(ValueError, match="encoder_hidden_states was given"):
            model(**inputs, encoder_hidden_states=torch.zeros(2, 5, 48))


@pytest.mark.parametrize("call", [lambda m: m.forward, lambda m: m.base_model])
def test_spa_refuses_calls_that_go_around_the_model(call):
    """They reach the attention but neither the doubling nor the blend: nothing would be steered."""
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    anchors = inputs.pop("anchors")
    with torch.no_grad(), SPA(1.5).applied_to(model, anchors=anchors):
        with pytest.raises(RuntimeError, match=r"call model\(\.\.\.\)"):
            call(model)(**inputs)
        steered = model(**inputs).logits
        with pytest.raises(RuntimeError, match=r"call model\(\.\.\.\)"):
            call(model)(**inputs)
        assert torch.equal(steered, model(**inputs).logits)


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 40.0},
        {
            "rope_type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
            "original_max_position_embeddings": 16,
        },
    ],
)
def test_positions_that_are_rotated_by_the_length_of_a_pass(family, rope):
    """Run by itself, the shared part of a long prompt would be rotated as a short prompt is."""
    rope = {"rope_parameters": rope | {"rope_theta": 1e4}, "max_position_embeddings": 16}
    # The rotation remembers the longest pass, so the oracle has a model of its own.
    model, fresh = (tiny_model(family, shape=FAMILIES[family] | rope) for _ in range(2))
    inputs = prompts([30, 24], [[10, 20], [6, 9]])
    anchors, ids, mask = inputs["anchors"], inputs["input_ids"], inputs["attention_mask"]
    with SPA(1.7).applied_to(model, anchors=anchors):
        out = model.generate(ids, attention_mask=mask, **GREEDY)
    full = full_logits(fresh, ids, mask)
    hidden = hidden_logits(fresh, ids, mask, anchors)
    torch.testing.assert_close(out.logits[0], 1.7 * full - 0.7 * hidden, atol=1e-4, rtol=0)


def test_the_mass_of_factors_under_a_bias():
    model, inputs = tiny_model("Llama"), prompts([20], [[3, 4]])
    ids = inputs["input_ids"]
    factors = torch.zeros(1, 20)
    factors[0, [3, 4, 9]] = torch.tensor([1.0, 2.0, -0.5])
    measured = attention_mass(model, ids, factors, AttentionBias(1.5))
    twin = eager_twin(model)
    weights = []

    def bias_and_keep(module, args, kwargs):
        return args, kwargs | {"attention_mask": kwargs["attention_mask"] + 1.5 * factors}

    for layer in twin.model.layers:
        layer.self_attn.register_forward_pre_hook(bias_and_keep, with_kwargs=True)
        layer.self_attn.register_forward_hook(lambda m, a, out: weights.append(out[1]))
    with torch.no_grad():
        twin(ids, attention_mask=torch.ones_like(ids))
    expected = torch.stack([w[:, :, -1, [3, 4, 9]].sum(-1) for w in weights], dim=1)
    torch.testing.assert_close(measured, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", [SPA(1.5), SPA(1.5, masking="embedding", mask_token_id=3)])
def test_a_model_whose_class_does_not_name_its_decoder_shares_the_prefix(method):
    """Llama 4's text model calls its base something that it does not have."""
    model = tiny_model("Llama4Text", "eager", shape=MIXED["Llama4Text"])
    assert model.base_model is model
    inputs = prompts([20, 13], [[13, 14], [6, 12]])
    anchors = inputs.pop("anchors")
    with method.applied_to(model, anchors):
        out = model.generate(**inputs, **GREEDY)
    oracle = Oracle(model, method, anchors, inputs["attention_mask"])
    close_at_every_step(out, oracle, 20)
