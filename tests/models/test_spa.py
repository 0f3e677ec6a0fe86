"""SPA against uncached two-pass computations and transformers' classifier-free guidance."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from radar_core import SPA
from tests.models.oracle import BATCH, GREEDY, Oracle, close_at_every_step
from tests.models.tiny import FAMILIES, prompts, tiny_model

TWELVE = GREEDY | {"max_new_tokens": 12}


def check(model, inputs, strength, **options):
    """Check every step of a generation against uncached passes."""
    asked = {k: v for k, v in inputs.items() if k != "anchors"}
    method = SPA(strength)
    with method.applied_to(model, anchors=inputs["anchors"]):
        out = model.generate(**asked, **TWELVE, **options)
    oracle = Oracle(model, method, inputs["anchors"], inputs["attention_mask"])
    close_at_every_step(out, oracle, asked["input_ids"].shape[1], atol=2e-4)
    return out


@pytest.mark.smoke
@pytest.mark.parametrize("family", list(FAMILIES))
def test_equals_two_uncached_passes(family):
    check(tiny_model(family), prompts(**BATCH), 1.7)


@pytest.mark.parametrize("strength", [-1.0, 0.0, 0.5, 3.0])
def test_strengths(strength):
    check(tiny_model("Llama"), prompts(**BATCH), strength)


def test_a_strength_for_every_row():
    check(tiny_model("Llama"), prompts(**BATCH), [1.0, 2.5])


def test_first_token_anchored():
    check(tiny_model("Llama"), prompts([20], [[0, 1, 7]]), 1.5)


@pytest.mark.smoke
@pytest.mark.parametrize(
    "options",
    [
        {"cache_implementation": "static", "disable_compile": True},
        {"prefill_chunk_size": 4},
        {"use_cache": False},
    ],
)
@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_caches(family, options):
    check(tiny_model(family), prompts(**BATCH), 1.7, **options)


@pytest.mark.parametrize("strength", [1.4, 3.0])
def test_equals_transformers_guidance(strength):
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    anchors = inputs.pop("anchors")
    guided = model.generate(
        **inputs,
        **TWELVE,
        output_scores=True,
        guidance_scale=strength,
        negative_prompt_ids=inputs["input_ids"],
        negative_prompt_attention_mask=inputs["attention_mask"] * ~anchors,
    )
    with SPA(strength).applied_to(model, anchors=anchors):
        ours = model.generate(**inputs, **TWELVE)
    # Guidance counts positions from the cache, which rotary embeddings do not notice.
    assert torch.equal(ours.sequences, guided.sequences)
    for logits, scores in zip(ours.logits, guided.scores, strict=True):
        difference = (logits.softmax(-1) - scores.softmax(-1)).abs().max()
        assert difference < 1e-5 * max(1, strength)


def test_beams_and_returned_sequences():
    """Beam search over a cache equals beam search without one."""
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    anchors = inputs.pop("anchors")
    options = dict(num_beams=3, num_return_sequences=2, do_sample=False, max_new_tokens=8)
    with SPA(2.0).applied_to(model, anchors=anchors):
        cached = model.generate(**inputs, **options)
        uncached = model.generate(**inputs, **options, use_cache=False)
    assert torch.equal(cached, uncached)


def test_sampling_draws_from_the_blend():
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    anchors = inputs.pop("anchors")
    sampled = dict(TWELVE, do_sample=True, temperature=0.7, top_k=20)
    with SPA(2.0).applied_to(model, anchors=anchors):
        torch.manual_seed(5)
        ours = model.generate(**inputs, **sampled)
        torch.manual_seed(5)
        again = model.generate(**inputs, **sampled)
    assert torch.equal(ours.sequences, again.sequences)
    prompt = inputs["input_ids"].shape[1]
    expected = Oracle(model, SPA(2.0), anchors, inputs["attention_mask"])(ours.sequences[:, :-1])
    torch.testing.assert_close(ours.logits[-1], expected, atol=2e-4, rtol=0)
    assert ours.sequences.shape[1] == prompt + 12


def test_streaming():
    class Collect(BaseStreamer):
        def __init__(self):
            self.tokens = []

        def put(self, value):
            self.tokens.append(value.flatten())

        def end(self):
            self.ended = True

    model, inputs = tiny_model("Llama"), prompts([20], [[5, 6]])
    anchors = inputs.pop("anchors")
    streamer = Collect()
    with SPA(2.0).applied_to(model, anchors=anchors):
        out = model.generate(**inputs, **TWELVE, streamer=streamer)
    assert streamer.ended and torch.equal(torch.cat(streamer.tokens), out.sequences[0])


def test_a_plain_forward_gives_blended_logits_of_every_token():
    model, inputs = tiny_model("Llama"), prompts([20], [[5, 6]])
    anchors = inputs.pop("anchors")
    with SPA(2.0).applied_to(model, anchors=anchors):
        steered = model(**inputs).logits
    assert steered.shape == (1, 20, 97)
    expected = Oracle(model, SPA(2.0), anchors)(inputs["input_ids"])
    torch.testing.assert_close(steered[:, -1], expected, atol=2e-4, rtol=0)


def test_a_cache_with_the_anchors_in_it_is_refused():
    model, inputs = tiny_model("Llama"), prompts([20], [[5, 6]])
    anchors = inputs.pop("anchors")
    out = model(**inputs, use_cache=True)
    cache = out["cache"] if "cache" in out else out["past_key_values"]
    with (
        SPA(2.0).applied_to(model, anchors=anchors),
        pytest.raises(ValueError, match="anchors visible"),
    ):
        model.generate(
            torch.cat([inputs["input_ids"], torch.tensor([[3]])], 1), past_key_values=cache
        )


@pytest.mark.parametrize("family", list(FAMILIES))
def test_batch_gives_each_prompts_own_result(family):
    model, inputs = tiny_model(family), prompts(**BATCH)
    anchors = inputs.pop("anchors")
    with SPA(1.7).applied_to(model, anchors=anchors):
        together = model.generate(**inputs, **TWELVE)
    for row, length in enumerate(BATCH["lengths"]):
        ids = inputs["input_ids"][row : row + 1, -length:]
        with SPA(1.7).applied_to(model, anchors=anchors[row : row + 1, -length:]):
            alone = model.generate(ids, attention_mask=torch.ones_like(ids), **TWELVE)
        for one, many in zip(alone.logits, together.logits, strict=True):
            torch.testing.assert_close(one[0], many[row], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_what_both_branches_share_runs_once(family):
    """Plain causal models run prompt and rest as one row, sliding ones the shared part first."""
    model, inputs = tiny_model(family), prompts([20], [[8, 9, 14]])
    anchors = inputs.pop("anchors")
    seen = []
    handle = model.model.layers[0].register_forward_pre_hook(
        lambda module, args: seen.append(tuple(args[0].shape[:2]))
    )
    with SPA(2.0).applied_to(model, anchors=anchors):
        model.generate(**inputs, max_new_tokens=3, do_sample=False)
    handle.remove()
    prefill = [(1, 20 + 12)] if family == "Llama" else [(1, 8), (2, 12)]
    assert seen == [*prefill, (2, 1), (2, 1)]


def test_a_packed_prompt_equals_an_unshared_one():
    """Left padding and several rows, against prefilling both branches in full at every step."""
    for family, implementation in [("Llama", "sdpa"), ("Qwen3", "eager"), ("GPT2", "sdpa")]:
        model, inputs = tiny_model(family, implementation), prompts(**BATCH)
        anchors = inputs.pop("anchors")
        with SPA([2.0, 0.5]).applied_to(model, anchors=anchors):
            packed = model.generate(**inputs, **TWELVE)
            whole = model.generate(**inputs, **TWELVE, use_cache=False)
        assert torch.equal(packed.sequences, whole.sequences)
        for one, other in zip(packed.logits, whole.logits, strict=True):
            torch.testing.assert_close(one, other, atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_outputs_may_be_tuples(family):
    implementation = "eager" if family == "Gemma2" else "sdpa"
    model, inputs = tiny_model(family, implementation), prompts(**BATCH)
    anchors = inputs.pop("anchors")
    with torch.no_grad(), SPA(2.0).applied_to(model, anchors=anchors):
        expected = model(**inputs).logits
        assert torch.equal(expected, model(**inputs, return_dict=False)[0])


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_the_loss_is_of_the_blended_logits_or_refused(family):
    implementation = "eager" if family == "Gemma2" else "sdpa"
    model, inputs = tiny_model(family, implementation), prompts(**BATCH)
    anchors, labels = inputs.pop("anchors"), inputs["input_ids"]
    with torch.no_grad(), SPA(2.0).applied_to(model, anchors=anchors):
        if family == "Gemma2":
            with pytest.raises(ValueError, match="compute the loss from the steered logits"):
                model(**inputs, labels=labels)
            return
        out = model(**inputs, labels=labels)
    expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].mT, labels[:, 1:])
    torch.testing.assert_close(out.loss, expected)
