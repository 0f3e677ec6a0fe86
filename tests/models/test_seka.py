"""Edited keys against eager attention with keys edited by hand."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from radar_core import (
    PRISM,
    SEKA,
    AdaSEKA,
)
from tests.models.oracle import BATCH, GREEDY, Oracle, close_at_every_step, made_up
from tests.models.test_attachment import interrupted_at, snapshot
from tests.models.tiny import FAMILIES, HEADS, MIXED, prompts, tiny_model

EIGHT = GREEDY | {"max_new_tokens": 8}

EQUAL = {k: v for k, v in HEADS.items() if k not in ("head_dim", "num_key_value_heads")}
SHAPES = {name: FAMILIES[name] for name in ("Llama", "Qwen2", "Qwen3", "Gemma2", "Mistral")} | {
    "GPT2": FAMILIES["GPT2"],
    "Phi3": FAMILIES["Phi3"],
    "Gemma3Text": MIXED["Gemma3Text"],
    "Olmo2": HEADS,
    "Cohere": HEADS | {"use_qk_norm": True, "logit_scale": 1.0},
    "GPTNeoX": EQUAL | {"rotary_pct": 0.5},
    "OPT": EQUAL | {"ffn_dim": 96, "word_embed_proj_dim": 96},
}


def methods(model, **options):
    one, two = made_up(model), made_up(model, seed=1)
    return {
        "SEKA": SEKA(one, 1.5, 0.7, least_distance=0.3, **options),
        "PRISM": PRISM(one, 1.2, variance=0.9, **options),
        "AdaSEKA": AdaSEKA((one, two), 1.0, rank=3, **options),
    }


def run(model, inputs, method, **options):
    asked = {k: v for k, v in inputs.items() if k != "anchors"}
    with method.applied_to(model, inputs["anchors"]) as steering:
        out = model.generate(**asked, **(EIGHT | options))
    return out, steering


@pytest.mark.parametrize("name", ["SEKA", "PRISM", "AdaSEKA"])
@pytest.mark.parametrize("family", list(SHAPES))
def test_equals_eager_with_keys_edited_by_hand(family, name):
    implementation = "eager" if family == "Gemma2" else "sdpa"
    model = tiny_model(family, implementation, shape=SHAPES[family])
    inputs, method = prompts(**BATCH), methods(model)[name]
    out, steering = run(model, inputs, method)
    assert steering.calls == dict.fromkeys(method.steered_layers, 1)  # none while decoding
    oracle = Oracle(model, method, inputs["anchors"], inputs["attention_mask"])
    close_at_every_step(out, oracle, inputs["input_ids"].shape[1])
    plain = model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], **EIGHT)
    assert (out.logits[0] - plain.logits[0]).abs().max() > 3e-3


@pytest.mark.parametrize("tokens", [2, 6])
@pytest.mark.parametrize("family", ["Qwen3", "Gemma3Text", "Cohere"])
def test_as_many_tokens_as_heads(family, tokens):
    """Keys [B, tokens, heads, D] and [B, heads, tokens, D] then have the same shape."""
    model = tiny_model(family, shape=SHAPES[family])
    inputs, method = prompts([tokens], [[0]]), methods(model)["AdaSEKA"]
    out, _ = run(model, inputs, method, max_new_tokens=2)
    oracle = Oracle(model, method, inputs["anchors"], inputs["attention_mask"])
    close_at_every_step(out, oracle, inputs["input_ids"].shape[1])


@pytest.mark.parametrize("name", ["SEKA", "AdaSEKA"])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "GPT2"])
def test_every_cache_gives_the_uncached_result(family, name):
    model, inputs = tiny_model(family), prompts(**BATCH)
    method = methods(model)[name]
    uncached, _ = run(model, inputs, method, use_cache=False)
    static = dict(cache_implementation="static", disable_compile=True)
    variants = [{}, static]
    if name == "SEKA":
        variants += [{"prefill_chunk_size": size} for size in (1, 5)]
        variants += [static | {"prefill_chunk_size": size} for size in (1, 5)]
    for options in variants:
        cached, _ = run(model, inputs, method, **options)
        assert torch.equal(cached.sequences, uncached.sequences)
        for one, other in zip(cached.logits, uncached.logits, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["SEKA", "AdaSEKA"])
def test_beams_and_several_sequences(name):
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    method = methods(model)[name]
    options = dict(num_beams=3, num_return_sequences=2, output_logits=False, output_scores=True)
    cached, _ = run(model, inputs, method, **options)
    uncached, _ = run(model, inputs, method, use_cache=False, **options)
    assert torch.equal(cached.sequences, uncached.sequences)
    scores = cached.sequences_scores, uncached.sequences_scores
    torch.testing.assert_close(*scores, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["SEKA", "PRISM", "AdaSEKA"])
def test_a_batch_gives_each_prompts_own_result(name):
    model, inputs = tiny_model("Qwen3"), prompts(**BATCH)
    method = methods(model)[name]
    together, _ = run(model, inputs, method)
    for row, length in enumerate(BATCH["lengths"]):
        own = {k: v[row : row + 1, -length:] for k, v in inputs.items()}
        alone, _ = run(model, own, method)
        for one, many in zip(alone.logits, together.logits, strict=True):
            torch.testing.assert_close(one[0], many[row], atol=1e-4, rtol=0)


def test_left_out_layers_and_unanchored_keys_keep_their_bits():
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    anchors = inputs.pop("anchors")
    plain = model(**inputs, output_hidden_states=True)
    method = SEKA(made_up(model), 2.0, layers=[-2])
    with method.applied_to(model, anchors) as steering:
        steered = model(**inputs, output_hidden_states=True)
    assert steering.calls == {1: 1}
    for layer in (0, 1):
        assert torch.equal(plain.hidden_states[layer], steered.hidden_states[layer])
    keys = [one.past_key_values.layers for one in (plain, steered)]
    assert torch.equal(keys[0][0].keys, keys[1][0].keys)
    assert torch.equal(keys[0][1].values, keys[1][1].values)
    same = (keys[0][1].keys == keys[1][1].keys).all(-1).all(1)
    assert torch.equal(same, ~anchors)
    assert not torch.equal(plain.hidden_states[2], steered.hidden_states[2])
    assert torch.equal(model(**inputs).logits, plain.logits)


def test_a_cached_prefix_is_taken_up_where_it_was_edited_alike():
    model, inputs = tiny_model("Llama"), prompts([23], [[3, 4, 18]])
    ids, anchors = inputs["input_ids"], inputs["anchors"]
    one, same = SEKA(made_up(model), 2.0), SEKA(made_up(model), 2.0)
    other = SEKA(made_up(model), 1.0)

    @torch.no_grad()
    def prefilled(method):
        if method is None:
            return model(ids[:, :12]).past_key_values
        with method.applied_to(model, anchors[:, :12]):
            return model(ids[:, :12]).past_key_values

    def carried(cache, method, marks=anchors):
        with method.applied_to(model, marks):
            return model.generate(ids, past_key_values=copy.deepcopy(cache), **EIGHT)

    whole, _ = run(model, inputs, one)
    made = prefilled(one)
    for method in (one, same):
        again = carried(made, method)
        assert torch.equal(again.sequences, whole.sequences)
        torch.testing.assert_close(again.logits[-1], whole.logits[-1], atol=1e-4, rtol=0)
    late = anchors.clone()
    late[:, :12] = False
    elsewhere = anchors.clone()
    elsewhere[:, 7] = True
    for cache, method, marks in [
        (prefilled(None), one, anchors),
        (made, other, anchors),
        (made, one, elsewhere),
        (made, one, late),
    ]:
        with pytest.raises(ValueError, match=r"ran unsteered|mix both"):
            carried(cache, method, marks)
    out = carried(prefilled(None), one, late)
    assert (out.logits[0] - whole.logits[0]).abs().max() > 1e-3


def test_adaptive_weights_need_the_whole_prompt():
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    with pytest.raises(ValueError, match="prefill_chunk_size"):
        run(model, inputs, methods(model)["AdaSEKA"], prefill_chunk_size=5)


def test_half_precision():
    model, inputs = tiny_model("Qwen3"), prompts(**BATCH)
    method, anchors = methods(model)["SEKA"], inputs.pop("anchors")
    exact = model(**inputs).logits
    with method.applied_to(model, anchors):
        steered = model(**inputs).logits
    model.to(torch.bfloat16)
    own = (model(**inputs).logits - exact).abs().max()
    with method.applied_to(model, anchors):
        rough = (model(**inputs).logits - steered).abs().max()
    assert rough < 2 * own


def test_compiled_passes_are_edited_and_new_anchors_add_no_graph(monkeypatch):
    # Linear layers that are replaced anew in each block are compiled anew.
    monkeypatch.setattr("radar_core.hooks.attachment.serve_few_rows", lambda *_: None)
    model = tiny_model("Llama")
    method, counter = methods(model)["SEKA"], CompileCounter()
    graphs, outs = [], []
    torch._dynamo.reset()
    model.compile(backend=counter, fullgraph=True)
    try:
        for anchored in (BATCH["anchored"], [[7, 8], [1, 2, 3]]):
            inputs = prompts(BATCH["lengths"], anchored)
            anchors = inputs.pop("anchors")
            with torch.no_grad(), method.applied_to(model, anchors) as steering:
                outs.append((inputs, anchors, model(**inputs).logits))
            assert set(steering.calls) == {0, 1, 2}
            graphs.append(counter.frame_count)
    finally:
        model._compiled_call_impl = None
        torch._dynamo.reset()
    assert graphs == [1, 1]
    for inputs, anchors, compiled in outs:
        with torch.no_grad(), method.applied_to(model, anchors):
            torch.testing.assert_close(compiled, model(**inputs).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["SEKA", "AdaSEKA"])
def test_nothing_is_left_behind_whatever_happens(name):
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    anchors, before = inputs.pop("anchors"), snapshot(model)
    method, plain = methods(model)[name], model(**inputs).logits
    sites = [m for m in model.modules() if type(m).__name__ == "Linear"]

    def enter_and_leave():
        with method.applied_to(model, anchors):
            model(**inputs)

    steps = 0
    while interrupted_at(steps, enter_and_leave):
        assert snapshot(model) == before and not any(m._forward_hooks for m in sites), steps
        steps += 1 if steps < 20 else 41
    assert steps > 300 and torch.equal(model(**inputs).logits, plain)


def test_off_changes_nothing():
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    anchors = inputs.pop("anchors")
    found = made_up(model)
    plain = model(**inputs).logits
    for method in (SEKA(found, 0.0, 0.0), PRISM(found, 0.0), AdaSEKA(found, 0.0)):
        with method.applied_to(model, anchors) as steering:
            assert not steering.active and torch.equal(model(**inputs).logits, plain)
    with SEKA(found).applied_to(model, anchors & False) as steering:
        assert not steering.active


def test_models_whose_keys_cannot_be_reached_are_refused():
    inputs = prompts(**BATCH)
    mla = tiny_model(
        "DeepseekV3",
        shape=HEADS
        | dict(
            num_key_value_heads=6,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
            head_dim=8,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=4,
        ),
    )
    late = tiny_model("HunYuanDenseV1", shape=HEADS)
    llama = tiny_model("Llama")
    for model, says in [(mla, "k_proj"), (late, "key_layernorm")]:
        with (
            pytest.raises(ValueError, match=says),
            SEKA(made_up(model)).applied_to(model, inputs["anchors"]),
        ):
            pass
    for change, says in [
        ({"head_dim": 8}, "head_size 16; expected 8"),
        ({"num_key_value_heads": 6}, "key_heads 2; expected 6"),
        ({"num_hidden_layers": 2}, "num_layers 3; expected 2"),
    ]:
        other = tiny_model("Llama", shape=FAMILIES["Llama"] | change)
        with (
            pytest.raises(ValueError, match=says),
            SEKA(made_up(llama)).applied_to(other, inputs["anchors"]),
        ):
            pass
    with (
        pytest.raises(ValueError, match="model_type 'llama'; expected 'qwen3'"),
        SEKA(made_up(llama)).applied_to(tiny_model("Qwen3"), inputs["anchors"]),
    ):
        pass


def test_bad_parameters_are_refused():
    model = tiny_model("Llama")
    found, few = made_up(model), made_up(model, layers=(1, 2))
    for make, says in [
        (lambda: SEKA("keys.safetensors"), "Projections"),
        (lambda: SEKA(found, math.nan), "positive_gain is nan"),
        (lambda: SEKA(found, variance=1.5), "variance is 1.5"),
        (lambda: SEKA(found, layers=[7]), "layers names 7"),
        (lambda: SEKA(few, layers=[0]), "learned for layers \\[1, 2\\]"),
        (lambda: PRISM(found, gain=True), "gain is True"),
        (lambda: AdaSEKA(()), "experts is"),
        (lambda: AdaSEKA((found, few)), "experts\\[1\\] has layers"),
        (lambda: AdaSEKA(found, rank=17), "rank is 17"),
    ]:
        with pytest.raises(ValueError, match=says):
            make()
    with pytest.raises(ValueError, match="factors"), SEKA(found).applied_to(model, [[0.5, 0.0]]):
        pass
