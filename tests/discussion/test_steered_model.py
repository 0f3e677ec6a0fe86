"""Requests that wait at the same time are answered as one batch, each as if it were alone."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from transformers import StoppingCriteriaList

from radar_core import SPA, Anchor, AttentionBias, Steered
from radar_core.discussion import Request, SteeredModel

TEXTS = [
    "Ana: the budget is 40,000 euros. Ben: the venue holds 300 people. What is the budget?",
    "Cleo: the train leaves at nine. When does it leave?",
    "Dora: three boxes are blue, and the long one that stands by the window is green. Which is it?",
    "Emil: nothing to report.",
]
SPANS = [(0, 32), (0, 30), (35, 80), (0, 8)]
BIAS = AttentionBias(3.0)


def request(row, anchored=True, **changes):
    messages = [{"role": "user", "content": TEXTS[row]}]
    anchors = [Anchor(0, *SPANS[row])] if anchored else []
    return Request(**(dict(messages=messages, max_new_tokens=12, anchors=anchors) | changes))


def ask(model, *requests, errors=False):
    async def together():
        return await asyncio.gather(*(model(one) for one in requests), return_exceptions=errors)

    return asyncio.run(together())


@pytest.fixture
def model(small, monkeypatch):
    """A model that counts the rows of every batch."""
    steered = SteeredModel(small.model, small.tokenizer, BIAS)
    steered.batches = []
    generate = Steered.generate

    def counted(self, input_ids=None, **inputs):
        steered.batches.append(len(input_ids))
        return generate(self, input_ids, **inputs)

    monkeypatch.setattr(Steered, "generate", counted)
    return steered


@pytest.mark.parametrize("method", [BIAS, SPA(1.5)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_request_gets_the_same_answer_alone_and_in_a_batch(model, method, temperature):
    requests = [
        request(row, method=method, temperature=temperature, seed=70 + 9 * row) for row in range(4)
    ]
    together = ask(model, *requests)
    assert model.batches == [4]
    alone = [ask(model, one)[0] for one in requests]
    assert [answer.text for answer in together] == [answer.text for answer in alone]
    assert len({answer.text for answer in together}) == 4
    counts = [(one.prompt_tokens, one.completion_tokens, one.anchor_tokens) for one in together]
    assert counts == [(a.prompt_tokens, a.completion_tokens, a.anchor_tokens) for a in alone]


def test_an_answer_is_the_steered_chats(model, small):
    answer = ask(model, request(0))[0]
    reply = Steered(small.model, small.tokenizer, BIAS).chat(
        [{"role": "user", "content": TEXTS[0]}], [Anchor(0, *SPANS[0])], 12, do_sample=False
    )
    assert answer.text == reply.text
    assert answer.prompt_tokens == reply.usage.prompt_tokens
    assert answer.anchor_tokens == reply.usage.anchor_tokens > 0
    assert answer.completion_tokens == reply.usage.completion_tokens and answer.seconds > 0


def test_every_row_has_its_own_anchors(model):
    plain = ask(model, *(request(row, anchored=False) for row in range(3)))
    steered = ask(model, *(request(row) for row in range(3)))
    moved = [Anchor(0, 40, 50)]
    one_moved = ask(model, request(0, anchors=moved), request(1), request(2))
    texts = [[answer.text for answer in answers] for answers in (plain, steered, one_moved)]
    assert all(one != other for one, other in zip(*texts[:2], strict=True))
    assert texts[2][0] != texts[1][0] and texts[2][1:] == texts[1][1:]


def test_what_does_not_go_together_is_answered_apart(model):
    different = [
        request(0),
        request(1, anchored=False),
        request(1, max_new_tokens=5),
        request(2, method=AttentionBias(3.0)),  # equal to the model's own
        request(2, method=SPA(1.5)),
        request(3, temperature=0.5),
        request(3, anchored=False),
    ]
    answers = ask(model, *different)
    assert sorted(model.batches) == [1, 1, 1, 2, 2]
    assert [answer.text for answer in answers] == [ask(model, one)[0].text for one in different]


def test_a_batch_is_no_larger_than_allowed(small):
    model = SteeredModel(small.model, small.tokenizer, BIAS, batch_size=3)
    answers = ask(model, *(request(row % 4) for row in range(7)))
    assert [a.text for a in answers] == [ask(model, request(row % 4))[0].text for row in range(7)]
    with pytest.raises(ValueError, match="batch_size must be"):
        SteeredModel(small.model, small.tokenizer, batch_size=0)


def test_one_requests_error_is_its_own(model):
    wrong = [
        request(0, anchors=[Anchor(0, 0, 999)]),
        request(0, anchors=[Anchor(text="nowhere to be found")]),
        request(
            0, messages=[{"role": "user", "content": "word " * 500}], anchors=[Anchor(0, 0, 4)]
        ),
        request(0, seed="x"),
    ]
    requests = [request(0), *wrong, request(1)]
    answers = ask(model, *requests, errors=True)
    assert model.batches == [2]
    for error, message in zip(
        answers[1:5],
        ["ends beyond", "nowhere to be found", "context holds 400", "seed must"],
        strict=True,
    ):
        assert isinstance(error, ValueError) and message in str(error)
    assert answers[0].text == ask(model, request(0))[0].text
    assert answers[5].text == ask(model, request(1))[0].text


def test_what_only_the_batch_shows_fails_that_request_alone(model, small, monkeypatch):
    generate = Steered.generate
    odd = len(small.tokenizer(TEXTS[3]).input_ids)

    def refusing(self, input_ids=None, **inputs):
        if int(inputs["attention_mask"].sum(1).min()) < odd + 40 and len(input_ids) > 1:
            raise ValueError("one of them is too short")
        if TEXTS[3] in small.tokenizer.decode(input_ids[0]):
            raise ValueError("this one is too short")
        return generate(self, input_ids, **inputs)

    monkeypatch.setattr(Steered, "generate", refusing)
    answers = ask(model, request(0), request(3), errors=True)
    assert answers[0].completion_tokens == 12
    assert isinstance(answers[1], ValueError) and "this one" in str(answers[1])


def test_a_fault_of_the_model_fails_all_and_the_next_are_served(model, small):
    small.model.train()
    answers = ask(model, request(0), request(1), errors=True)
    small.model.eval()
    assert all(isinstance(error, RuntimeError) for error in answers)
    assert ask(model, request(0))[0].completion_tokens == 12


def test_an_answer_ends_with_its_end_token(model, small):
    full = ask(model, request(0))[0]
    ids = small.tokenizer(full.text, add_special_tokens=False).input_ids
    inputs = model.steered.prepare([request(0).messages], [request(0).anchors])
    out = model.steered.generate(**inputs, max_new_tokens=12, do_sample=False)
    end = int(out[0, inputs["input_ids"].shape[1] + 4])
    ended = SteeredModel(small.model, small.tokenizer, BIAS, options={"eos_token_id": end})
    together = ask(ended, request(0), request(1))
    assert together[0].completion_tokens == 5 and len(ids) > 5
    assert full.text.startswith(together[0].text)
    assert together[1].completion_tokens == 12


def test_one_model_serves_one_event_loop_after_another_and_forgets_them(model):
    import gc

    first = ask(model, request(0))[0].text
    assert ask(model, request(0))[0].text == first
    gc.collect()
    assert len(model._queues) == 0


def test_who_gives_up_waiting_troubles_nobody(model):
    async def together():
        given_up = asyncio.create_task(model(request(1)))
        waiting = asyncio.create_task(model(request(0)))
        await asyncio.sleep(0)
        given_up.cancel()
        return await waiting

    assert asyncio.run(together()).text == ask(model, request(0))[0].text
    assert model.batches == [1, 1]


def test_what_comes_while_a_batch_runs_goes_into_the_next(model):
    async def later():
        first = asyncio.create_task(model(request(0)))
        while not model.batches:
            await asyncio.sleep(0.001)
        return await asyncio.gather(first, model(request(1)), model(request(2)))

    answers = asyncio.run(later())
    assert model.batches == [1, 2] and len({answer.text for answer in answers}) == 3


def test_settings_tell_the_model(model):
    assert model.settings["method"] == BIAS and model.settings["dtype"] == "torch.float32"


@dataclass(frozen=True)
class Incomparable(AttentionBias):
    """A method with a tensor, which cannot be compared with another's."""

    direction: torch.Tensor = field(default_factory=lambda: torch.zeros(4), kw_only=True)


def test_requests_that_cannot_be_compared_do_not_go_together(model):
    one, other = (request(row, method=Incomparable(3.0)) for row in range(2))
    answers = asyncio.run(asyncio.wait_for(_gathered(model, one, other), 60))
    assert model.batches == [1, 1]
    assert [answer.text for answer in answers] == [
        answer.text for answer in ask(model, request(0), request(1))
    ]


def test_anchors_may_be_an_array(model):
    array = np.empty(1, dtype=object)
    array[0] = Anchor(0, *SPANS[0])
    arrays = [request(0, anchors=array), request(0, anchors=array[:0])]
    found = asyncio.run(asyncio.wait_for(_gathered(model, *arrays), 60))
    expected = ask(model, request(0), request(0, anchored=False))
    assert [answer.text for answer in found] == [answer.text for answer in expected]


def test_an_unusable_request_is_refused_before_it_waits(model):
    bad = request(1, temperature=np.zeros(2))
    found = asyncio.run(asyncio.wait_for(_gathered(model, request(0), bad, request(2)), 60))
    assert isinstance(found[1], ValueError) and "temperature must be a number" in str(found[1])
    assert found[0].text and found[2].text and model.batches == [2]


def test_a_fault_while_batches_are_made_leaves_nobody_waiting(model, monkeypatch):
    async def faulty():
        with monkeypatch.context() as patch:
            patch.setattr(model, "_go_together", lambda *_: 1 / 0)
            first = await _gathered(model, request(0), request(1))
        return first, await model(request(0))

    failed, answer = asyncio.run(asyncio.wait_for(faulty(), 60))
    assert [type(error) for error in failed] == [ZeroDivisionError] * 2
    assert answer.text


def test_a_tokenizer_that_raises_stop_iteration_leaves_nobody_waiting(model, monkeypatch):
    def ends(*_, **__):
        raise StopIteration

    monkeypatch.setattr(Steered, "prepare", ends)
    found = asyncio.run(asyncio.wait_for(_gathered(model, request(0)), 60))
    assert isinstance(found[0], RuntimeError) and "StopIteration" in str(found[0])


def test_a_cancelled_batch_ends_at_the_next_token(model, small):
    passes = []
    handle = small.model.register_forward_pre_hook(lambda *_: passes.append(time.sleep(0.02)))

    async def cancelled():
        asked = asyncio.create_task(model(request(0, max_new_tokens=300)))
        while len(passes) < 3:
            await asyncio.sleep(0.005)
        asked.cancel()

    try:
        asyncio.run(cancelled())  # which waits for the thread
    finally:
        handle.remove()
    assert 3 <= len(passes) < 30
    assert ask(model, request(0))[0].text


def test_criteria_of_the_options_stop_as_well(small):
    def after_two(input_ids, scores, **_):
        return torch.full((len(input_ids),), input_ids.shape[1] >= length + 2)

    length = ask(SteeredModel(small.model, small.tokenizer, BIAS), request(0))[0].prompt_tokens
    options = {"stopping_criteria": StoppingCriteriaList([after_two])}
    stopped = SteeredModel(small.model, small.tokenizer, BIAS, options=options)
    assert ask(stopped, request(0))[0].completion_tokens == 2


async def _gathered(model, *requests):
    return await asyncio.gather(*(model(one) for one in requests), return_exceptions=True)
