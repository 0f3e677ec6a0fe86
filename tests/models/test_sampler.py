"""Sampling by one operator: the same distribution as transformers' own, whatever the batch."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from radar_core import SPA, AttentionBias, NoSteering, Steered
from tests.models.tiny import prompts, tiny_model

WARPED = dict(do_sample=True, temperature=0.8, top_k=12, top_p=0.9, min_p=0.02)


@pytest.fixture(scope="module")
def model():
    return tiny_model("Llama")


@pytest.fixture
def inputs():
    return prompts([23, 17], [[3, 4, 5, 12, 20], [2, 9, 10]])


def test_draws_what_transformers_would_draw_as_often(model, inputs):
    """First tokens of many rows against the probabilities that transformers' processors leave."""
    one = {key: value[:1] for key, value in inputs.items()}
    options = dict(**WARPED, max_new_tokens=1, output_scores=True, return_dict_in_generate=True)
    method = AttentionBias(2.0)
    expected = Steered(model, method=method).generate(**one, **options).scores[0][0].softmax(-1)
    rows = 4000
    many = {key: value.repeat(rows, 1) for key, value in one.items()}
    out = Steered(model, method=method, sampler="radar").generate(**many, **options, seed=11)
    found = torch.bincount(out.sequences[:, -1], minlength=97) / rows
    assert found[expected == 0].sum() == 0 and (expected > 0).sum() > 4
    deviation = (expected * (1 - expected) / rows).sqrt()
    assert ((found - expected).abs() <= 4.5 * deviation).all()


@pytest.mark.parametrize("method", [SPA(1.7), AttentionBias(2.0), NoSteering()])
def test_a_seed_draws_the_same_alone_and_in_a_batch(model, inputs, method):
    steered = Steered(model, method=method, sampler="radar")
    options = dict(WARPED, max_new_tokens=10)
    together = steered.generate(**inputs, **options, seed=3)
    assert torch.equal(together, steered.generate(**inputs, **options, seed=3))
    assert not torch.equal(together, steered.generate(**inputs, **options, seed=4))
    second = {key: value[1:, -17:] for key, value in inputs.items()}
    alone = steered.generate(**second, **options, seed=4)
    assert torch.equal(alone[0, 17:], together[1, 23:])


def test_every_step_draws_anew(model, inputs):
    """With flat logits a token would come again and again if all steps drew alike."""
    steered = Steered(model, method=SPA(1.7), sampler="radar")
    out = steered.generate(
        **inputs, do_sample=True, temperature=50.0, top_k=0, max_new_tokens=30, seed=0
    )
    assert all(len(set(row[23:].tolist())) > 12 for row in out)


def test_without_a_seed_torchs_generator_gives_one(model, inputs):
    steered = Steered(model, method=SPA(1.7), sampler="radar")
    outs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        outs.append(steered.generate(**inputs, **WARPED, max_new_tokens=10))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


def test_greedy_generation_and_stopping_stay_transformers_own(model, inputs):
    own, radar = (Steered(model, method=SPA(1.7), sampler=s) for s in ("transformers", "radar"))
    for beams in (1, 2):
        greedy = dict(do_sample=False, max_new_tokens=8, num_beams=beams)
        assert torch.equal(own.generate(**inputs, **greedy), radar.generate(**inputs, **greedy))
    drawn = radar.generate(**inputs, **WARPED, max_new_tokens=8, seed=1)
    ended = radar.generate(
        **inputs, **WARPED, max_new_tokens=8, seed=1, eos_token_id=int(drawn[0, 25])
    )
    assert torch.equal(ended[0, :26], drawn[0, :26]) and (ended[0, 26:] == 0).all()


class Nothing(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"repetition_penalty": 1.2}, "RepetitionPenaltyLogitsProcessor is active"),
        ({"typical_p": 0.9}, "TypicalLogitsWarper is active"),
        ({"logits_processor": LogitsProcessorList([Nothing()])}, "Nothing is active"),
        ({"num_beams": 2}, "num_beams is 2"),
    ],
)
def test_what_it_cannot_do_is_refused(model, inputs, options, words):
    steered = Steered(model, method=SPA(1.7), sampler="radar")
    calls = []
    handle = model.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match=words):
        steered.generate(**inputs, **WARPED, **options, max_new_tokens=2)
    handle.remove()
    assert not calls and "_get_logits_processor" not in vars(model)


def test_unknown_samplers_and_stray_seeds_are_refused(model, inputs):
    with pytest.raises(ValueError, match="sampler is 'numpy'"):
        Steered(model, sampler="numpy")
    with pytest.raises(ValueError, match="seed is for"):
        Steered(model).generate(**inputs, max_new_tokens=1, seed=1)
