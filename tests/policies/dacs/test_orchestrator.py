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
