"""Who speaks when, and what each has heard."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from radar_core.discussion import (
    Agent,
    Answer,
    ByLast,
    ByReference,
    CallableModel,
    Discussion,
    DiscussionError,
    Rounds,
    Task,
    chain,
    debate,
    self_consistency,
    single_agent,
)
from radar_core.discussion.model import check_sampling
from radar_core.policies.dacs import Orchestrator
from radar_core.policies.full import FullContext
from radar_core.policies.policy import Context
from radar_core.schedule import Schedule
from radar_core.topology import Topology
from tests.discussion.agents import Recorder, Summing, Watching, agents
from tests.policies.dacs.support import Words

NAMES = ["a", "b", "c", "d"]
# a -> b -> d and c alone within a round; d -> a from one round to the next.
SCHEDULE = Schedule(
    Topology([("a", "b"), ("b", "d")], NAMES), Topology([("d", "a"), ("c", "d")], NAMES)
)


def discuss(task="What now?", policy=None, schedule=SCHEDULE, model=None, **options):
    model = model or Recorder()
    policy = policy or Watching()
    discussion = Discussion(agents(*NAMES), schedule, model, policy, **options)
    return asyncio.run(discussion.run(task)), model, policy


def test_agents_hear_earlier_rounds_and_who_reaches_them_within_the_round():
    outcome, _, policy = discuss(decision=ByLast())
    assert [(said.agent, said.round) for said in outcome.messages] == [
        (name, round) for round in (0, 1) for name in SCHEDULE.order()
    ]
    assert policy.heard("a", 0) == policy.heard("c", 0) == []
    assert policy.heard("b", 0) == [("a", 0)]
    assert policy.heard("d", 0) == [("a", 0), ("b", 0)]
    everything = [(name, 0) for name in SCHEDULE.order()]
    assert policy.heard("a", 1) == policy.heard("c", 1) == everything
    assert policy.heard("d", 1) == [*everything, ("a", 1), ("b", 1)]
    assert outcome.answer == outcome.messages[-1].text


def test_what_is_heard_does_not_depend_on_who_answers_faster():
    slow = Recorder(delay={"a": 0.02, "c": 0.0})
    fast = Recorder(delay={"c": 0.02})
    runs = [discuss(model=model, policy=FullContext()) for model in (slow, fast)]
    texts = [[said.text for said in outcome.messages] for outcome, _, _ in runs]
    assert texts[0] == texts[1]
    assert sorted(map(repr, slow.requests)) == sorted(map(repr, fast.requests))


def test_agents_without_a_dependency_answer_at_the_same_time():
    _, model, _ = discuss(model=Recorder(delay=dict.fromkeys(NAMES, 0.01)), rounds=1)
    assert model.most_at_once == 2  # a and c; then b; then d
    assert [request.speaker for request in model.requests] == ["a", "c", "b", "d", "decider"]


def test_a_turn_tells_what_the_policy_needs():
    task = Task("What now?", notes={"b": "The key is under the mat."})
    speaker = Agent("b", "finder", "You are b.", instruction="Say where the key is.")
    policy = Watching()
    schedule = Schedule.chain(["a", "b"])
    discussion = Discussion([*agents("a"), speaker], schedule, Recorder(), policy, rounds=1)
    asyncio.run(discussion.run(task))
    first, second, last = policy.turns
    assert (first.query, first.system) == ("What now?", "You are a.")
    assert second.query == "What now?\n\nSay where the key is."
    assert second.system == (
        "You are b.\n\nYour private notes, which nobody else has:\nThe key is under the mat."
    )
    assert second.task == "What now?" and second.roles == {"a": "role of a", "b": "finder"}
    assert second.topology.hops("a", "b") == 1 and second.stage is None
    assert (last.receiver, last.round, last.stage) == ("decider", 1, "decide")
    assert last.topology.hops("a", "decider") == last.topology.hops("b", "decider") == 1


def test_a_decider_reads_the_last_round_alone():
    outcome, _, policy = discuss()
    assert policy.heard("decider", 2) == [(name, 1) for name in SCHEDULE.order()]
    assert outcome.answer == outcome.verdict.spoken.text == "decider says 1."
    assert outcome.spoken[-1].agent == "decider" and len(outcome.messages) == 8


def test_an_agents_own_policy_comes_first():
    own = Watching()
    mine = Agent("a", "role", policy=own)
    discussion = Discussion(
        [mine, *agents("b")], Schedule.debate(["a", "b"]), Recorder(), Watching(), rounds=1
    )
    asyncio.run(discussion.run("What now?"))
    assert [turn.receiver for turn in own.turns] == ["a"]


def test_a_topology_is_used_without_cycles_within_rounds_and_whole_between_them():
    ring = Topology([("a", "b"), ("b", "c"), ("c", "d"), ("d", "a")], NAMES)
    policy = Watching()
    discussion = Discussion(agents(*NAMES), ring, Recorder(), policy)
    assert discussion.plan.schedules[0].spatial.edges == (("a", "b"), ("b", "c"), ("c", "d"))
    asyncio.run(discussion.run("What now?"))
    assert policy.turns[-1].receiver == "decider"
    assert policy.turns[0].topology is ring


def test_silent_agents_do_not_speak_in_their_round():
    plan = Rounds([SCHEDULE, SCHEDULE], [{"b"}, {"c", "d"}])
    outcome, _, policy = discuss(schedule=plan)
    said = [(one.agent, one.round) for one in outcome.messages]
    assert said == [(n, 0) for n in SCHEDULE.order() if n != "b"] + [("a", 1), ("b", 1)]
    assert policy.heard("decider", 2) == [("a", 1), ("b", 1)]


def test_calls_of_policies_are_counted_as_theirs():
    outcome, model, _ = discuss(policy=Summing(), rounds=1)
    assert outcome.calls == len(model.requests) == 5 * 3
    assert outcome.prompt_tokens == 150 and outcome.completion_tokens == 45
    first = outcome.messages[0]
    assert [answer.text for answer in first.policy_calls] == ["a says 1.", "a says 2."]
    assert first.text == "a says 3." and model.requests[0].max_new_tokens == 8
    assert model.prompt("a", 2) == "a says 2. What now?"


def test_anchors_and_method_reach_the_model():
    from radar_core.anchors import Anchor
    from radar_core.methods import AttentionBias

    class Anchoring:
        async def context(self, turn, ask):
            messages = [{"role": "user", "content": turn.query}]
            return Context(messages, [Anchor(0, 0, 4)], AttentionBias(2.0))

    _, model, _ = discuss(policy=Anchoring(), rounds=1)
    assert {request.anchors for request in model.requests} == {(Anchor(0, 0, 4),)}
    assert {request.method for request in model.requests} == {AttentionBias(2.0)}


def test_seeds_differ_by_agent_round_and_task_and_not_by_time():
    def seeds(task, seed=0):
        _, model, _ = discuss(task, seed=seed, temperature=1.0)
        return {request.seed for request in model.requests}

    first, again, other, seeded = seeds("one"), seeds("one"), seeds("two"), seeds("one", seed=1)
    assert len(first) == 9 and first == again
    assert not first & other and not first & seeded
    assert all(0 <= seed < 2**31 for seed in first)


def test_many_tasks_at_once_with_progress():
    model = Recorder(delay=dict.fromkeys(NAMES, 0.002))
    discussion = Discussion(agents(*NAMES), SCHEDULE, model, Watching(), rounds=1)
    told = []
    outcomes = asyncio.run(
        discussion.run_many(
            ["one", "two", "three"],
            at_once=2,
            progress=lambda done, total: told.append((done, total)),
        )
    )
    assert [outcome.task.text for outcome in outcomes] == ["one", "two", "three"]
    assert told == [(done, 12) for done in range(1, 13)]
    assert model.most_at_once == 4


class Flaky:
    """Fails so often, then answers."""

    def __init__(self, failures, error=None):
        self.failures, self.error, self.calls = failures, error or ConnectionError("no route"), 0

    async def __call__(self, request):
        from radar_core.discussion import Answer

        self.calls += 1
        if self.calls <= self.failures:
            raise self.error
        return Answer("fine")


def test_failed_calls_are_tried_again_with_longer_and_longer_breaks(monkeypatch):
    breaks = []
    sleep = asyncio.sleep

    async def note(seconds):
        breaks.append(seconds)
        await sleep(0)

    monkeypatch.setattr("radar_core.discussion.runner.asyncio.sleep", note)
    model = Flaky(3)
    outcome, _, _ = discuss(model=model, schedule=Schedule.chain(NAMES), rounds=1, backoff=0.5)
    assert breaks == [0.5, 1.0, 2.0]
    assert outcome.answer == "fine" and model.calls == 3 + 5


def test_a_discussion_stops_when_a_call_keeps_failing():
    model = Flaky(10**6)
    with pytest.raises(
        DiscussionError, match=r"asked 2 times for a in round 0 of task 'x'.*no rou"
    ):
        discuss(Task("What now?", id="x"), model=model, attempts=2, backoff=0.0)
    assert model.calls == 2 * 2  # a and c


def test_what_will_fail_again_is_not_tried_again():
    model = Flaky(1, ValueError("the prompt does not fit"))
    with pytest.raises(DiscussionError, match=r"asked once for a .*does not fit"):
        discuss(model=model, schedule=Schedule.chain(NAMES))
    assert model.calls == 1


def test_no_further_task_is_begun_after_a_failure():
    model = Flaky(10**6, ValueError("broken"))
    discussion = Discussion(agents("a"), Topology([], ["a"]), model, Watching())
    with pytest.raises(DiscussionError) as caught:
        asyncio.run(discussion.run_many([f"task {n}" for n in range(9)], at_once=2))
    assert model.calls == 2
    assert caught.value.__notes__ == ["0 of 9 tasks came to their end"]


def test_a_policys_error_says_whose_it_is():
    class Broken:
        async def context(self, turn, ask):
            raise KeyError("lost")

    with pytest.raises(KeyError) as caught:
        discuss(Task("What now?", id="x"), policy=Broken())
    assert caught.value.__notes__ == ["in a's policy, round 0, task 'x'"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(agents=agents("a", "b")), "the agents are a, b, but the schedule knows a, b, c, d"),
        (dict(agents=[*agents("a", "b", "c"), "d"]), "agents must hold Agent objects"),
        (dict(schedule={"a": "b"}), "schedule is a dict"),
        (dict(policy=None), "policy is a NoneType that has no context"),
        (dict(model="gpt"), "model is a str"),
        (dict(rounds=0), "rounds must be a whole number of at least 1"),
        (dict(max_new_tokens=True), "max_new_tokens must be"),
        (dict(backoff=-1), "backoff must be"),
        (dict(backoff=math.nan), "backoff must be"),
        (dict(attempts=None), "attempts must be"),
        (dict(log=5), "log must be a path, or None for none, got 5"),
        (dict(decision=ByReference(Agent("a", "decider"))), "the decider is called 'a'"),
        (dict(schedule=Rounds.repeated(SCHEDULE, 3), rounds=2), "has 3 rounds"),
    ],
)
def test_unusable_settings_are_refused(change, message):
    settings = dict(
        agents=agents(*NAMES), schedule=SCHEDULE, model=Recorder(), policy=Watching(), rounds=2
    )
    with pytest.raises(ValueError, match=message):
        Discussion(**(settings | change))


SAMPLING = [
    *((name, value) for name in ("temperature", "seed") for value in ("1", None, True, math.nan)),
    *(("temperature", value) for value in (-0.1, math.inf, 10**400, np.zeros(2))),
    *(("seed", value) for value in (0.5, 2**63, -(2**63) - 1)),
    *(("max_new_tokens", value) for value in ("8", None, math.nan, -1)),
]


@pytest.mark.parametrize(("name", "value"), SAMPLING)
def test_unusable_sampling_is_refused_wherever_it_can_be_given(name, value):
    model = Recorder()
    for build in (
        lambda: Discussion(agents(*NAMES), SCHEDULE, model, Watching(), **{name: value}),
        lambda: single_agent(model, **{name: value}),
        lambda: self_consistency(model, str, **{name: value}),
        lambda: chain(agents("a"), model, **{name: value}),
        lambda: debate(model, str, **{name: value}),
        lambda: Orchestrator(model, Words(), budget=500, **{name: value}),
        lambda: check_sampling(
            **({"max_new_tokens": 8, "temperature": 0, "seed": 0} | {name: value})
        ),
    ):
        with pytest.raises(ValueError, match=f"{name} must be a"):
            build()


@pytest.mark.parametrize(("temperature", "seed"), [(0, -1), (0.7, 2**63 - 1), (2, -(2**63))])
def test_every_sensible_temperature_and_seed_is_taken(temperature, seed):
    outcome, model, _ = discuss(temperature=temperature, seed=seed, rounds=1)
    assert outcome.answer and {one.temperature for one in model.requests} == {temperature}


def test_a_progress_that_cannot_be_called_is_refused_before_the_model_is_asked():
    model = Recorder()
    discussion = Discussion(agents(*NAMES), SCHEDULE, model, Watching())
    with pytest.raises(ValueError, match="progress must be a function of two counts, got 'bar'"):
        asyncio.run(discussion.run("What now?", progress="bar"))
    assert not model.requests


def test_what_is_no_context_is_refused_before_the_model_is_asked():
    class Bare:
        async def context(self, turn, ask):
            return [{"role": "user", "content": turn.query}]

    model = Recorder()
    with pytest.raises(TypeError, match="its context is a list; expected a Context") as caught:
        discuss(model=model, policy=Bare())
    assert "'s policy, round 0" in caught.value.__notes__[0] and not model.requests


def test_what_is_no_verdict_is_named():
    class Bare:
        async def decide(self, last, speak):
            return last[-1].text

    with pytest.raises(TypeError, match=r"Bare.decide returned a str; expected a Verdict"):
        discuss(decision=Bare())


class Quits(BaseException):
    """Ends a run, as an interrupt would."""


@pytest.mark.parametrize("error", [Quits, GeneratorExit, asyncio.CancelledError])
def test_no_further_task_is_begun_after_a_model_quits(error):
    model = Flaky(1, error("enough"))
    discussion = Discussion(
        agents("a"), Topology([], ["a"]), model, Watching(), decision=ByLast(), rounds=1
    )
    with pytest.raises(error):
        asyncio.run(discussion.run_many(["one", "two", "three"], at_once=1))
    assert model.calls == 1


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (["same", "same"], "two tasks have the id"),
        ([Task("x", notes={"nobody": "n"})], "notes for 'nobody', who does not take part"),
        (["  "], "not blank"),
    ],
)
def test_unusable_tasks_are_refused(tasks, message):
    discussion = Discussion(agents(*NAMES), SCHEDULE, Recorder(), Watching())
    with pytest.raises(ValueError, match=message):
        asyncio.run(discussion.run_many(tasks))


def test_rounds_know_who_speaks_when():
    plan = Rounds.repeated(SCHEDULE, 2)
    assert plan.waves(0) == [["a", "c"], ["b"], ["d"]]
    assert Rounds([SCHEDULE], [{"a"}]).waves(0) == [["c"], ["b"], ["d"]]
    assert set(Rounds.repeated(SCHEDULE, 1).topology.edges) == set(SCHEDULE.spatial.edges)
    assert set(plan.topology.edges) == set(SCHEDULE.topology.edges)
    with pytest.raises(ValueError, match="nobody speaks"):
        Rounds([SCHEDULE], [set(NAMES)])
    with pytest.raises(ValueError, match="not in the topology"):
        Rounds([SCHEDULE], [{"e"}])


def test_a_function_takes_part_as_a_model():
    outcome, _, _ = discuss(
        model=CallableModel(lambda messages: messages[-1]["content"].upper()),
        policy=FullContext(),
        schedule=Schedule.chain(NAMES),
        rounds=1,
        decision=ByLast(),
    )
    assert outcome.answer.count("WHAT NOW?") >= 4


@pytest.mark.parametrize(
    "answer",
    [
        Answer("x", seconds=math.nan),
        Answer("x", seconds=10**400),
        Answer("x", prompt_tokens=None),
    ],
)
def test_an_answer_that_no_log_can_hold_is_the_models_failure(answer, tmp_path):
    async def model(request):
        return answer

    with pytest.raises(DiscussionError, match=r"asked once for .*the model's answer has"):
        discuss(model=model, log=tmp_path / "log.jsonl")


def test_a_context_whose_seconds_no_log_can_hold_is_refused_before_the_model_is_asked():
    class Untimed:
        async def context(self, turn, ask):
            return Context([{"role": "user", "content": turn.query}], seconds=None)

    model = Recorder()
    with pytest.raises(ValueError, match="its context has seconds=None") as caught:
        discuss(model=model, policy=Untimed())
    assert "'s policy, round 0" in caught.value.__notes__[0]
    assert not model.requests


def test_a_scripted_model_that_runs_out_ends_the_discussion():
    replies = iter(["One.", "Two."])
    model = CallableModel(lambda messages: next(replies))
    with pytest.raises(DiscussionError, match="raised StopIteration"):
        discuss(model=model, attempts=1)


@pytest.mark.parametrize("field", ["name", "role", "system", "instruction"])
def test_half_a_surrogate_pair_in_an_agent_is_refused(field):
    with pytest.raises(ValueError, match=f"{field} holds half a surrogate pair at character 1"):
        Agent(**({"name": "a", "role": "solver"} | {field: "a\ud800"}))


@pytest.mark.parametrize(
    "fields",
    [{"text": "t\ud800"}, {"id": "\ud800"}, {"notes": {"a": "\ud800"}}, {"notes": {"\ud800": "a"}}],
)
def test_half_a_surrogate_pair_in_a_task_is_refused(fields):
    with pytest.raises(ValueError, match=r"a task's .*half a surrogate pair"):
        Task(**({"text": "t"} | fields))
