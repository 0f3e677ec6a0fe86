"""CFG and CAD against transformers' guidance and two uncached forward passes."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from radar_core import CAD, CFG, SPA, SecondPrompt, Steered
from radar_kernels.testing import blend_oracle
from tests.models.oracle import BATCH, GREEDY, close_at_every_step, without
from tests.models.tiny import MIXED, full_logits, prompts, tiny_model

EIGHT = GREEDY | {"max_new_tokens": 8}
FAMILIES = ["Llama", "Qwen2", "GPT2", "Gemma2", "Mistral"]
SHORT, LONG = [6, 4], [29, 31]


def negative(lengths=SHORT):
    given = prompts(lengths, [[] for _ in lengths], seed=9)
    return given["input_ids"], given["attention_mask"]


@torch.no_grad()
def expected_logits(model, sequences, mask, second, second_mask, prompt, strength):
    """Blend two uncached passes: the prompt and the second prompt, each with what was generated."""
    tail = sequences[:, prompt:]
    full = full_logits(model, sequences, mask)
    other = full_logits(model, torch.cat([second, tail], dim=1), second_mask)
    return blend_oracle(full, other, torch.as_tensor(strength).float()).float()


def check(model, method, second, second_mask, anchors=None, **options):
    """Check every step of a generation against uncached passes over both prompts."""
    inputs = prompts(**BATCH)
    inputs.pop("anchors")
    with method.applied_to(model, anchors=anchors):
        out = model.generate(**inputs, **EIGHT | options)
    mask, prompt = inputs["attention_mask"], inputs["input_ids"].shape[1]

    def expected(ids):
        return expected_logits(model, ids, mask, second, second_mask, prompt, method.strength)

    close_at_every_step(out, expected, prompt, atol=3e-4)


# -- any second prompt -----------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [SHORT, LONG])
@pytest.mark.parametrize("family", FAMILIES)
def test_cfg_equals_two_uncached_passes(family, lengths):
    ids, mask = negative(lengths)
    check(tiny_model(family), CFG(1.7, ids, mask), ids, mask)


@pytest.mark.parametrize("family", list(MIXED))
def test_cfg_on_models_that_mix_windows(family):
    if family in ("GptOss", "Llama4Text"):
        implementation = "eager"
    else:
        implementation = "eager" if family == "Gemma2" else "sdpa"
    model = tiny_model(family, implementation, shape=MIXED[family])
    ids, mask = negative(LONG)
    check(model, CFG(1.7, ids, mask), ids, mask)


@pytest.mark.parametrize("options", [{"prefill_chunk_size": 4}, {"use_cache": False}])
@pytest.mark.parametrize("lengths", [SHORT, LONG])
@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_cfg_with_chunks_and_without_a_cache(family, lengths, options):
    ids, mask = negative(lengths)
    check(tiny_model(family), CFG([1.7, 0.4], ids, mask), ids, mask, **options)


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_one_negative_prompt_for_all_and_the_last_token_for_none(family):
    model = tiny_model(family)
    ids = torch.randint(1, 97, (1, 5), generator=torch.Generator().manual_seed(3))
    many, ones = ids.repeat(2, 1), torch.ones(2, 5, dtype=torch.long)
    check(model, CFG(1.7, ids), many, ones)
    last = prompts(**BATCH)["input_ids"][:, -1:]
    check(model, CFG(1.7), last, torch.ones_like(last))


@pytest.mark.parametrize("lengths", [SHORT, LONG, None])
@pytest.mark.parametrize("scale", [1.5, 3.0])
def test_cfg_equals_transformers_guidance(scale, lengths):
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    inputs.pop("anchors")
    ids, mask = negative(lengths) if lengths else (None, None)
    guided = model.generate(
        **inputs,
        **EIGHT,
        output_scores=True,
        guidance_scale=scale,
        negative_prompt_ids=ids,
        negative_prompt_attention_mask=mask,
    )
    with CFG(scale, ids, mask).applied_to(model):
        ours = model.generate(**inputs, **EIGHT)
    assert torch.equal(ours.sequences, guided.sequences)
    for logits, scores in zip(ours.logits, guided.scores, strict=True):
        difference = (logits.softmax(-1) - scores.softmax(-1)).abs().max()
        assert difference < 1e-5 * max(1, scale)


def test_a_masked_negative_prompt_is_spa():
    model, inputs = tiny_model("GPT2"), prompts(**BATCH)
    anchors = inputs.pop("anchors")
    hidden = inputs["attention_mask"] * ~anchors
    with SPA(1.7).applied_to(model, anchors=anchors):
        spa = model.generate(**inputs, **EIGHT)
    with CFG(1.7, inputs["input_ids"], hidden).applied_to(model):
        cfg = model.generate(**inputs, **EIGHT)
    assert torch.equal(spa.sequences, cfg.sequences)
    for one, other in zip(spa.logits, cfg.logits, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=0)


# -- context ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 4}, {"use_cache": False}])
@pytest.mark.parametrize("family", FAMILIES)
def test_cad_leaves_the_anchors_out(family, options):
    inputs = prompts(**BATCH)
    anchors = inputs["anchors"]
    second = without(inputs["input_ids"], inputs["attention_mask"], anchors)
    method = CAD([0.7, -0.4])
    check(tiny_model(family), method, *second, anchors=anchors, **options)


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_cad_leaves_spans_out(family):
    inputs = prompts(**BATCH)
    place = inputs["attention_mask"].cumsum(1) - 1
    context = ((place >= 2) & (place < 9)) | ((place >= 11) & (place < 12))
    second = without(inputs["input_ids"], inputs["attention_mask"], context)
    method = CAD(0.5, context=[(2, 9), (11, 12)])
    check(tiny_model(family), method, *second)


def test_cad_where_embeddings_are_given():
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    anchors, ids = inputs.pop("anchors"), inputs.pop("input_ids")
    embeds = model.get_input_embeddings()(ids).detach()
    with CAD(0.7).applied_to(model, anchors=anchors):
        given = model.generate(inputs_embeds=embeds, **inputs, **EIGHT)
        named = model.generate(input_ids=ids, **inputs, **EIGHT)
    for one, other in zip(given.logits, named.logits, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=0)


def test_cad_answers_a_chat(smollm2):
    steered = Steered(smollm2.model, smollm2.tokenizer, CAD(0.5))
    text = "The budget is 40,000 euros. What is the budget?"
    context = "The budget is 40,000 euros."
    reply = steered.chat(text, [context], max_new_tokens=4, do_sample=False)
    assert reply.text.startswith("€40,") and reply.usage.anchor_tokens == 12


# -- both ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [SHORT, LONG])
@pytest.mark.parametrize("family", ["Llama", "GPT2", "Gemma2"])
def test_beams_and_returned_sequences(family, lengths):
    """Beam search over a cache equals beam search without one."""
    model, inputs = tiny_model(family), prompts(**BATCH)
    inputs.pop("anchors")
    options = dict(num_beams=3, num_return_sequences=2, do_sample=False, max_new_tokens=6)
    with CFG(1.7, *negative(lengths)).applied_to(model):
        cached = model.generate(**inputs, **options)
        uncached = model.generate(**inputs, **options, use_cache=False)
    assert torch.equal(cached, uncached)


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_the_same_seed_draws_the_same(family):
    model, inputs = tiny_model(family), prompts(**BATCH)
    inputs.pop("anchors")
    drawn = []
    with CFG(1.7, *negative()).applied_to(model):
        for options in ({}, {}, {"use_cache": False}):
            torch.manual_seed(5)
            sampled = EIGHT | {"do_sample": True, "temperature": 0.7} | options
            drawn.append(model.generate(**inputs, **sampled).sequences)
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])


def test_a_prompt_alone_and_in_a_batch():
    model, inputs = tiny_model("GPT2"), prompts(**BATCH)
    inputs.pop("anchors")
    ids, mask = negative()
    with CFG(1.7, ids, mask).applied_to(model):
        together = model.generate(**inputs, **EIGHT)
    for row, (length, other) in enumerate(zip(BATCH["lengths"], SHORT, strict=True)):
        with CFG(1.7, ids[row : row + 1, -other:]).applied_to(model):
            alone = model.generate(inputs["input_ids"][row : row + 1, -length:], **EIGHT)
        for one, many in zip(alone.logits, together.logits, strict=True):
            torch.testing.assert_close(one[0], many[row], atol=2e-4, rtol=0)


def test_a_guard_keeps_the_unsteered_model():
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    inputs.pop("anchors")
    own = model.generate(**inputs, **EIGHT)
    with CFG(5.0, *negative(), guard=1e-6).applied_to(model):
        ours = model.generate(**inputs, **EIGHT)
    assert torch.equal(own.sequences, ours.sequences)


@torch.no_grad()
@pytest.mark.parametrize("lengths", [SHORT, LONG])
def test_a_loop_of_forward_passes(lengths):
    """Any code that calls the model: its cache, no positions given, several tokens at a time."""
    model, inputs = tiny_model("Qwen2"), prompts([20, 20], [[], []])
    inputs.pop("anchors")
    ids, mask = negative(lengths)
    new = torch.tensor([[3, 4, 5], [6, 7, 8]])
    with CFG(1.7, ids, mask).applied_to(model):
        first = model(**inputs)
        cache = first["cache"] if "cache" in first else first["past_key_values"]
        kept = copy.deepcopy(cache)
        both = model(new[:, :2], past_key_values=cache).logits
        last = model(new[:, 2:], past_key_values=cache).logits
        again = model(new[:, :1], past_key_values=kept).logits
        whole = torch.cat([inputs["input_ids"], new], dim=1)
        uncached = model(whole, use_cache=False).logits
    for end, logits in [(0, first.logits), (1, both[:, :1]), (1, again), (2, both), (3, last)]:
        expected = expected_logits(
            model, whole[:, : 20 + end], inputs["attention_mask"], ids, mask, 20, 1.7
        )
        torch.testing.assert_close(logits[:, -1], expected, atol=3e-4, rtol=0)
    torch.testing.assert_close(uncached[:, -1], last[:, -1], atol=3e-4, rtol=0)


@torch.no_grad()
def test_an_unsteered_cache_of_the_prompts_beginning_is_used():
    model, inputs = tiny_model("Llama"), prompts([20, 20], [[], []])
    inputs.pop("anchors")
    cache = DynamicCache()
    model(inputs["input_ids"][:, :12], past_key_values=cache)
    with CFG(1.7, *negative()).applied_to(model):
        fresh = model.generate(**inputs, **EIGHT)
        reused = model.generate(**inputs, **EIGHT, past_key_values=cache)
    for one, other in zip(fresh.logits, reused.logits, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=0)


def test_leaving_restores_the_model():
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    anchors = inputs.pop("anchors")
    before = model(**inputs).logits
    for method, given in [(CFG(2.0), None), (CAD(1.0), anchors)]:
        with method.applied_to(model, anchors=given):
            assert not torch.equal(model(**inputs).logits[:, -1], before[:, -1])
        assert "generate" not in vars(model)
        assert torch.equal(model(**inputs).logits, before)


def test_nothing_runs_where_nothing_is_steered():
    model, anchors = tiny_model("Llama"), prompts(**BATCH)["anchors"]
    for method, given in [(CFG(1.0), None), (CAD(0.0), anchors), (CAD(0.5), None)]:
        with method.applied_to(model, anchors=given) as steering:
            assert not steering.active


# -- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CFG(2.0, [[1, 2], [3]]), "rows of one length"),
        (lambda: CFG(2.0, 3), "expected token ids"),
        (lambda: CFG(2.0, [[1, 2]], [[1, 0]]), "pad on the left"),
        (lambda: CFG(2.0, [[1, 2]], [[1]]), "attention mask 1 of 1"),
        (lambda: CFG(2.0, [[1, 2]], [[2, 1]]), "values besides 0 and 1"),
        (lambda: CFG(2.0, None, [[1]]), "no token ids"),
        (lambda: CFG("much"), "strength is 'much'"),
        (lambda: CAD("much"), "alpha is 'much'"),
        (lambda: CAD(0.5, context=[(3, 2)]), "context is"),
        (lambda: CAD(0.5, context=[]), "context is"),
        (lambda: SecondPrompt(2.0, guard=2), "confidence is 2"),
    ],
)
def test_what_cannot_be_meant_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (CFG(2.0), {"cache_implementation": "static"}, "DynamicCache"),
        (CFG(2.0), {"cache_implementation": "quantized"}, "DynamicCache"),
        (CFG(2.0), {"guidance_scale": 2.0}, "guidance_scale"),
        (CFG(2.0, [[1]] * 3), {}, "3 rows"),
        (CFG([2.0] * 3), {}, "strength has 3 rows"),
        (CAD(0.5, context=[(0, 18)]), {}, "only 17 tokens"),
        (CAD(0.5, context=[(0, 17)]), {}, "leaves nothing"),
    ],
)
def test_what_cannot_be_steered_is_refused(method, options, message):
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    inputs.pop("anchors")
    with method.applied_to(model), pytest.raises(ValueError, match=message):
        model.generate(**inputs, **EIGHT | options)


def test_anchors_beside_a_second_prompt_and_unknown_tokens_are_refused():
    model, anchors = tiny_model("Llama"), prompts(**BATCH)["anchors"]
    for method, given, message in [
        (CFG(2.0, [[1]]), anchors, "leave anchors"),
        (CFG(2.0, [[97]]), None, "token 97"),
        (CFG(2.0, [[-1, 3]]), None, "token -1"),
    ]:
        with pytest.raises(ValueError, match=message), method.applied_to(model, anchors=given):
            pass


@torch.no_grad()
def test_a_cache_without_the_second_prompt_is_refused():
    model, inputs = tiny_model("Llama"), prompts([20, 20], [[3], [4]])
    anchors = inputs.pop("anchors")
    whole = torch.cat([inputs["input_ids"], torch.tensor([[3], [4]])], dim=1)
    cache = DynamicCache()
    model(inputs["input_ids"], past_key_values=cache)
    with CAD(0.5).applied_to(model, anchors=anchors), pytest.raises(ValueError, match="without"):
        model(whole[:, -1:], past_key_values=cache)
    with CFG(2.0).applied_to(model):
        steered = model(inputs["input_ids"])
        steered_cache = steered["cache"] if "cache" in steered else steered["past_key_values"]
        with pytest.raises(ValueError, match="carried over"):
            model.generate(whole, past_key_values=steered_cache)
    with SPA(2.0).applied_to(model, anchors=anchors), pytest.raises(ValueError, match="CFG or CAD"):
        model(whole[:, -1:], past_key_values=steered_cache)
