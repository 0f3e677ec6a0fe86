"""Sessions, interrupts, messages of the user, failures: nothing is lost, and in the right order."""

from __future__ import annotations

import asyncio
import math
import re
import warnings

import pytest

from radar_core.discussion.model import Answer
from radar_core.policies.dacs import (
    EventLog,
    Orchestrator,
    State,
    Status,
    SteeringRequest,
    Urgency,
    read_events,
)
from radar_core.policies.dacs.orchestrator import DEFAULT_PATH
from tests.full_disk import no_room
from tests.policies.dacs.support import Held, Scripted, Words, asking, settle

LOW, MEDIUM, HIGH = Urgency.LOW, Urgency.MEDIUM, Urgency.HIGH
TEAM = ("ann", "bob", "cid", "dan")


def orchestrated(model, **options):
    orchestrator = Orchestrator(model, Words(), **{"budget": 4000} | options)
    for name in TEAM:
        orchestrator.register(name, f"Sort the mail of {name}")
    return orchestrator


def request(name, urgency=MEDIUM, question="Which box?", **fields):
    return SteeringRequest(name, question, urgency=urgency, **fields)


def events(orchestrator, *kinds):
    return [event for event in orchestrator.log.events if event["event"] in kinds]


def transitions(orchestrator):
    return [
        (event["from"], event["to"], event["agent_id"])
        for event in events(orchestrator, "TRANSITION")
    ]


def run(test):
    """Run an async test in which nothing may be left unawaited or unretrieved."""

    async def watched():
        faults = []
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        await asyncio.wait_for(test(), 20)
        assert not faults
        assert len(asyncio.all_tasks()) == 1, asyncio.all_tasks()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(watched())


async def started(orchestrator, *requests, **options):
    tasks = [asyncio.create_task(orchestrator.steer(one, **options)) for one in requests]
    await settle()
    return tasks


# -- a single session ------------------------------------------------------------------------------


def test_a_request_is_answered_from_the_focus_context():
    async def test():
        model = Scripted(lambda prompt: f"Box 7 for {asking(prompt)}.")
        async with orchestrated(model) as orchestrator:
            orchestrator.heartbeat("bob", summary="Halfway.")
            ask = request("ann", relevant_context="Boxes 7 and 8 are free.", request_id="r1")
            response = await orchestrator.steer(ask)
            assert (orchestrator.state, orchestrator.agent_in_focus) == (State.REGISTRY, None)
        assert response.text == "Box 7 for ann."
        assert (response.request_id, response.agent_id) == ("r1", "ann")
        assert (response.mode, response.turns, response.abandoned) == ("focus", 1, None)
        (prompt,) = model.prompts
        assert "Boxes 7 and 8 are free." in prompt
        assert "- bob | RUNNING LOW | task: Sort the mail of bob | last: Halfway." in prompt
        assert model.requests[0].messages[0]["role"] == "system"
        assert model.requests[0].anchors == ()
        assert transitions(orchestrator) == [
            ("REGISTRY", "FOCUS", "ann"),
            ("FOCUS", "REGISTRY", None),
        ]
        kinds = [event["event"] for event in orchestrator.log.events]
        assert kinds[0] == "RUN_START" and kinds[-1] == "RUN_END"
        middle = [kind for kind in kinds if kind not in ("REGISTRY_UPDATE", "TRANSITION")]
        assert middle[1:-1] == [
            "STEERING_REQUEST",
            "CONTEXT_BUILT",
            "LLM_CALL",
            "STEERING_RESPONSE",
        ]
        (built,) = events(orchestrator, "CONTEXT_BUILT")
        assert built["token_count"] == len(Words().encode(prompt)) == response.context_tokens
        assert (built["mode"], built["registry_entries"]) == ("FOCUS", 3)
        (call,) = events(orchestrator, "LLM_CALL")
        assert call["response_tokens"] == len(Words().encode(response.text))

    run(test)


def test_the_registry_says_who_waits():
    async def test():
        model = Held()
        async with orchestrated(model) as orchestrator:
            entry = orchestrator.registry.entry
            tasks = await started(orchestrator, request("ann", HIGH), request("bob", LOW))
            assert (entry("ann").status, entry("ann").urgency) == (Status.WAITING_STEERING, HIGH)
            assert entry("ann").pending and not entry("bob").pending
            assert entry("bob").status is Status.WAITING_STEERING
            tasks += await started(orchestrator, request("cid", LOW, blocking=False))
            assert entry("cid").status is Status.RUNNING
            model.release(0)
            await settle()
            assert (entry("ann").status, entry("ann").urgency) == (Status.RUNNING, LOW)
            assert not entry("ann").pending and entry("bob").pending
            orchestrator.heartbeat("bob", status=Status.COMPLETE)
            model.release(1)
            await settle()
            assert entry("bob").status is Status.COMPLETE
            model.release(2)
            await asyncio.gather(*tasks)

    run(test)


def test_earlier_answers_are_in_the_history():
    async def test():
        model = Scripted(lambda prompt: f"Box {len(model.requests)}.")
        async with orchestrated(model, history=2) as orchestrator:
            for number in range(4):
                await orchestrator.steer(request("ann", question=f"Question {number}?"))
        assert re.findall(r"Told: (.*)", model.prompts[-1]) == ["Box 2.", "Box 3."]
        assert "Question 1?\n" in model.prompts[-1] and "Question 0?" not in model.prompts[-1]

    run(test)


@pytest.mark.parametrize("mode", ["flat", "fair_flat", "soft"])
def test_flat_modes_show_everybodys_focus_context(mode):
    async def test():
        model = Held()
        async with orchestrated(model, mode=mode) as orchestrator:
            orchestrator.heartbeat("dan", output="Dan weighed 3 parcels.")
            tasks = await started(
                orchestrator,
                request("ann", relevant_context="Boxes 7 and 8 are free."),
                request("bob", LOW, question="Which stamp?"),
                request("bob", MEDIUM, question="Which scale?"),
            )
            (prompt,) = model.prompts
            assert "Dan weighed 3 parcels.\nOpen request: none" in prompt
            assert "Open request [LOW]: Which stamp?" in prompt  # asked first, though LOW
            assert "Which scale?" not in prompt
            assert asking(prompt) == "ann"
            for call in range(3):
                model.release(call)
                await settle()
            await asyncio.gather(*tasks)
        for one, prompt in zip(model.requests, model.prompts, strict=True):
            if mode != "soft":
                assert not one.anchors
                continue
            (anchor,) = one.anchors
            span = prompt[anchor.start : anchor.end]
            assert anchor.message == 1 and span.startswith(f"## Agent {asking(prompt)}\nTask:")
        (mode_logged,) = {event["mode"] for event in events(orchestrator, "CONTEXT_BUILT")}
        assert mode_logged == mode.upper()

    run(test)


def test_the_method_is_for_soft_only_and_is_passed_on():
    from radar_core.methods import AttentionBias

    async def test():
        model = Scripted()
        async with orchestrated(model, mode="soft", method=AttentionBias(1.0)) as orchestrator:
            await orchestrator.steer(request("ann"))
            await orchestrator.ask("How is it going?")
        assert [one.method for one in model.requests] == [AttentionBias(1.0), None]
        assert not model.requests[1].anchors

    run(test)
    with pytest.raises(ValueError, match='mode="soft"'):
        orchestrated(Scripted(), method=AttentionBias(1.0))


# -- turns -----------------------------------------------------------------------------------------


def test_a_session_has_turns_until_the_agent_is_content():
    async def test():
        model = Scripted(lambda prompt: f"Box {len(model.requests)}.")
        seen = []

        async def follow_up(response):
            seen.append((response.text, response.turns))
            return None if response.turns == 2 else "And after that?"

        async with orchestrated(model) as orchestrator:
            response = await orchestrator.steer(request("ann", request_id="r1"), follow_up)
        assert seen == [("Box 1.", 1), ("Box 2.", 2)]
        assert (response.text, response.turns, response.request_id) == ("Box 2.", 2, "r1")
        assert "Told: Box 1.\nOpen request [MEDIUM]: And after that?" in model.prompts[1]
        assert len(transitions(orchestrator)) == 2  # one session

    run(test)


def test_after_three_turns_the_session_is_abandoned():
    async def test():
        async def never_content(response):
            return "And after that?"

        model = Scripted()
        async with orchestrated(model) as orchestrator:
            response = await orchestrator.steer(request("ann"), never_content)
        assert len(model.requests) == 3
        assert (response.text, response.abandoned, response.turns) == (DEFAULT_PATH, "turns", 3)
        (timeout,) = events(orchestrator, "FOCUS_TIMEOUT")
        assert timeout["reason"] == "turns"
        assert events(orchestrator, "STEERING_ABANDONED")[0]["reason"] == "turns"

    run(test)


def test_a_session_that_takes_too_long_is_abandoned_and_the_next_is_served():
    async def test():
        model = Held()
        async with orchestrated(model, max_seconds=0.05) as orchestrator:
            tasks = await started(orchestrator, request("ann"), request("bob"))
            first = await tasks[0]
            assert (first.text, first.abandoned, first.turns) == (DEFAULT_PATH, "time", 0)
            assert model.calls[0].cancelled()
            await settle()
            model.release(1, "Box 2.")
            assert (await tasks[1]).text == "Box 2."
        assert events(orchestrator, "FOCUS_TIMEOUT")[0]["used"] >= 0.05

    run(test)


def test_a_slow_follow_up_counts_as_time_in_focus():
    async def test():
        async def slow(response):
            await asyncio.sleep(10)

        async with orchestrated(Scripted(), max_seconds=0.05) as orchestrator:
            response = await orchestrator.steer(request("ann"), slow)
        assert (response.abandoned, response.turns) == ("time", 1)

    run(test)


@pytest.mark.parametrize("result", [KeyError("boom"), "  ", 3])
def test_a_faulty_follow_up_is_the_agents_own_error(result):
    async def test():
        async def follow_up(response):
            if isinstance(result, Exception):
                raise result
            return result

        async with orchestrated(Scripted()) as orchestrator:
            with pytest.raises((KeyError, ValueError), match=r"boom|question is"):
                await orchestrator.steer(request("ann"), follow_up)
            assert (await orchestrator.steer(request("bob"))).text == "Do it."
        assert orchestrator.registry.entry("ann").status is Status.RUNNING

    run(test)


# -- order and interrupts --------------------------------------------------------------------------


def test_high_first_then_medium_then_low_first_in_first_out():
    async def test():
        model = Held()
        async with orchestrated(model) as orchestrator:
            asked = [
                request("ann", HIGH, "0"),
                request("bob", LOW, "1"),
                request("cid", MEDIUM, "2"),
                request("dan", HIGH, "3"),
                request("bob", LOW, "4"),
                request("ann", MEDIUM, "5"),
                request("cid", HIGH, "6"),
            ]
            tasks = await started(orchestrator, *asked)
            for call in range(len(asked)):
                await settle()
                model.release(call)
            await asyncio.gather(*tasks)
        order = [re.findall(r"Open request \[\w+\]: (\d)", prompt)[0] for prompt in model.prompts]
        assert order == ["0", "3", "6", "2", "5", "1", "4"]
        assert not events(orchestrator, "INTERRUPT")

    run(test)


def test_a_high_request_interrupts_and_the_session_goes_on_from_where_it_was():
    async def test():
        model = Held()

        async def follow_up(response):
            return "And then?" if response.turns == 1 else None

        async with orchestrated(model) as orchestrator:
            (first,) = await started(orchestrator, request("ann", LOW), follow_up=follow_up)
            model.release(0, "Box 1.")
            await settle()
            assert len(model.calls) == 2  # ann's second turn is under way
            (urgent,) = await started(orchestrator, request("bob", HIGH))
            assert (orchestrator.state, orchestrator.agent_in_focus) == (State.FOCUS, "bob")
            assert asking(model.prompts[2]) == "bob"
            assert orchestrator.registry.entry("ann").pending
            model.release(2, "Box 2.")
            assert (await urgent).text == "Box 2."
            await settle()
            assert orchestrator.agent_in_focus == "ann" and not first.done()
            model.release(1, "Box 3.")
            response = await first
        assert (response.text, response.turns) == ("Box 3.", 2)
        assert len(model.calls) == 3  # no call was made twice
        assert transitions(orchestrator) == [
            ("REGISTRY", "FOCUS", "ann"),
            ("FOCUS", "FOCUS", "bob"),
            ("FOCUS", "REGISTRY", None),
            ("REGISTRY", "FOCUS", "ann"),
            ("FOCUS", "REGISTRY", None),
        ]
        (interrupt,), (resume,) = events(orchestrator, "INTERRUPT"), events(orchestrator, "RESUME")
        assert (interrupt["agent_id"], interrupt["by"], interrupt["turns"]) == ("ann", "bob", 1)
        assert (resume["agent_id"], resume["turns"], resume["used"]) == (
            "ann",
            1,
            interrupt["used"],
        )

    run(test)


def test_an_answer_that_came_during_the_interruption_is_taken_up():
    async def test():
        model = Held()
        async with orchestrated(model) as orchestrator:
            (first,) = await started(orchestrator, request("ann"))
            (urgent,) = await started(orchestrator, request("bob", HIGH))
            model.release(0, "Box 1.")
            await settle()
            assert not first.done()  # bob is in focus
            model.release(1)
            await urgent
            assert (await first).text == "Box 1."
        assert len(model.calls) == 2

    run(test)


def test_time_during_an_interruption_does_not_count():
    async def test():
        model = Held()
        async with orchestrated(model, max_seconds=0.3) as orchestrator:
            (first,) = await started(orchestrator, request("ann"))
            await asyncio.sleep(0.1)
            (urgent,) = await started(orchestrator, request("bob", HIGH))
            await asyncio.sleep(0.25)
            model.release(1)
            await urgent
            await asyncio.sleep(0.05)
            model.release(0)
            assert (await first).abandoned is None
        (resume,) = events(orchestrator, "RESUME")
        assert 0.09 < resume["used"] < 0.25

    run(test)


def test_high_does_not_interrupt_high_nor_an_agent_itself():
    async def test():
        model = Held()
        async with orchestrated(model) as orchestrator:
            tasks = await started(orchestrator, request("ann", HIGH), request("bob", HIGH))
            model.release(0)
            await settle()
            tasks += await started(orchestrator, request("bob", MEDIUM))
            model.release(1)
            await settle()
            tasks += await started(orchestrator, request("bob", HIGH))  # bob's own MEDIUM is on
            model.release(2)
            await settle()
            model.release(3)
            await asyncio.gather(*tasks)
        assert not events(orchestrator, "INTERRUPT")
        assert [asking(prompt) for prompt in model.prompts] == ["ann", "bob", "bob", "bob"]

    run(test)


def test_an_interrupt_during_a_follow_up_does_not_call_it_twice():
    async def test():
        calls, go_on = [], asyncio.Event()

        async def follow_up(response):
            calls.append(response.turns)
            await go_on.wait()

        model = Scripted()
        async with orchestrated(model) as orchestrator:
            (first,) = await started(orchestrator, request("ann"), follow_up=follow_up)
            (urgent,) = await started(orchestrator, request("bob", HIGH))
            await urgent
            go_on.set()
            await first
        assert calls == [1]
        assert len(events(orchestrator, "INTERRUPT", "RESUME")) == 2

    run(test)


def test_an_agent_may_ask_again_while_it_waits():
    async def test():
        model = Held()
        async with orchestrated(model) as orchestrator:
            tasks = await started(
                orchestrator, request("ann", question="First?"), request("ann", question="Second?")
            )
            assert "Second?" not in model.prompts[0]
            model.release(0, "One.")
            await settle()
            assert orchestrator.registry.entry("ann").status is Status.WAITING_STEERING
            assert "First?\n   Told: One.\nOpen request [MEDIUM]: Second?" in model.prompts[1]
            model.release(1, "Two.")
            assert [(await task).text for task in tasks] == ["One.", "Two."]

    run(test)


# -- the user --------------------------------------------------------------------------------------


def test_a_message_of_the_user_is_answered_from_the_registry():
    async def test():
        model = Scripted(lambda prompt: "All is well.")
        async with orchestrated(model) as orchestrator:
            orchestrator.heartbeat("ann", summary="Halfway.", output="Secret detail.")
            assert await orchestrator.ask("How is it going?") == "All is well."
        (prompt,) = model.prompts
        assert "last: Halfway." in prompt and "Secret detail." not in prompt
        assert prompt.endswith("How is it going?")
        assert transitions(orchestrator) == [("REGISTRY", "USER", None), ("USER", "REGISTRY", None)]

    run(test)


def test_messages_wait_for_the_end_of_a_session_and_come_before_the_next():
    async def test():
        model = Held()
        async with orchestrated(model) as orchestrator:
            tasks = await started(orchestrator, request("ann"), request("bob", MEDIUM))
            messages = [asyncio.create_task(orchestrator.ask(text)) for text in ("One?", "Two?")]
            await settle()
            assert len(model.calls) == 1
            for call in range(4):
                model.release(call, str(call))
                await settle()
            assert [await message for message in messages] == ["1", "2"]
            assert [(await task).text for task in tasks] == ["0", "3"]
        assert not events(orchestrator, "INTERRUPT")

    run(test)


def test_an_urgent_message_interrupts_even_a_high_session():
    async def test():
        model = Held()
        async with orchestrated(model) as orchestrator:
            (first,) = await started(orchestrator, request("ann", HIGH))
            calm = asyncio.create_task(orchestrator.ask("Later?"))
            urgent = asyncio.create_task(orchestrator.ask("Now?", urgent=True))
            await settle()
            assert orchestrator.state is State.USER
            assert model.prompts[1].endswith("Now?")
            model.release(1, "Yes.")
            assert await urgent == "Yes."
            await settle()
            model.release(2, "Later.")  # in REGISTRY now, so the other message's turn
            assert await calm == "Later."
            model.release(0)
            await first
        assert events(orchestrator, "INTERRUPT")[0]["by"] == "user"
        assert [event["agent_id"] for event in events(orchestrator, "RESUME")] == ["ann"]

    run(test)


def test_a_message_that_nobody_waits_for_is_dropped_and_the_rest_goes_on():
    async def test():
        model = Held()
        async with orchestrated(model) as orchestrator:
            message = asyncio.create_task(orchestrator.ask("How is it going?"))
            await settle()
            message.cancel()
            (task,) = await started(orchestrator, request("ann"))
            assert model.calls[0].cancelled()
            model.release(1)
            await task
        assert not events(orchestrator, "USER_RESPONSE")

    run(test)


# -- failures --------------------------------------------------------------------------------------


class Failing(Scripted):
    """Fails the first few calls, or those whose prompt is asked by somebody."""

    def __init__(self, times, error=None):
        super().__init__()
        self.times = times
        self.error = error or ConnectionError("no route")

    async def __call__(self, request):
        self.requests.append(request)
        if len(self.requests) <= self.times:
            raise self.error
        return Answer("Do it.")


def test_a_failed_call_is_tried_again_and_nothing_is_lost():
    async def test():
        async with orchestrated(Failing(2)) as orchestrator:
            tasks = await started(orchestrator, request("ann"), request("bob"))
            assert [(await task).text for task in tasks] == ["Do it."] * 2
        attempts = events(orchestrator, "CALL_FAILED")
        assert [(e["agent_id"], e["attempt"]) for e in attempts] == [("ann", 1), ("ann", 2)]
        assert attempts[0]["error"] == "ConnectionError: no route"

    run(test)


def test_a_request_that_fails_too_often_is_abandoned_with_the_error():
    async def test():
        async with orchestrated(Failing(3)) as orchestrator:
            tasks = await started(orchestrator, request("ann"), request("bob"))
            first, second = [await task for task in tasks]
        assert (first.text, first.turns) == (DEFAULT_PATH, 0)
        assert first.abandoned == "ConnectionError: no route"
        assert (second.text, second.abandoned) == ("Do it.", None)
        assert orchestrator.registry.entry("ann").status is Status.RUNNING

    run(test)


def test_a_failed_request_keeps_its_place_but_lets_urgent_ones_go_first():
    async def test():
        model = Held()
        async with orchestrated(model) as orchestrator:
            tasks = await started(orchestrator, request("ann"), request("bob"))
            model.calls[0].set_exception(OSError("gone"))
            tasks.append(asyncio.create_task(orchestrator.steer(request("cid", HIGH))))
            await settle()
            for call in (1, 2, 3):
                model.release(call)
                await settle()
            await asyncio.gather(*tasks)
        assert [asking(prompt) for prompt in model.prompts] == ["ann", "cid", "ann", "bob"]

    run(test)


@pytest.mark.parametrize(
    "odd", ["not an Answer", Answer(None), Answer("\ud800"), asyncio.CancelledError()]
)
def test_what_is_no_answer_is_a_failure(odd):
    async def test():
        async def model(request):
            if isinstance(odd, BaseException):
                raise odd
            return odd

        async with orchestrated(model) as orchestrator:
            response = await orchestrator.steer(request("ann"))
        reasons = r"TypeError: .*expected an? (Answer|str)|.* half a surrogate|.* cancelled"
        assert re.match(reasons, response.abandoned)

    run(test)


def test_the_users_message_is_tried_again_and_then_raises():
    async def test():
        async with orchestrated(Failing(2)) as orchestrator:
            assert await orchestrator.ask("How is it going?") == "Do it."
        async with orchestrated(Failing(3)) as orchestrator:
            with pytest.raises(RuntimeError, match="ConnectionError: no route") as caught:
                await orchestrator.ask("How is it going?")
            assert isinstance(caught.value.__cause__, ConnectionError)
            assert await orchestrator.ask("And now?") == "Do it."

    run(test)


def test_a_message_that_takes_too_long_is_a_failure():
    async def test():
        async with orchestrated(Held(), max_seconds=0.02, attempts=2) as orchestrator:
            with pytest.raises(RuntimeError, match="no answer within"):
                await orchestrator.ask("How is it going?")

    run(test)


# -- cancellation and closing ----------------------------------------------------------------------


@pytest.mark.parametrize("who", [0, 1])
def test_a_cancelled_wait_withdraws_the_request(who):
    async def test():
        model = Held()
        async with orchestrated(model) as orchestrator:
            tasks = await started(orchestrator, request("ann"), request("bob"))
            tasks[who].cancel()
            await settle()
            assert tasks[who].cancelled()
            assert orchestrator.registry.entry(TEAM[who]).status is Status.RUNNING
            if who == 0:
                assert model.calls[0].cancelled()
                assert orchestrator.agent_in_focus == "bob"
            model.release(1 - who)
            await tasks[1 - who]
        assert len(model.calls) == 2 - who
        assert [e["reason"] for e in events(orchestrator, "STEERING_ABANDONED")] == ["withdrawn"]

    run(test)


def test_an_interrupted_session_can_be_withdrawn():
    async def test():
        model = Held()
        async with orchestrated(model) as orchestrator:
            (first,) = await started(orchestrator, request("ann"))
            (urgent,) = await started(orchestrator, request("bob", HIGH))
            first.cancel()
            await settle()
            assert model.calls[0].cancelled()
            model.release(1)
            await urgent
        assert not events(orchestrator, "RESUME")

    run(test)


def test_leaving_answers_what_still_waits():
    async def test():
        async with orchestrated(Scripted()) as orchestrator:
            tasks = [asyncio.create_task(orchestrator.steer(request(name))) for name in TEAM]
            message = asyncio.create_task(orchestrator.ask("How is it going?"))
            await asyncio.sleep(0)
        assert [(await task).text for task in tasks] == ["Do it."] * 4
        assert await message == "Do it."
        assert events(orchestrator, "RUN_END")[0]["reason"] == "done"

    run(test)


def test_leaving_through_an_error_lets_nobody_wait():
    async def test():
        model = Held()
        with pytest.raises(KeyError):
            async with orchestrated(model) as orchestrator:
                tasks = await started(orchestrator, request("ann"), request("bob"))
                message = asyncio.create_task(orchestrator.ask("How is it going?"))
                await settle()
                raise KeyError("boom")
        assert [(await task).abandoned for task in tasks] == ["closed"] * 2
        with pytest.raises(RuntimeError, match="closed before it answered"):
            await message
        assert model.calls[0].cancelled()
        assert events(orchestrator, "RUN_END")[0]["reason"] == "KeyError: 'boom'"

    run(test)


def test_cancelling_the_whole_run_ends_it():
    async def test():
        model = Held()
        orchestrator = orchestrated(model)

        async def whole():
            async with orchestrator:
                await orchestrator.steer(request("ann"))

        task = asyncio.create_task(whole())
        await settle()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settle()
        assert model.calls[0].cancelled()
        assert events(orchestrator, "RUN_END")[0]["reason"].startswith("CancelledError")

    run(test)


def test_a_fault_of_its_own_reaches_whoever_waits(monkeypatch):
    async def test():
        with pytest.raises(ZeroDivisionError):
            async with orchestrated(Held()) as orchestrator:
                monkeypatch.setattr(orchestrator, "_converse", lambda *_: 1 // 0)
                tasks = await started(orchestrator, request("ann"), request("bob"))
                for task in tasks:
                    with pytest.raises(ZeroDivisionError):
                        await task
                with pytest.raises(RuntimeError, match="does not run"):
                    await orchestrator.steer(request("cid"))

    run(test)


def test_it_runs_inside_async_with_and_once():
    async def test():
        orchestrator = orchestrated(Scripted())
        with pytest.raises(RuntimeError, match="async with"):
            await orchestrator.steer(request("ann"))
        with pytest.raises(RuntimeError, match="async with"):
            await orchestrator.ask("How?")
        async with orchestrator:
            pass
        with pytest.raises(RuntimeError, match="runs once"):
            async with orchestrator:
                pass

    run(test)


def test_faulty_requests_are_refused_and_leave_no_trace():
    async def test():
        async with orchestrated(Held()) as orchestrator:
            with pytest.raises(ValueError, match="registered are"):
                await orchestrator.steer(request("eve"))
            orchestrator.heartbeat("ann", status=Status.COMPLETE)
            with pytest.raises(ValueError, match="has ended"):
                await orchestrator.steer(request("ann"))
            (task,) = await started(orchestrator, one := request("bob"))
            with pytest.raises(ValueError, match="waiting already"):
                await orchestrator.steer(one)
            with pytest.raises(ValueError, match="expected a text"):
                await orchestrator.ask(" ")
            task.cancel()
        assert len(events(orchestrator, "STEERING_REQUEST")) == 1

    run(test)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (dict(budget=3), "budget"),
        (dict(max_turns=0), "max_turns"),
        (dict(attempts=0), "attempts"),
        (dict(max_new_tokens=0), "max_new_tokens"),
        (dict(max_seconds=0), "max_seconds"),
        (dict(mode="wide"), "'wide'"),
        (dict(max_seconds=math.nan), "max_seconds"),
        (dict(max_seconds="60"), "max_seconds is '60'; expected a time above 0"),
        (dict(max_seconds=True), "max_seconds"),
        (dict(max_seconds=None), "max_seconds"),
        (dict(history=None), "history"),
        (dict(steering_prompt=None), "steering_prompt is None; expected a str"),
        (dict(steering_prompt="\ud800"), "steering_prompt holds half a surrogate pair"),
        (dict(user_prompt=5), "user_prompt is 5; expected a str"),
        (dict(log="events.jsonl"), "log is a str that has no write"),
    ],
)
def test_faulty_options_are_refused_at_construction(option, message):
    with pytest.raises(ValueError, match=message):
        orchestrated(Scripted(), **option)


def test_what_cannot_be_asked_is_refused_before_the_model_is():
    async def test():
        async with orchestrated(model := Scripted(), max_seconds=math.inf) as orchestrator:
            with pytest.raises(ValueError, match="request is 'why'; expected a SteeringRequest"):
                await orchestrator.steer("why")
            with pytest.raises(ValueError, match="follow_up is a str that cannot be called"):
                await orchestrator.steer(request("ann"), "And then?")
            with pytest.raises(ValueError, match="urgent is 1; expected True or False"):
                await orchestrator.ask("How is it going?", urgent=1)
            assert not model.requests
            assert await orchestrator.ask("How is it going?") == "Do it."

    run(test)


class Quits(BaseException):
    """Ends a run, as an interrupt would."""


@pytest.mark.parametrize("error", [Quits, GeneratorExit])
def test_a_model_that_quits_leaves_nobody_waiting(error):
    async def quit(request):
        raise error("enough")

    async def test():
        with pytest.raises(error):
            async with orchestrated(quit) as orchestrator:
                asked = asyncio.gather(
                    orchestrator.steer(request("ann")),
                    orchestrator.ask("How is it going?"),
                    return_exceptions=True,
                )
                waited = await asyncio.wait_for(asked, 5)
                assert [type(one) for one in waited] == [error, error]

    run(test)


def test_a_message_that_the_log_refuses_is_not_answered_to_nobody(tmp_path):
    async def test():
        path = tmp_path / "run.jsonl"
        with EventLog(path) as log:
            async with orchestrated(model := Scripted(), log=log) as orchestrator:
                with no_room(path), pytest.raises(OSError):
                    await orchestrator.ask("How is it going?")
                await settle()
                assert not model.requests

    run(test)


def test_the_log_on_disk_tells_the_run(tmp_path):
    async def test():
        with EventLog(tmp_path / "run.jsonl") as log:
            async with orchestrated(Scripted(), log=log) as orchestrator:
                await orchestrator.steer(request("ann"))
                written = read_events(tmp_path / "run.jsonl")
                assert written[-1]["event"] != "RUN_END"
                assert any(event["event"] == "STEERING_RESPONSE" for event in written)
        assert read_events(tmp_path / "run.jsonl")[-1]["event"] == "RUN_END"

    run(test)


def test_half_a_surrogate_pair_in_the_users_message_is_refused():
    async def test():
        async with orchestrated(Scripted()) as orchestrator:
            with pytest.raises(ValueError, match="message holds half a surrogate pair"):
                await orchestrator.ask("hi \ud83d")
            assert await orchestrator.ask("And now?") == "Do it."

    run(test)


class Stumbling(Words):
    """A tokenizer that some texts are too much for."""

    def encode(self, text):
        if "stumble" in text:
            raise TypeError("TextEncodeInput must be str")
        return super().encode(text)


def test_a_tokenizers_error_is_a_failed_call_of_what_it_counted_and_ends_nothing_else():
    async def test():
        orchestrator = Orchestrator(Scripted(), Stumbling(), budget=4000, attempts=2)
        orchestrator.register("ann", "Sort the mail")
        orchestrator.register("bob", "Sort the mail")
        async with orchestrator:
            asked, stumbled, other = await asyncio.gather(
                orchestrator.ask("Why does it stumble?"),
                orchestrator.steer(request("ann", question="Why do I stumble?")),
                orchestrator.steer(request("bob")),
                return_exceptions=True,
            )
            assert isinstance(asked, RuntimeError) and "TextEncodeInput" in str(asked)
            assert stumbled.abandoned == "TypeError: TextEncodeInput must be str"
            assert other.text == "Do it." and other.abandoned is None
            assert await orchestrator.ask("And now?") == "Do it."
        assert len(events(orchestrator, "CALL_FAILED")) == 4

    run(test)
