"""Steering a real model, held against transformers' own guidance and eager attention."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from radar_core import SPA, AttentionBias, Steered
from tests.models.tiny import biased_logits, eager_twin

TEXTS = [
    "The budget is 40,000 euros. The venue holds 300 people. Catering has been booked for June.",
    "Ana leads the project. The deadline is the 3rd of May.",
]
ANCHORS = ["The budget is 40,000 euros.", "The deadline is the 3rd of May."]
QUESTIONS = ["What is the budget?", "When is the deadline?"]
OPTIONS = dict(do_sample=False, output_logits=True, return_dict_in_generate=True)


class Follow(LogitsProcessor):
    """Forces given tokens, so that two runs can be compared at every step of the same text."""

    def __init__(self, sequences):
        self.sequences = sequences

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, float("-inf"))
        forced.scatter_(1, self.sequences[:, input_ids.shape[1], None], 0.0)
        return forced


@pytest.fixture
def steered(smollm2):
    return Steered(smollm2.model, smollm2.tokenizer, SPA(1.4))


def conversation(row):
    return [{"role": "user", "content": f"{TEXTS[row]} {QUESTIONS[row]}"}]


def batch(steered, rows=(0, 1)):
    return steered.prepare([conversation(row) for row in rows], [[ANCHORS[row]] for row in rows])


@pytest.mark.parametrize(("strength", "rows"), [(1.4, (0,)), (3.0, (0, 1))])
def test_spa_equals_transformers_guidance_over_64_steps(steered, strength, rows):
    inputs = batch(steered, rows)
    anchors = inputs.pop("anchors")
    model = steered.model
    length = dict(max_new_tokens=64, min_new_tokens=64)
    guided = model.generate(
        **inputs,
        **OPTIONS,
        **length,
        output_scores=True,
        guidance_scale=strength,
        negative_prompt_ids=inputs["input_ids"],
        negative_prompt_attention_mask=inputs["attention_mask"] * ~anchors,
    )
    with SPA(strength).applied_to(model, anchors):
        ours = model.generate(**inputs, **OPTIONS, **length)
    assert torch.equal(ours.sequences, guided.sequences)
    ends = model.generation_config.eos_token_id
    for logits, scores in zip(ours.logits, guided.scores, strict=True):
        logits = logits.clone()
        logits[:, ends] = float("-inf")  # min_new_tokens forbids the end in the scores
        difference = (logits.softmax(-1) - scores.softmax(-1)).abs().max()
        assert difference < 1e-5 * max(1, strength)


def test_bias_equals_eager_attention_at_prefill_and_every_step(steered):
    inputs = batch(steered)
    anchors = inputs.pop("anchors")
    model, heads = steered.model, steered.model.config.num_attention_heads
    twin = eager_twin(model)
    with AttentionBias(2.0).applied_to(model, anchors):
        out = model.generate(**inputs, **OPTIONS, max_new_tokens=6, min_new_tokens=6)
    bias = {layer: torch.full((heads,), 2.0) for layer in range(model.config.num_hidden_layers)}
    prompt = inputs["input_ids"].shape[1]
    for step, logits in enumerate(out.logits):
        ids = out.sequences[:, : prompt + step]
        expected = biased_logits(twin, ids, inputs["attention_mask"], anchors, bias)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("strength", [1.4, 3.0])
def test_a_batch_is_as_close_to_its_prompts_as_the_unsteered_model_allows(steered, strength):
    """The blend amplifies rounding by |w| + |w - 1|; twice that is the bound."""
    model, inputs = steered.model, batch(steered)
    anchors = inputs.pop("anchors")
    prompt = inputs["input_ids"].shape[1]
    sequences = model.generate(**inputs, do_sample=False, max_new_tokens=12, min_new_tokens=12)

    def largest_difference(method):
        worst = 0.0
        follow = dict(OPTIONS, max_new_tokens=sequences.shape[1] - prompt)
        with method.applied_to(model, anchors):
            together = model.generate(
                **inputs, **follow, logits_processor=LogitsProcessorList([Follow(sequences)])
            )
        for row in range(2):
            own = inputs["attention_mask"][row].bool()
            start = int((~own).sum())
            with method.applied_to(model, anchors[row : row + 1, start:]):
                alone = model.generate(
                    inputs["input_ids"][row : row + 1, start:],
                    **follow,
                    logits_processor=LogitsProcessorList(
                        [Follow(sequences[row : row + 1, start:])]
                    ),
                )
            for one, many in zip(alone.logits, together.logits, strict=True):
                worst = max(worst, float((one[0] - many[row]).abs().max()))
        return worst

    own = largest_difference(SPA(1.0))
    assert largest_difference(SPA(strength)) <= 2 * (abs(strength) + abs(strength - 1)) * own


def test_bfloat16_agrees_with_float32_as_well_as_eager_attention_does(smollm2, steered):
    exact = smollm2.model
    rough = type(exact)(exact.config).eval()
    rough.load_state_dict(exact.state_dict())
    rough.to(torch.bfloat16)
    twin, rough_twin = eager_twin(exact), eager_twin(rough)
    heads, layers = exact.config.num_attention_heads, exact.config.num_hidden_layers
    # Squared errors, summed: one prompt's rounding may be twice another's. A shift of all logits is
    # none.
    own = {"bias": 0.0, "spa": 0.0}
    eager = 0.0
    for row in (0, 1):
        inputs = batch(steered, (row,))
        anchors = inputs.pop("anchors")

        def logits(model, method, inputs=inputs, anchors=anchors):
            with method.applied_to(model, anchors), torch.no_grad():
                return model(**inputs, logits_to_keep=1).logits.float().flatten()

        for bias in (1.0, 2.0, 3.0):
            everywhere = {layer: torch.full((heads,), bias) for layer in range(layers)}
            expected, rounded = (
                biased_logits(
                    one, inputs["input_ids"], inputs["attention_mask"], anchors, everywhere
                )
                .float()
                .flatten()
                for one in (twin, rough_twin)
            )
            eager += float((rounded - expected).var())
            own["bias"] += float((logits(rough, AttentionBias(bias)) - expected).var())
            spa = SPA(1.0 + bias / 5)
            own["spa"] += float((logits(rough, spa) - logits(exact, spa)).var())
    assert own["bias"] <= 1.5**2 * eager
    assert own["spa"] <= (1.5 * (1.6 + 0.6)) ** 2 * eager
