"""Every answer is in the log when it comes, and is never asked for again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from radar_core.discussion import (
    Agent,
    ByLast,
    CallableModel,
    Discussion,
    DiscussionError,
    Rounds,
    Task,
)
from radar_core.discussion.log import Log
from radar_core.discussion.settings import described
from radar_core.methods import AttentionBias
from radar_core.policies.full import FullContext
from radar_core.schedule import Schedule
from radar_core.topology import Topology
from tests.discussion.agents import Recorder, Summing, agents
from tests.full_disk import no_room

NAMES = ["a", "b", "c"]


def discussion(log, model=None, policy=None, **options):
    schedule = Schedule.complete(NAMES)
    return Discussion(
        agents(*NAMES), schedule, model or Recorder(), policy or Summing(), log=log, **options
    )


def run(log, tasks=("one", "two"), **options):
    built = discussion(log, **options)
    return asyncio.run(built.run_many(tasks)), built.model


def lines(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_the_log_tells_everything(tmp_path):
    log = tmp_path / "folder" / "log.jsonl"
    run(log, [Task("one", {"a": "a note"}, id="first")], rounds=1)
    header, task, *calls, verdict = lines(log)
    assert header["settings"]["agents"][0]["system"] == "You are a."
    assert header["settings"]["rounds"]["schedules"][0]["spatial"]["edges"][0] == ["a", "b"]
    assert task == {"task": "first", "text": "one", "notes": {"a": "a note"}}
    assert [(call["agent"], call["call"], call["number"]) for call in calls] == [
        (name, *call)
        for name in (*NAMES, "decider")
        for call in (("policy", 0), ("policy", 1), ("message", 0))
    ]
    message = calls[2]
    assert message["text"] == "a says 3." and message["round"] == 0
    assert (message["prompt_tokens"], message["completion_tokens"]) == (10, 3)
    assert message["seconds"] == 0.5 and message["policy_seconds"] == 0.0
    assert isinstance(message["seed"], int) and abs(message["at"] - time.time()) < 60
    assert verdict["verdict"]["answer"] == "decider says 3."


def test_a_finished_discussion_is_read_from_the_log(tmp_path):
    log = tmp_path / "log.jsonl"
    before, _ = run(log)
    size = log.stat().st_size
    after, model = run(log)
    assert model.requests == [] and log.stat().st_size == size
    for one, other in zip(before, after, strict=True):
        assert all(said.from_log for said in other.spoken)
        assert [(s.agent, s.round, s.answers) for s in one.spoken] == [
            (s.agent, s.round, s.answers) for s in other.spoken
        ]


@pytest.mark.parametrize("kept", range(3, 21, 2))
def test_wherever_it_is_cut_it_goes_on_there(tmp_path, kept):
    log = tmp_path / "log.jsonl"
    whole, model = run(log, ["one"])
    content = log.read_bytes().splitlines(keepends=True)
    assert len(content) == 2 + 21 + 1
    log.write_bytes(b"".join(content[:kept]) + content[kept][:20])  # torn in a line
    # Who had spoken when the log was cut: a, b, c, a, b, c and the decider, three calls each.
    order = [name for name in (*NAMES, *NAMES, "decider") for _ in range(3)]
    rest, again = run(log, ["one"], model=Recorder(before=tuple(order[: kept - 2])))
    assert len(again.requests) == len(model.requests) - (kept - 2)
    assert [said.text for said in rest[0].spoken] == [said.text for said in whole[0].spoken]
    assert [line.get("text") for line in lines(log)] == [
        json.loads(line).get("text") for line in content
    ]


def test_killed_in_the_middle_it_loses_at_most_the_call_under_way(tmp_path):
    log, seen = tmp_path / "log.jsonl", tmp_path / "asked.txt"
    program = tmp_path / "talk.py"
    program.write_text(TALK)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(program), str(log), str(seen)]
    process = subprocess.Popen(command, env=environment)
    deadline = time.monotonic() + 60
    while not (seen.exists() and len(seen.read_text().splitlines()) >= 5):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    asked = seen.read_text().splitlines()
    kept = [line["text"] for line in lines(log) if "call" in line]
    assert kept in (asked, asked[:-1]) and 4 <= len(kept) < 9

    subprocess.run([*command, "fast"], env=environment, check=True)
    again = seen.read_text().splitlines()
    answers = [line["text"] for line in lines(log) if "call" in line]
    assert answers[: len(kept)] == kept and len(answers) == 9
    # Nothing that was in the log was asked for again.
    assert again[len(asked) :] == answers[len(kept) :]


TALK = """
import asyncio, sys, time
from radar_core.discussion import Agent, ByLast, CallableModel, Discussion
from radar_core.policies.full import FullContext
from radar_core.schedule import Schedule

log, seen = sys.argv[1:3]
break_ = 0.0 if "fast" in sys.argv else 0.05

def answer(messages):
    time.sleep(break_)
    text = f"heard {len(messages[-1]['content'])} characters"
    with open(seen, "a") as file:
        print(text, file=file, flush=True)
    return text

names = ["a", "b", "c"]
talk = Discussion(
    [Agent(name, "role") for name in names],
    Schedule.chain(names),
    CallableModel(answer),
    FullContext(),
    rounds=3,
    decision=ByLast(),
    log=log,
)
asyncio.run(talk.run("What now?"))
"""


def test_other_settings_are_refused(tmp_path):
    log = tmp_path / "log.jsonl"
    run(log, ["one"])
    with pytest.raises(ValueError, match=r"max_new_tokens was 256 and is 9"):
        run(log, ["one"], max_new_tokens=9)
    with pytest.raises(ValueError, match=r"policy.class was \"Summing\" and is \"FullContext\""):
        run(log, ["one"], policy=FullContext())
    other = [Agent("a", "other role"), *agents("b", "c")]
    changed = Discussion(other, Schedule.complete(NAMES), Recorder(), Summing(), log=log)
    with pytest.raises(ValueError, match=r"agents\[0\]\.role was \"role of a\" and is \"other r"):
        asyncio.run(changed.run("one"))


def test_another_task_under_the_same_id_is_refused(tmp_path):
    log = tmp_path / "log.jsonl"
    run(log, [Task("one", id="x")])
    with pytest.raises(ValueError, match="another task 'x', which begins 'one'"):
        run(log, [Task("two", id="x")])


def test_a_policy_that_asks_something_else_is_found_out(tmp_path):
    log = tmp_path / "log.jsonl"
    run(log, ["one"])
    content = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(content[:3]))  # only the first call of a's policy

    with pytest.raises(ValueError, match="the log has another prompt as call 0 of a's policy"):
        run(log, ["one"], policy=Summing("something else"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("some text\n", "log.jsonl:1: not JSON"),
        ("some text", "no discussion's log"),
        ('{"a": 1}\n', "no discussion's log of format 1"),
        ("[1]\n", "expected a JSON object"),
        ('{"a": 1}\n{"b', "no discussion's log"),
        ("[" * 100_000 + "\n", "log.jsonl:1: not JSON"),
        ('{"a": NaN}\n', "log.jsonl:1: not JSON"),
    ],
)
def test_a_file_that_is_no_log_is_left_alone(tmp_path, content, message):
    log = tmp_path / "log.jsonl"
    log.write_text(content)
    with pytest.raises(ValueError, match=message):
        run(log)
    assert log.read_text() == content


@pytest.mark.parametrize(
    "line",
    [
        '{"call": "message"}',
        '{"call": "message", "task": "x", "round": 0, "agent": "a", "number": 0, "text": 5}',
        '{"call": "message", "task": "x", "round": [], "agent": "a", "number": 0, "text": ""}',
        '{"verdict": {}}',
        "{}",
    ],
)
def test_a_damaged_line_is_named(tmp_path, line):
    log = tmp_path / "log.jsonl"
    run(log, ["one"])
    content = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*content[:2], f"{line}\n", *content[2:]]))
    with pytest.raises(ValueError, match=r"log\.jsonl:3: not a line of a discussion's log"):
        run(log, ["one"])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The lines of a whole log: header, task, nine calls of a round, three of the decider, end."""
    log = tmp_path_factory.mktemp("written") / "log.jsonl"
    run(log, [Task("one", {"a": "a note"}, id="x")], rounds=1)
    return log.read_text().splitlines()


# Line 5 holds what a says, line 4 what its policy asked for before.
DAMAGES = [
    (5, dict(seconds=None), "'seconds' is missing"),
    (5, dict(seconds="0.5"), "seconds is '0.5'; expected a finite number"),
    (5, dict(seconds=True), "seconds is True"),
    (5, dict(seconds=10**400), "seconds is 1000"),
    (5, dict(prompt_tokens="10"), "prompt_tokens is '10'"),
    (5, dict(anchor_tokens=0.5), "anchor_tokens is 0.5"),
    (5, dict(policy_seconds=None), "'policy_seconds' is missing"),
    (5, dict(policy_seconds="z"), "policy_seconds is 'z'"),
    (5, dict(text="\ud800"), "text holds half a surrogate pair at character 0"),
    (5, dict(agent="\ud800"), "sender holds half a surrogate pair"),
    (5, dict(agent="z"), "'z' has no turn in round 0"),
    (5, dict(agent="decider"), "'decider' has no turn in round 0"),
    (5, dict(round="0"), "round must be a whole number >= 0, got '0'"),
    (5, dict(round=1), "'a' has no turn in round 1"),
    (5, dict(round=7), "'a' has no turn in round 7"),
    (14, dict(round=2), "'decider' has no turn in round 2"),
    (5, dict(number=1), "a turn has one message"),
    (4, dict(number=-1), "number is -1"),
    (4, dict(number=0), "line 3 has this call already"),
    (5, dict(call="note"), "call is 'note'"),
    (5, dict(task=""), "task is ''"),
    (5, dict(seed=5), "seed is 5; this call of the discussion has"),
    (5, dict(seed=None), "'seed' is missing"),
    (5, dict(prompt="zzz"), "expected 16 hexadecimal digits"),
    (5, dict(failure=3, attempt=1), "failure is 3"),
    (2, dict(text=7), "text must be a str that is not blank, got 7"),
    (2, dict(text="\ud800"), "task's text holds half a surrogate pair"),
    (2, dict(notes={"a": 1}), "notes must be str by agents' names"),
    (2, dict(task=["x"]), r"task is \['x'\]"),
    (15, dict(verdict="done"), "verdict is 'done'"),
]


@pytest.mark.parametrize(("line", "change", "message"), DAMAGES)
def test_a_damaged_field_is_named_with_its_line_before_anything_is_asked(
    tmp_path, written, line, change, message
):
    log = tmp_path / "log.jsonl"
    record = json.loads(written[line - 1]) | change
    changed = json.dumps({name: value for name, value in record.items() if value is not None})
    log.write_text("\n".join([*written[: line - 1], changed, *written[line:], ""]))
    model = Recorder()
    with pytest.raises(ValueError, match=rf"log\.jsonl:{line}: .*{message}.*delete this line"):
        run(log, [Task("one", {"a": "a note"}, id="x")], model=model, rounds=1)
    assert not model.requests


@pytest.mark.parametrize(
    ("line", "found", "message"),
    [
        (5, 7, "what b said in round 0 .* is here, and what a said before, in round 0, is missing"),
        (11, 13, "what decider said in round 1 .*what c said before"),
    ],
)
def test_a_lost_line_is_found_by_what_was_said_after_it(tmp_path, written, line, found, message):
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join([*written[: line - 1], *written[line:], ""]))
    with pytest.raises(ValueError, match=rf"log\.jsonl:{found}: {message}"):
        run(log, [Task("one", {"a": "a note"}, id="x")], rounds=1)


def test_what_a_silent_agent_said_is_refused(tmp_path, written):
    log = tmp_path / "log.jsonl"
    quiet = Rounds.repeated(Schedule.complete(NAMES), 1)
    quiet = Rounds(quiet.schedules, [{"b"}])
    talk = Discussion(agents(*NAMES), quiet, Recorder(), FullContext(), log=log)
    asyncio.run(talk.run("one"))
    log.write_text(log.read_text().replace('"agent": "a"', '"agent": "b"'))
    with pytest.raises(ValueError, match=r"log\.jsonl:3: .*'b' is silent in round 0"):
        asyncio.run(talk.run("one"))


def test_a_task_that_begins_twice_is_refused(tmp_path, written):
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join([*written[:2], written[1], ""]))
    with pytest.raises(ValueError, match=r"log\.jsonl:3: .*the task 'x' stands above already"):
        run(log, [Task("one", {"a": "a note"}, id="x")], rounds=1)


def test_two_threads_cannot_write_one_log(tmp_path):
    log, begun, ended = tmp_path / "log.jsonl", threading.Event(), threading.Event()

    def answer(messages):
        begun.set()
        assert ended.wait(30)
        return "yes"

    def first():
        talk = discussion(log, CallableModel(answer), FullContext(), decision=ByLast(), rounds=1)
        return asyncio.run(talk.run("one")).answer

    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(first)
        try:
            assert begun.wait(30)
            with pytest.raises(ValueError, match="another discussion is writing"):
                run(log, ["two"])
        finally:
            ended.set()
        assert answered.result() == "yes"
    assert [line.get("text") for line in lines(log) if "call" in line] == ["yes"] * 3


def test_a_disk_that_is_full_for_a_moment_costs_what_was_said_meanwhile(tmp_path):
    log = tmp_path / "log.jsonl"
    keys = [("t", 0, name, "message", 0) for name in NAMES]
    answer = dict(prompt_tokens=1, completion_tokens=1, anchor_tokens=0, seconds=0.5)
    answer |= dict(seed=3, prompt="0" * 16, policy_seconds=0.0)
    with Log(log, {}) as held:
        held.answered(keys[0], {"text": "a", **answer})
        with no_room(log):
            with pytest.raises(OSError, match="too large"):
                held.answered(keys[1], {"text": "b" * 100, **answer})
            with pytest.raises(OSError, match="too large"):
                held.begin("t", "text", {})
            with pytest.raises(OSError, match="too large"):
                held.ended("t", {})
        assert held.find(keys[1]) is None, "it must be asked again"
        held.answered(keys[2], {"text": "c", **answer})
        held.begin("t", "text", {})
        held.ended("t", {})
    assert [line.get("text") for line in lines(log)[1:]] == ["a", "c", "text", None]
    with Log(log, {}) as held:
        assert [held.find(key) is None for key in keys] == [False, True, False]


def test_a_torn_header_is_written_anew(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"radar_disc')
    run(log, ["one"])
    assert lines(log)[0]["radar_discussion"] == 1


def test_two_discussions_cannot_write_one_log(tmp_path):
    log = tmp_path / "log.jsonl"

    async def both():
        slow = Recorder(delay={"a": 0.05})
        first = asyncio.create_task(discussion(log, slow).run("one"))
        await asyncio.sleep(0.05)
        with pytest.raises(ValueError, match="another discussion is writing"):
            await discussion(log).run("two")
        await first

    asyncio.run(both())


def test_failed_attempts_and_what_was_said_before_are_in_the_log(tmp_path):
    log = tmp_path / "log.jsonl"

    def answer(messages):
        if "b says" in messages[-1]["content"]:
            raise ConnectionError("gone")
        return "b says yes"

    names = ["a", "b"]
    talk = Discussion(
        agents(*names),
        Topology([], names),
        CallableModel(answer),
        FullContext(),
        log=log,
        attempts=2,
        backoff=0.0,
        decision=ByLast(),
    )
    with pytest.raises(DiscussionError, match=r"what was said so far is in .*log\.jsonl"):
        asyncio.run(talk.run("What now?"))
    calls = [line for line in lines(log) if "call" in line]
    assert [call["agent"] for call in calls if "text" in call] == ["a", "b"]
    failures = [call for call in calls if "failure" in call]
    assert {(call["agent"], call["attempt"]) for call in failures} == {
        (name, attempt) for name in names for attempt in (1, 2)
    }
    assert failures[0]["failure"] == "ConnectionError: gone"


def test_settings_are_described_alike_in_every_process():
    class Plain:
        def __init__(self):
            self.number, self._private, self.method = 3, object(), AttentionBias(2.0)

    told = described({"it": Plain(), "where": Path("a/b"), "set": {2, 1}, "f": run})
    assert json.loads(json.dumps(told)) == told
    assert told["it"]["class"].endswith("Plain") and told["it"]["number"] == 3
    assert told["it"]["method"]["bias"] == 2.0 and "_private" not in told["it"]
    assert told["where"] == "a/b" and told["set"] == [1, 2]
    assert told["f"] == "tests.discussion.test_log.run"
    assert " at 0x" not in json.dumps(told)


def test_settings_that_hold_themselves_are_described_too():
    class Ring:
        def __init__(self):
            self.ring = self

    assert json.dumps(described(Ring())).count("Ring") < 20
