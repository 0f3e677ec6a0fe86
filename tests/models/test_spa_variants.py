"""SPA's variants against uncached forward passes: embedding masks, modulation, guards, direct."""

from __future__ import annotations

import pickle

import pytest
import torch

from radar_core import SPA, AttentionBias, Guard, Steered
from radar_kernels.testing import blend_oracle
from tests.models.oracle import BATCH, GREEDY, Oracle, close_at_every_step, direct_logits
from tests.models.tiny import (
    FAMILIES,
    eager_twin,
    full_logits,
    hidden_logits,
    prompts,
    tiny_model,
)

EIGHT = GREEDY | {"max_new_tokens": 8}
MASK_TOKEN = 7
CACHES = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "chunks": {"prefill_chunk_size": 4},
    "none": {"use_cache": False},
}


def check(model, method, inputs=None, **options):
    """Check every step of a generation against uncached passes."""
    inputs = inputs or prompts(**BATCH)
    asked = {k: v for k, v in inputs.items() if k != "anchors"}
    with method.applied_to(model, anchors=inputs["anchors"]):
        out = model.generate(**asked, **EIGHT | options)
    oracle = Oracle(model, method, inputs["anchors"], inputs["attention_mask"])
    close_at_every_step(out, oracle, asked["input_ids"].shape[1], atol=3e-4)


# -- embeddings instead of anchors -----------------------------------------------------------------


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_mask_token_takes_the_place_of_each_anchor(family):
    method = SPA(1.7, masking="embedding", mask_token_id=MASK_TOKEN)
    check(tiny_model(family), method)


@pytest.mark.parametrize("cache", list(CACHES))
@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_mask_tokens_with_every_cache(family, cache):
    method = SPA([1.7, 0.3], masking="embedding", mask_token_id=MASK_TOKEN)
    check(tiny_model(family), method, **CACHES[cache])


@pytest.mark.parametrize("chunks", [{}, {"prefill_chunk_size": 1}])
def test_mask_tokens_where_embeddings_are_given(chunks):
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    anchors, ids = inputs.pop("anchors"), inputs.pop("input_ids")
    embeds = model.get_input_embeddings()(ids).detach()
    method = SPA(1.7, masking="embedding", mask_token_id=MASK_TOKEN)
    with method.applied_to(model, anchors=anchors):
        given = model.generate(inputs_embeds=embeds, **inputs, **EIGHT)
        named = model.generate(input_ids=ids, **inputs, **EIGHT, **chunks)
    for one, other in zip(given.logits, named.logits, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=0)


def test_which_mask_token_it_is(smollm2):
    model = tiny_model("Llama")
    anchors = prompts(**BATCH)["anchors"]

    class Tokenizer:
        mask_token_id, pad_token_id, eos_token_id = None, 5, 6

    for method, expected in [
        (SPA(masking="embedding", mask_token_id=3), 3),
        (SPA(masking="embedding", tokenizer=Tokenizer()), 5),
        (SPA(masking="embedding"), 0),  # the model's padding token
        (SPA(), None),
    ]:
        with method.applied_to(model, anchors=anchors) as steering:
            assert steering.method.mask_token_id == expected
    model.config.pad_token_id = None
    with (
        pytest.raises(ValueError, match="mask_token_id="),
        SPA(masking="embedding").applied_to(model, anchors=anchors),
    ):
        pass
    steered = Steered(smollm2.model, smollm2.tokenizer, SPA(masking="embedding"))
    told = steered.method.settled(smollm2.model.config)
    assert told.mask_token_id == smollm2.tokenizer.pad_token_id


@pytest.mark.parametrize("cache", list(CACHES))
def test_the_last_token_may_be_anchored(cache):
    model, inputs = tiny_model("Llama"), prompts([20], [[3, 19]])
    embedding = SPA(1.7, masking="embedding", mask_token_id=MASK_TOKEN)
    direct = SPA(1.7, branch="direct")
    for method in (embedding, direct):
        check(model, method, inputs, **CACHES[cache])


# -- modulation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("masking", ["attention", "embedding"])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "GPT2", "Gemma2"])
def test_modulated(family, masking):
    embedding = masking == "embedding"
    method = SPA(
        [6.0, -1.5],
        modulated=True,
        masking=masking,
        mask_token_id=MASK_TOKEN if embedding else None,
    )
    check(tiny_model(family), method)


def test_modulated_differs_from_plain():
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    anchors = inputs.pop("anchors")
    logits = []
    for modulated in (False, True):
        with SPA(3.0, modulated=modulated).applied_to(model, anchors=anchors):
            logits.append(model(**inputs).logits[:, -1])
    assert (logits[0] - logits[1]).abs().max() > 0.1


# -- direct ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", list(FAMILIES))
def test_direct_hides_the_anchors_from_the_answer_alone(family):
    check(tiny_model(family), SPA(1.7, branch="direct"))


@pytest.mark.parametrize("cache", list(CACHES))
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2"])
def test_direct_with_every_cache(family, cache):
    method = SPA([1.7, 0.3], branch="direct")
    check(tiny_model(family), method, **CACHES[cache])


def test_direct_differs_from_a_second_branch():
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    asked = inputs["input_ids"], inputs["attention_mask"], inputs["anchors"]
    direct = direct_logits(eager_twin(model), *asked)
    assert (direct - hidden_logits(model, *asked)).abs().max() > 0.1


def test_direct_runs_the_prompt_once():
    model, inputs = tiny_model("Llama"), prompts([20], [[2, 9, 14]])
    anchors = inputs.pop("anchors")
    seen = []
    handle = model.model.layers[0].register_forward_pre_hook(
        lambda module, args: seen.append(tuple(args[0].shape[:2]))
    )
    with SPA(2.0, branch="direct").applied_to(model, anchors=anchors):
        model.generate(**inputs, max_new_tokens=3, do_sample=False)
    handle.remove()
    assert seen == [(1, 21), (2, 1), (2, 1)]


@torch.no_grad()
def test_direct_takes_an_unsteered_cache_of_the_prompt():
    """All but the last token may have run before, with the anchors in sight."""
    model, inputs = tiny_model("Llama"), prompts([20], [[2, 9, 14]])
    anchors = inputs.pop("anchors")
    method = SPA(2.0, branch="direct")
    with method.applied_to(model, anchors=anchors):
        whole = model.generate(**inputs, **EIGHT)
    before = model(inputs["input_ids"][:, :19], use_cache=True)
    cache = before["cache"] if "cache" in before else before["past_key_values"]
    with method.applied_to(model, anchors=anchors):
        again = model.generate(**inputs, **EIGHT, past_key_values=cache)
    assert torch.equal(again.sequences, whole.sequences)
    for one, other in zip(again.logits, whole.logits, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=0)


# -- guards ----------------------------------------------------------------------------------------


def guarded_at_every_step(model, method):
    """Check a guarded run against the rule applied to uncached passes; return who was alone."""
    inputs = prompts(**BATCH)
    anchors = inputs.pop("anchors")
    with method.applied_to(model, anchors=anchors):
        out = model.generate(**inputs, **EIGHT)
    prompt, alone = inputs["input_ids"].shape[1], []
    for step, logits in enumerate(out.logits):
        ids = out.sequences[:, : prompt + step]
        full = full_logits(model, ids, inputs["attention_mask"])
        hidden = hidden_logits(model, ids, inputs["attention_mask"], anchors)
        steered = blend_oracle(full, hidden, torch.tensor(method.strength)).float()
        probability = full.double().softmax(-1)
        first = probability.amax(-1)
        kept = torch.zeros(len(first), dtype=torch.bool)
        if method.guard.confidence is not None:
            kept |= first >= method.guard.confidence
        if method.guard.plausibility is not None:
            chosen = probability.gather(-1, steered.argmax(-1, keepdim=True))[:, 0]
            kept |= chosen < method.guard.plausibility * first
        expected = torch.where(kept[:, None], full, steered)
        torch.testing.assert_close(logits.float(), expected, atol=3e-4, rtol=0)
        alone += kept.tolist()
    return alone


@pytest.mark.parametrize("rule", [{"confidence": 0.1}, {"plausibility": 0.7}])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "GPT2", "Gemma2"])
def test_a_guard_leaves_sure_tokens_alone(family, rule):
    alone = guarded_at_every_step(tiny_model(family), SPA(1.7, guard=Guard(**rule)))
    if family != "Gemma2":  # which is sure of every token here
        assert any(alone) and not all(alone)


def test_a_guard_of_every_token_is_the_unsteered_model():
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    anchors = inputs.pop("anchors")
    own = model.generate(**inputs, **EIGHT)
    with SPA(5.0, guard=1e-6).applied_to(model, anchors=anchors):
        ours = model.generate(**inputs, **EIGHT)
    assert torch.equal(own.sequences, ours.sequences)
    assert SPA(guard=0.5).guard == Guard(confidence=0.5)


# -- all of them -----------------------------------------------------------------------------------

VARIANTS = {
    "embedding": SPA(2.0, masking="embedding", mask_token_id=MASK_TOKEN),
    "modulated": SPA(5.0, modulated=True),
    "direct": SPA(2.0, branch="direct"),
    "guarded": SPA(2.0, guard=Guard(0.6, 0.3)),
}


@pytest.mark.parametrize("name", list(VARIANTS))
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_beams_and_returned_sequences(family, name):
    """Beam search over a cache equals beam search without one."""
    model, inputs = tiny_model(family), prompts(**BATCH)
    anchors = inputs.pop("anchors")
    options = dict(num_beams=3, num_return_sequences=2, do_sample=False, max_new_tokens=6)
    with VARIANTS[name].applied_to(model, anchors=anchors):
        cached = model.generate(**inputs, **options)
        uncached = model.generate(**inputs, **options, use_cache=False)
    assert torch.equal(cached, uncached)


@pytest.mark.parametrize("name", list(VARIANTS))
def test_the_same_seed_draws_the_same(name):
    model, inputs = tiny_model("Qwen2"), prompts(**BATCH)
    anchors = inputs.pop("anchors")
    drawn = []
    with VARIANTS[name].applied_to(model, anchors=anchors):
        for options in ({}, {}, {"use_cache": False}):
            torch.manual_seed(5)
            sampled = EIGHT | {"do_sample": True, "temperature": 0.7} | options
            drawn.append(model.generate(**inputs, **sampled).sequences)
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("name", list(VARIANTS))
def test_a_prompt_alone_and_in_a_batch(name):
    model, inputs = tiny_model("GPT2"), prompts(**BATCH)
    anchors = inputs.pop("anchors")
    with VARIANTS[name].applied_to(model, anchors=anchors):
        together = model.generate(**inputs, **EIGHT)
    for row, length in enumerate(BATCH["lengths"]):
        ids = inputs["input_ids"][row : row + 1, -length:]
        with VARIANTS[name].applied_to(model, anchors=anchors[row : row + 1, -length:]):
            alone = model.generate(ids, **EIGHT)
        for one, many in zip(alone.logits, together.logits, strict=True):
            torch.testing.assert_close(one[0], many[row], atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", list(VARIANTS))
def test_leaving_restores_the_model(name):
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    anchors = inputs.pop("anchors")
    before = model(**inputs).logits
    with VARIANTS[name].applied_to(model, anchors=anchors):
        assert not torch.equal(model(**inputs).logits[:, -1], before[:, -1])
    assert torch.equal(model(**inputs).logits, before)
    assert pickle.loads(pickle.dumps(VARIANTS[name])) == VARIANTS[name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(masking="tokens"), "masking is 'tokens'"),
        (dict(branch="third"), "branch is 'third'"),
        (dict(modulated=2), "modulated is 2"),
        (dict(mask_token_id=3), 'masking="embedding"'),
        (dict(masking="embedding", mask_token_id=-1), "mask_token_id is -1"),
        (dict(masking="embedding", branch="direct"), "share the prompt"),
        (dict(guard=0.0), "confidence is 0.0"),
        (dict(guard="sure"), "guard is 'sure'"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SPA(1.4, **arguments)


def test_representations_tell_what_is_not_by_default():
    method = SPA(2.0, branch="direct", guard=0.9)
    said = "SPA(strength=2.0, guard=Guard(confidence=0.9, plausibility=None), branch='direct')"
    assert repr(method) == said and eval(said) == method


def test_a_guard_needs_a_rule_and_biases_take_none():
    with pytest.raises(ValueError, match="no rule"):
        Guard()
    with pytest.raises(TypeError):
        AttentionBias(2.0, guard=0.9)


def test_a_mask_token_outside_the_vocabulary_is_refused():
    model = tiny_model("Llama")
    method = SPA(masking="embedding", mask_token_id=97)
    anchors = prompts(**BATCH)["anchors"]
    with pytest.raises(ValueError, match="97 tokens"), method.applied_to(model, anchors=anchors):
        pass
