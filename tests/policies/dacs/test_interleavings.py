"""The invariants of the state machine hold whatever happens in whatever order."""

from __future__ import annotations

import asyncio
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from radar_core.policies.dacs import Orchestrator, SteeringRequest, Urgency
from radar_core.policies.dacs.context import MODES
from radar_core.policies.dacs.orchestrator import DEFAULT_PATH
from tests.policies.dacs.support import Held, Words, settle

TEAM = ("ann", "bob", "cid", "dan")
BUDGET = 160

steers = st.tuples(
    st.just("steer"), st.sampled_from(TEAM), st.sampled_from(Urgency), st.integers(1, 4)
)
users = st.tuples(st.just("user"), st.booleans())
beats = st.tuples(st.just("beat"), st.sampled_from(TEAM), st.integers(0, 99))
others = st.tuples(
    st.sampled_from(["release", "release", "release", "fail", "withdraw"]), st.integers(0, 5)
)
steps = st.lists(st.one_of(steers, users, beats, others, others), max_size=40)


class Run:
    """One run: takes steps, notes what was shown to the model, and whether it was current."""

    def __init__(self, mode):
        self.model = Held()
        self.orchestrator = Orchestrator(self.model, Words(), budget=BUDGET, mode=mode)
        self.summaries = {}
        self.outdated = []
        for name in TEAM:
            self.orchestrator.register(name, "Sort")
        self.tasks: dict[str, asyncio.Task] = {}
        self.withdrawn = set()
        self.messages = []

    async def take(self, step):
        kind, *what = step
        if kind == "steer":
            name, urgency, turns = what
            request_id = f"r{len(self.tasks)}"
            request = SteeringRequest(name, "Which box?", "", urgency, request_id=request_id)

            async def follow_up(response):
                return None if response.turns >= turns else "And then?"

            self.tasks[request_id] = asyncio.create_task(
                self.orchestrator.steer(request, follow_up)
            )
        elif kind == "user":
            text = f"Message {len(self.messages)}?"
            self.messages.append(asyncio.create_task(self.orchestrator.ask(text, urgent=what[0])))
        elif kind == "beat":
            name, number = what
            self.summaries[name] = f"at {number}"
            self.orchestrator.heartbeat(name, summary=f"at {number}")
        elif kind == "withdraw":
            waiting = [name for name, task in self.tasks.items() if not task.done()]
            if waiting:
                chosen = waiting[what[0] % len(waiting)]
                self.withdrawn.add(chosen)
                self.tasks[chosen].cancel()
        else:
            open_calls = [call for call in self.model.calls if not call.done()]
            if open_calls:
                call = open_calls[what[0] % len(open_calls)]
                if kind == "fail":
                    call.set_exception(OSError("gone"))
                else:
                    call.set_result("Do it.")
        before = len(self.model.prompts)
        await settle()
        for prompt in self.model.prompts[before:]:
            for name, said in re.findall(r"^- (\w+) .*\| last: (.*)$", prompt, re.M):
                if self.summaries.get(name) != said:
                    self.outdated.append((name, said))

    async def finish(self):
        while waiting := [t for t in (*self.tasks.values(), *self.messages) if not t.done()]:
            open_calls = [call for call in self.model.calls if not call.done()]
            assert open_calls, f"{len(waiting)} wait and no call is under way"
            open_calls[0].set_result("Do it.")
            await settle()

    @property
    def events(self):
        return self.orchestrator.log.events


def played(steps, mode):
    async def play():
        run = Run(mode)
        async with run.orchestrator:
            for step in steps:
                await run.take(step)
            await run.finish()
        await settle()
        assert len(asyncio.all_tasks()) == 1
        return run

    return asyncio.run(play())


@settings(deadline=None, max_examples=150)
@given(steps, st.sampled_from(MODES))
def test_the_invariants_hold(steps, mode):
    run = played(steps, mode)
    check_one_focus_at_a_time(run.events)
    check_nothing_is_lost(run)
    assert run.outdated == []  # the registry shown is that of the last heartbeat
    check_sizes(run)
    check_order(run.events)
    check_interrupts(run.events)


def check_one_focus_at_a_time(events):
    """Each state begins where the last one ended, and contexts are built in focus only."""
    state, agent = "REGISTRY", None
    for event in events:
        if event["event"] == "TRANSITION":
            assert (event["from"], event["from_agent"]) == (state, agent)
            state, agent = event["to"], event["agent_id"]
            assert (state == "FOCUS") == (agent is not None)
        elif event["event"] in ("CONTEXT_BUILT", "STEERING_RESPONSE", "RESUME", "INTERRUPT"):
            if "message_id" in event:
                assert state == "USER"
            else:
                assert (state, agent) == ("FOCUS", event["agent_id"])
    assert (state, agent) == ("REGISTRY", None)


def check_nothing_is_lost(run):
    """Every request that nobody withdrew has an answer, and so has every message of the user."""
    answered = [e["request_id"] for e in run.events if e["event"] == "STEERING_RESPONSE"]
    assert len(answered) == len(set(answered))
    for request_id, task in run.tasks.items():
        if task.cancelled():
            assert request_id in run.withdrawn and request_id not in answered
        else:
            response = task.result()
            assert response.request_id == request_id and request_id in answered
            failed = response.abandoned is not None
            assert response.text == (DEFAULT_PATH if failed else "Do it.")
            assert response.abandoned in (None, "turns", "OSError: gone")
    for message in run.messages:
        error = message.exception()
        assert message.result() == "Do it." if error is None else "gone" in str(error)


def check_sizes(run):
    sizes = [e["token_count"] for e in run.events if e["event"] == "CONTEXT_BUILT"]
    assert sizes == [len(Words().encode(prompt)) for prompt in run.model.prompts]
    assert all(size <= BUDGET for size in sizes)


def check_order(events):
    """A session begins only if nothing that is as urgent came before it, nothing HIGH if it is not.

    MEDIUM may be overtaken by the LOW ones of a batch that began before it came.
    """
    waiting, begun = {}, set()
    for event in events:
        kind, request_id = event["event"], event.get("request_id")
        if kind == "STEERING_REQUEST":
            waiting[request_id] = (event["urgency"], len(waiting) + len(begun))
        elif kind in ("STEERING_RESPONSE", "STEERING_ABANDONED"):
            waiting.pop(request_id, None)
        elif kind == "CONTEXT_BUILT" and request_id is not None and request_id not in begun:
            begun.add(request_id)
            urgency = waiting[request_id][0]
            earlier = list(waiting)[: list(waiting).index(request_id)]
            for other in earlier:
                assert waiting[other][0] != urgency or other in begun
            if urgency != "HIGH":
                assert not any(
                    level == "HIGH" and other not in begun for other, (level, _) in waiting.items()
                )


def check_interrupts(events):
    """What is interrupted is resumed with the same turns and time, unless it was withdrawn."""
    saved = {}
    for event in events:
        request_id = event.get("request_id")
        if event["event"] == "INTERRUPT":
            assert request_id not in saved
            saved[request_id] = (event["turns"], event["used"])
        elif event["event"] == "RESUME":
            assert saved.pop(request_id) == (event["turns"], event["used"])
        elif event["event"] == "STEERING_ABANDONED" and event["reason"] == "withdrawn":
            saved.pop(request_id, None)
        elif event["event"] == "STEERING_RESPONSE":
            assert request_id not in saved
    assert saved == {}
