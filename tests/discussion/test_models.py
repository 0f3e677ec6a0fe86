"""Functions, clients and pipelines as models."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from radar_core.anchors import Anchor
from radar_core.discussion import Answer, CallableModel, ClientModel, PipelineModel, Request
from radar_core.discussion.model import answer_of

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What now?"}]
REQUEST = Request(MESSAGES, max_new_tokens=6, seed=5, speaker="solver")
ANCHORED = Request(MESSAGES, anchors=[Anchor(1, 0, 4)], speaker="solver")


def ask(model, request=REQUEST):
    return asyncio.run(_ask(model, request))


async def _ask(model, request):
    return await model(request)


def last(messages):
    return messages[-1]["content"]


async def last_later(messages):
    await asyncio.sleep(0)
    return messages[-1]["content"]


@pytest.mark.parametrize("function", [last, last_later])
def test_any_function_answers(function):
    answer = ask(CallableModel(function))
    assert answer.text == "What now?" and answer.seconds > 0
    assert answer.prompt_tokens == answer.completion_tokens == 0


def test_functions_that_are_not_async_run_at_the_same_time():
    together = threading.Barrier(3, timeout=10)

    def wait(messages):
        together.wait()
        return "met"

    async def three():
        model = CallableModel(wait)
        return await asyncio.gather(*(model(REQUEST) for _ in range(3)))

    assert [answer.text for answer in asyncio.run(three())] == ["met"] * 3


def test_a_function_must_return_text_and_may_change_its_messages():
    with pytest.raises(TypeError, match="must return a str, got None"):
        ask(CallableModel(lambda messages: None))
    ask(CallableModel(lambda messages: messages.pop()["content"]))
    assert len(MESSAGES) == 2


class Completions:
    def __init__(self, response):
        self.response, self.arguments = response, None
        self.chat = SimpleNamespace(completions=self)

    def create(self, **arguments):
        self.arguments = arguments
        return self.response


class AsyncCompletions(Completions):
    async def create(self, **arguments):
        await asyncio.sleep(0)
        return super().create(**arguments)


def response(text, usage=None):
    choices = [SimpleNamespace(message=SimpleNamespace(content=text))]
    return SimpleNamespace(choices=choices, usage=usage)


USAGE = SimpleNamespace(prompt_tokens=21, completion_tokens=4)


@pytest.mark.parametrize("kind", [Completions, AsyncCompletions])
def test_any_client_answers(kind):
    client = kind(response("Now.", USAGE))
    answer = ask(ClientModel(client, "some-model", options={"top_p": 0.9}))
    assert (answer.text, answer.prompt_tokens, answer.completion_tokens) == ("Now.", 21, 4)
    assert client.arguments == dict(
        model="some-model", messages=MESSAGES, temperature=0.0, seed=5, max_tokens=6, top_p=0.9
    )


def test_a_client_may_tell_no_usage_and_must_tell_a_text():
    answer = ask(ClientModel(Completions(response("Now.")), "m", limit="max_completion_tokens"))
    assert (answer.prompt_tokens, answer.completion_tokens) == (0, 0)
    for broken in (response(None), SimpleNamespace(choices=[])):
        with pytest.raises(RuntimeError, match="m answered without a text"):
            ask(ClientModel(Completions(broken), "m"))
    with pytest.raises(ValueError, match=r"has no chat\.completions\.create"):
        ClientModel(object(), "m")


@pytest.fixture(scope="module")
def pipeline(small):
    return transformers.pipeline("text-generation", model=small.model, tokenizer=small.tokenizer)


def test_a_pipeline_answers_as_its_model_does(pipeline, small):
    answer = ask(PipelineModel(pipeline))
    inputs = small.tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = small.model.generate(**inputs, max_new_tokens=6, do_sample=False)
    new = out[0, inputs["input_ids"].shape[1] :]
    assert answer.text == small.tokenizer.decode(new, skip_special_tokens=True) != ""
    assert answer.prompt_tokens == inputs["input_ids"].shape[1]
    assert answer.completion_tokens == 6 and answer.seconds > 0


def test_a_pipelines_draws_depend_on_the_seed_alone(pipeline):
    model = PipelineModel(pipeline)

    def drawn(seed):
        return ask(model, Request(MESSAGES, 6, temperature=1.0, seed=seed)).text

    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    first = drawn(1)
    assert torch.equal(torch.rand(1), expected)
    assert drawn(1) == first != drawn(2)


def test_only_text_generation_pipelines_are_taken():
    with pytest.raises(ValueError, match=r"expected one made by transformers\.pipeline"):
        PipelineModel(last)


@pytest.mark.parametrize("kind", ["function", "client", "pipeline"])
def test_anchors_are_refused_by_what_cannot_steer(kind, request):
    if kind == "pipeline":
        model = PipelineModel(request.getfixturevalue("pipeline"))
    else:
        model = CallableModel(last) if kind == "function" else ClientModel(Completions(None), "m")
    with pytest.raises(
        ValueError,
        match=r"prompt of solver is to be steered \(anchors: 1\) and .* cannot steer; use",
    ):
        ask(model, ANCHORED)


def test_seconds_are_those_of_the_call():
    assert ask(CallableModel(lambda messages: time.sleep(0.03) or "x")).seconds >= 0.03


def test_an_iterator_that_ends_is_an_error_and_leaves_nobody_waiting():
    replies = iter(["First."])
    model = CallableModel(lambda messages: next(replies), name="scripted")

    async def twice():
        first = await model(REQUEST)
        with pytest.raises(RuntimeError, match="raised StopIteration, as next"):
            await asyncio.wait_for(model(REQUEST), 10)
        return first.text

    assert asyncio.run(twice()) == "First."


@pytest.mark.parametrize(
    "answer",
    [
        Answer("x", np.int64(3), np.float32(2), np.float32(0.5), torch.tensor(1)),
        Answer("x", 3, 2.0, np.float64(0.5), np.uint8(1)),
    ],
)
def test_numbers_of_other_libraries_are_taken_as_pythons_own(answer):
    async def model(request):
        return answer

    found = asyncio.run(answer_of(model, REQUEST))
    assert json.loads(json.dumps(asdict(found), allow_nan=False)) == asdict(
        Answer("x", 3, 2, 0.5, 1)
    )
    assert type(found.prompt_tokens) is type(found.completion_tokens) is int


@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens", "anchor_tokens", "seconds"])
@pytest.mark.parametrize("value", [None, "3", True, float("nan"), np.inf, np.zeros(2), 1j])
def test_numbers_that_no_log_can_hold_are_refused(name, value):
    async def model(request):
        return Answer("x", **{name: value})

    with pytest.raises(ValueError, match=f"the model's answer has {name}=.*; expected a"):
        asyncio.run(answer_of(model, REQUEST))
