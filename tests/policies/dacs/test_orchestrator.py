"""The orchestrator with a scripted model: order, interrupts, users, failures, and nothing lost."""

import asyncio
import random

import pytest

from radar_core.discussion.model import Answer
from radar_core.policies.dacs.orchestrator import DEFAULT_PATH, Orchestrator, State
from radar_core.policies.dacs.queue import SteeringQueue
from radar_core.policies.dacs.registry import Urgency
from radar_core.policies.dacs.requests import SteeringRequest

LOW, MEDIUM, HIGH = Urgency.LOW, Urgency.MEDIUM, Urgency.HIGH


class Words:
    def encode(self, text):
        return text.split()


class Gated:
    """A model whose calls wait until they are let through, and which keeps what it was asked."""

    def __init__(self, failures=0):
        self.requests, self.running, self.most = [], 0, 0
        self.open = asyncio.Event()
        self.failures = failures

    async def __call__(self, request):
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.open.wait()
            if self.failures:
                self.failures -= 1
                raise OSError("the line is down")
        finally:
            self.running -= 1
        return Answer(f"answer {len(self.requests)}", 7, 2)


def orchestrator(model, *agents, **settings):
    made = Orchestrator(model, Words(), budget=2000, **settings)
    for agent in agents:
        made.register(agent, f"the task of {agent}")
    return made


def kinds(made, *names):
    return [e for e in made.log.events if e["event"] in names]


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


def test_high_goes_first_and_each_level_is_first_in_first_out():
    async def run():
        model = Gated()
        model.open.set()
        made = orchestrator(model, *"abcdefg")
        levels = [LOW, MEDIUM, HIGH, MEDIUM, HIGH, LOW, MEDIUM]
        async with made:
            await asyncio.gather(
                *(
                    made.steer(SteeringRequest(name, f"{name}?", urgency=level))
                    for name, level in zip("abcdefg", levels, strict=True)
                )
            )
        return [event["agent_id"] for event in kinds(made, "STEERING_RESPONSE")], model.most

    order, most = asyncio.run(run())
    assert order == list("cebdgaf") and most == 1


def test_the_queue_serves_low_items_in_batches():
    queue = SteeringQueue()
    for name, level in (("l1", LOW), ("l2", LOW)):
        queue.put(name, level)
    assert queue.take().item == "l1"
    queue.put("m", MEDIUM)
    queue.put("h", HIGH)
    queue.put("l3", LOW)
    assert [queue.take().item for _ in range(4)] == ["h", "l2", "m", "l3"]
    assert queue.take() is None


def test_an_interrupted_session_is_saved_and_gone_on_with():
    async def run():
        model = Gated()
        made = orchestrator(model, "slow", "urgent")
        async with made:
            first = asyncio.create_task(made.steer(SteeringRequest("slow", "Which way?")))
            await settle()
            assert (made.state, made.agent_in_focus) == (State.FOCUS, "slow")
            second = asyncio.create_task(
                made.steer(SteeringRequest("urgent", "Stop?", urgency=HIGH))
            )
            await settle()
            assert made.agent_in_focus == "urgent"
            model.open.set()
            answers = await asyncio.gather(first, second)
        return made, model, answers

    made, model, answers = asyncio.run(run())
    assert len(model.requests) == 2, "the call under way is taken up again, not made twice"
    assert [a.abandoned for a in answers] == [None, None]
    order = [e["event"] for e in kinds(made, "INTERRUPT", "RESUME", "STEERING_RESPONSE")]
    assert order == ["INTERRUPT", "STEERING_RESPONSE", "RESUME", "STEERING_RESPONSE"]
    (interrupt,) = kinds(made, "INTERRUPT")
    assert (interrupt["agent_id"], interrupt["by"]) == ("slow", "urgent")


def test_messages_of_the_user_wait_for_the_session_or_interrupt_it_if_urgent():
    async def run(urgent):
        model = Gated()
        made = orchestrator(model, "a")
        async with made:
            steering = asyncio.create_task(made.steer(SteeringRequest("a", "Which?")))
            await settle()
            asking = asyncio.create_task(made.ask("How far are you?", urgent=urgent))
            await settle()
            state = made.state
            model.open.set()
            text = await asking
            await steering
        return state, text, model.requests, kinds(made, "USER_RESPONSE", "STEERING_RESPONSE")

    state, text, requests, order = asyncio.run(run(False))
    assert state is State.FOCUS and text
    assert [e["event"] for e in order] == ["STEERING_RESPONSE", "USER_RESPONSE"]
    asked = requests[1].messages[1]["content"]
    assert "the task of a" in asked and "Which?" not in asked, "answered from the registry alone"
    state, text, _, order = asyncio.run(run(True))
    assert state is State.USER
    assert [e["event"] for e in order] == ["USER_RESPONSE", "STEERING_RESPONSE"]


def test_a_failed_call_is_tried_again_and_then_given_up_with_its_error():
    async def run(failures):
        model = Gated(failures)
        model.open.set()
        made = orchestrator(model, "a", attempts=3)
        async with made:
            response = await made.steer(SteeringRequest("a", "Which?"))
            after = await made.steer(SteeringRequest("a", "And then?"))
        return response, after, len(kinds(made, "CALL_FAILED"))

    response, _, failed = asyncio.run(run(2))
    assert response.abandoned is None and failed == 2
    response, after, failed = asyncio.run(run(3))
    assert response.text == DEFAULT_PATH and "OSError: the line is down" in response.abandoned
    assert failed == 3 and after.abandoned is None


def test_time_and_turns_are_limited():
    async def run_out_of_time():
        made = orchestrator(Gated(), "a", max_seconds=0.05)
        async with made:
            return await made.steer(SteeringRequest("a", "Which?"))

    response = asyncio.run(run_out_of_time())
    assert (response.text, response.abandoned) == (DEFAULT_PATH, "time")

    async def follow(most):
        model = Gated()
        model.open.set()
        asked = []

        async def again(answer):
            asked.append(answer.text)
            return "And now?" if len(asked) < most else None

        made = orchestrator(model, "a", max_turns=3)
        async with made:
            return await made.steer(SteeringRequest("a", "Which?"), again), model.requests

    response, requests = asyncio.run(follow(3))
    assert (response.abandoned, response.turns) == (None, 3)
    assert "And now?" in requests[-1].messages[1]["content"]
    assert "Told: answer 1" in requests[-1].messages[1]["content"]
    response, _ = asyncio.run(follow(99))
    assert response.abandoned == "turns"


def test_leaving_by_an_exception_leaves_nobody_waiting():
    async def run():
        made = orchestrator(Gated(), "a")
        waiting = None
        with pytest.raises(KeyError):
            async with made:
                waiting = asyncio.create_task(made.steer(SteeringRequest("a", "Which?")))
                await settle()
                raise KeyError("gone")
        response = await asyncio.wait_for(waiting, 1)
        with pytest.raises(RuntimeError, match="does not run"):
            await made.ask("Anybody there?")
        return response, kinds(made, "RUN_END")

    response, ended = asyncio.run(run())
    assert (response.text, response.abandoned) == (DEFAULT_PATH, "closed")
    assert "KeyError" in ended[0]["reason"]


@pytest.mark.parametrize("seed", range(20))
def test_any_interleaving_answers_everybody_within_the_budget(seed):
    draw = random.Random(seed)

    async def model(request):
        for _ in range(draw.randrange(6)):
            await asyncio.sleep(0)
        if draw.random() < 0.2:
            raise OSError("busy")
        return Answer("x", 1, 1)

    async def run():
        made = orchestrator(model, *"abcd", attempts=50, max_turns=9)
        expected = []

        async def act(name):
            for number in range(4):
                for _ in range(draw.randrange(8)):
                    await asyncio.sleep(0)
                level = draw.choice(list(Urgency))
                asked = made.steer(SteeringRequest(name, f"{number}?", urgency=level))
                expected.append((await asked).abandoned)

        async def user():
            for number in range(3):
                await asyncio.sleep(0)
                assert await made.ask(f"message {number}", urgent=draw.random() < 0.5) == "x"

        async with made:
            await asyncio.gather(*map(act, "abcd"), user())
        return made, expected

    made, expected = asyncio.run(run())
    assert expected == [None] * 16
    assert len(kinds(made, "USER_RESPONSE")) == 3
    assert all(e["token_count"] <= 2000 for e in kinds(made, "CONTEXT_BUILT"))
    focus = None
    for event in kinds(made, "TRANSITION"):  # at most one in focus, entered and left in turn
        assert event["from_agent"] == focus
        focus = event["agent_id"]
    assert not made.registry.entry("a").pending
