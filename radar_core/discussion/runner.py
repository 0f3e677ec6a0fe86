"""Running discussions: who speaks when, what each is shown, and what is kept of it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from radar_core.checks import check_has, check_number, check_whole
from radar_core.discussion.agent import Agent, names_of
from radar_core.discussion.decision import ByReference, Decision
from radar_core.discussion.log import Key, Log
from radar_core.discussion.model import (
    LASTING_ERRORS,
    Answer,
    Model,
    Request,
    answer_of,
    check_model,
    check_sampling,
    seconds_of,
)
from radar_core.discussion.outcome import Outcome, Spoken, Verdict
from radar_core.discussion.rounds import Rounds
from radar_core.discussion.settings import described
from radar_core.discussion.task import Task
from radar_core.policies.policy import Context, Policy, Turn
from radar_core.schedule import Schedule
from radar_core.topology import Topology
from radar_core.transcript import Message, Transcript

__all__ = ["Discussion", "DiscussionError"]

Progress = Callable[[int, int], None]

DECIDE = "decide"
_DIGEST = re.compile("[0-9a-f]{16}")


class DiscussionError(RuntimeError):
    """A discussion could not go on; what was said so far is in its log."""


@dataclass(frozen=True, eq=False)
class Discussion:
    """Several agents that work on a task in rounds, and a decision at the end.

    In each round the agents speak in the order of the schedule's spatial graph; those that do not
    hear each other within the round speak at the same time. What an agent can have heard is
    everything of earlier rounds and what those said that reach it within this round; its policy
    decides what of that it is shown, and what is anchored.

    With the same settings and a deterministic model a discussion always takes the same course. A
    call's seed depends on the discussion's seed, the task, the round and the agent alone.

    Args:
        agents: who takes part.
        schedule: who hears whom: a `Schedule` for every round, `Rounds` with one for each, or a
            `Topology`, of which each round uses what has no cycle and each but the first all of it.
        model: answers the prompts; many may be asked at once.
        policy: decides what agents without a policy of their own are shown.
        rounds: how many; None for 2, or as many as `Rounds` has.
        decision: settles the answer: `ByReference()`, `ByLast()` or `ByMajority(parse)`.
        max_new_tokens: length limit of a message, in tokens.
        temperature: 0 answers greedily.
        seed: of everything that is drawn.
        log: a file to which every answer is written as it comes. If it has answers already, they
            are not asked for again. None keeps nothing.
        attempts: how often a call is tried, unless it fails for what will fail again (ValueError).
        backoff: seconds before the second try; doubled for each further one.

    Raises:
        ValueError: a value is unusable, or agents and schedule do not have the same names.
    """

    agents: Sequence[Agent]
    schedule: Schedule | Topology | Rounds
    model: Model
    policy: Policy
    rounds: int | None = None
    decision: Decision = field(default_factory=ByReference)
    max_new_tokens: int = field(default=256, kw_only=True)
    temperature: float = field(default=0.0, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    log: str | os.PathLike[str] | None = field(default=None, kw_only=True)
    attempts: int = field(default=4, kw_only=True)
    backoff: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "agents", tuple(self.agents))
        _check_agents(self.agents, self.schedule)
        check_sampling(self.max_new_tokens, self.temperature, self.seed)
        check_whole("attempts", self.attempts, 1)
        check_number("backoff", self.backoff)
        if self.rounds is not None:
            check_whole("rounds", self.rounds, 1)
        if self.log is not None and not isinstance(self.log, str | os.PathLike):
            raise ValueError(f"log must be a path, or None for none, got {self.log!r}")
        check_has("policy", self.policy, "context", "FullContext()")
        check_has("decision", self.decision, "decide", "ByLast()")
        if isinstance(self.decision, ByReference):
            self._check_decider(self.decision.decider)
        check_model(self.model)
        if isinstance(self.schedule, Rounds) and self.rounds not in (None, len(self.schedule)):
            raise ValueError(
                f"rounds is {self.rounds}, but the schedule has {len(self.schedule)} rounds"
            )

    @property
    def settings(self) -> Mapping[str, Any]:
        """What the course of a discussion depends on, as JSON; it heads the log."""
        return {
            "agents": described(self.agents),
            "rounds": described(self.plan),
            "topology": described(self.topology),
            "model": described(self.model),
            "policy": described(self.policy),
            "decision": described(self.decision),
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
        }

    @cached_property
    def plan(self) -> Rounds:
        """Who hears whom, and who is silent, round by round."""
        if isinstance(self.schedule, Rounds):
            return self.schedule
        rounds = 2 if self.rounds is None else self.rounds
        if isinstance(self.schedule, Topology):
            schedule = Schedule(self.schedule.acyclic(), self.schedule)
            return Rounds.repeated(schedule, rounds)
        return Rounds.repeated(self.schedule, rounds)

    @cached_property
    def topology(self) -> Topology:
        """Who sends to whom, in any round: what hops are counted in."""
        return self.schedule if isinstance(self.schedule, Topology) else self.plan.topology

    async def run(self, task: str | Task, *, progress: Progress | None = None) -> Outcome:
        """Discuss a task.

        Args:
            task: its text, or a `Task`.
            progress: as in `run_many`.

        Returns:
            What came of it.

        Raises:
            DiscussionError: a call failed as often as it may be tried, or for good.
            ValueError: the task is unusable, or the log belongs to another discussion.
        """
        return (await self.run_many([task], progress=progress))[0]

    async def run_many(
        self,
        tasks: Iterable[str | Task],
        *,
        at_once: int = 8,
        progress: Progress | None = None,
    ) -> list[Outcome]:
        """Discuss several tasks, each by itself.

        Args:
            tasks: their texts, or `Task`s.
            at_once: how many are discussed at the same time.
            progress: told, after each message, how many messages have been said and how many there
                will be (the decider's left out); for a progress bar.

        Returns:
            What came of each, in order.

        Raises:
            DiscussionError: as `run`; no further task is begun then, and those under way end first.
            ValueError: as `run`, or two tasks have the same id.
        """
        check_whole("at_once", at_once, 1)
        if progress is not None and not callable(progress):
            raise ValueError(f"progress must be a function of two counts, got {progress!r}")
        listed = [task if isinstance(task, Task) else Task(task) for task in tasks]
        self._check_tasks(listed)
        count = _Count(len(listed) * sum(map(self.plan.speakers, range(len(self.plan)))), progress)
        places = asyncio.Semaphore(at_once)
        failed = asyncio.Event()

        async def discuss(task: Task, log: Log) -> Outcome | None:
            async with places:
                if failed.is_set():
                    return None
                try:
                    return await _Talk(self, task, log, count).run()
                except BaseException:  # a model may raise CancelledError, or exit
                    failed.set()
                    raise

        with Log(self.log, self.settings, self._check_call) as log:
            for task in listed:
                self._check_order(task, log)
            results = await asyncio.gather(
                *(discuss(task, log) for task in listed), return_exceptions=True
            )
        outcomes = [result for result in results if isinstance(result, Outcome)]
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            if len(listed) > 1:
                errors[0].add_note(f"{len(outcomes)} of {len(listed)} tasks came to their end")
            raise errors[0]
        return outcomes

    def _check_decider(self, decider: Agent) -> None:
        if decider.name in names_of(self.agents):
            raise ValueError(
                f"the decider is called {decider.name!r}, as one of the agents is; give it a name "
                "of its own"
            )

    def _check_call(self, key: Key, record: Mapping[str, Any]) -> None:
        """Raise ValueError for a call that this discussion cannot have logged."""
        _, round, agent, call, number = key
        last = len(self.plan)  # who speaks after all rounds is the decision's to say
        takes_part = agent in names_of(self.agents)
        if round > last or takes_part == (round == last):
            raise ValueError(f"{agent!r} has no turn in round {round}")
        if round < last and agent in self.plan.silent[round]:
            raise ValueError(f"{agent!r} is silent in round {round}")
        if call == "message" and number:
            raise ValueError(f"number is {number}; a turn has one message, number 0")
        seed = _seed(self.seed, *key)
        if record["seed"] != seed:
            raise ValueError(f"seed is {record['seed']!r}; this call of the discussion has {seed}")
        if not _DIGEST.fullmatch(record["prompt"]):
            raise ValueError(f"prompt is {record['prompt']!r}; expected 16 hexadecimal digits")

    def _check_order(self, task: Task, log: Log) -> None:
        """Raise ValueError if a log has what was said and lacks what had to be said before."""
        waves = [(n, wave) for n in range(len(self.plan)) for wave in self.plan.waves(n)]
        if isinstance(self.decision, ByReference):
            waves.append((len(self.plan), [self.decision.decider.name]))
        missing: Key | None = None
        for round, wave in waves:
            keys: list[Key] = [(task.id, round, name, "message", 0) for name in wave]
            logged = [key for key in keys if log.find(key) is not None]
            if missing is not None and logged:
                raise log.damaged(
                    logged[0],
                    f"what {logged[0][2]} said in round {round} of {task.label} is here, and what "
                    f"{missing[2]} said before, in round {missing[1]}, is missing",
                )
            missing = missing or next((key for key in keys if key not in logged), None)

    def _check_tasks(self, tasks: Sequence[Task]) -> None:
        names = {agent.name for agent in self.agents}
        for task in tasks:
            unknown = [name for name in task.notes if name not in names]
            if unknown:
                raise ValueError(
                    f"task {task.id!r} has notes for {unknown[0]!r}, who does not take part; the "
                    f"agents are {', '.join(sorted(names))}"
                )
        twice = [name for name, n in Counter(task.id for task in tasks).items() if n > 1]
        if twice:
            raise ValueError(
                f"two tasks have the id {twice[0]!r}; give tasks with the same text ids of their "
                "own: Task(text, id=...)"
            )


class _Count:
    """Counts messages for a progress bar."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done = 0
        self.total = total
        self.progress = progress

    def one_more(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total)


@dataclass(frozen=True)
class _Prompt:
    """What an agent is about to be asked."""

    agent: Agent
    round: int
    request: Request
    policy_seconds: float
    policy_calls: tuple[Answer, ...]


class _Talk:
    """One task under discussion."""

    def __init__(self, discussion: Discussion, task: Task, log: Log, count: _Count) -> None:
        self.discussion = discussion
        self.task = task
        self.log = log
        self.count = count
        self.agents = {agent.name: agent for agent in discussion.agents}
        self.roles = {agent.name: agent.role for agent in discussion.agents}

    async def run(self) -> Outcome:
        started = time.perf_counter()
        self.log.begin(self.task.id, self.task.text, self.task.notes)
        said: list[Spoken] = []
        for round in range(len(self.discussion.plan)):
            said += await self._round(round, said)
        last = [one for one in said if one.round == said[-1].round]
        decision = self.discussion.decision
        verdict = await decision.decide(last, self._one_more)
        if not isinstance(verdict, Verdict):
            raise TypeError(
                f"{type(decision).__name__}.decide returned a {type(verdict).__name__}; expected a "
                "Verdict"
            )
        seconds = time.perf_counter() - started
        self.log.ended(self.task.id, _verdict_record(verdict, seconds))
        return Outcome(self.task, tuple(said), verdict, seconds)

    async def _round(self, round: int, before: Sequence[Spoken]) -> list[Spoken]:
        plan = self.discussion.plan
        spatial = plan.schedules[round].spatial
        said: dict[str, Spoken] = {}
        order = [name for name in plan.schedules[round].order() if name not in plan.silent[round]]
        for wave in plan.waves(round):
            turns = []
            for name in wave:
                reaches = spatial.hops_to(name)
                heard = [said[other] for other in order if other in said and reaches[other] > 0]
                agent = self.agents[name]
                turn = self._turn(agent, round, [*before, *heard], self.discussion.topology)
                turns.append((agent, turn))
            for one in await self._speak(turns):
                said[one.agent] = one
                self.count.one_more()
        return [said[name] for name in order]

    async def _one_more(self, agent: Agent, heard: Sequence[Spoken]) -> Spoken:
        """Let an agent speak that is none of the discussion's, such as a decider."""
        self.discussion._check_decider(agent)
        names = [*self.roles, agent.name]
        topology = Topology([(one.agent, agent.name) for one in heard], names)
        turn = self._turn(agent, len(self.discussion.plan), heard, topology, DECIDE)
        return (await self._speak([(agent, turn)]))[0]

    def _turn(
        self,
        agent: Agent,
        round: int,
        heard: Sequence[Spoken],
        topology: Topology,
        stage: str | None = None,
    ) -> Turn:
        query = self.task.text
        if agent.instruction:
            query += f"\n\n{agent.instruction}"
        notes = self.task.notes.get(agent.name)
        system = agent.system
        if notes:
            system = f"{system}\n\nYour private notes, which nobody else has:\n{notes}".strip()
        return Turn(
            agent.name,
            self.task.text,
            query,
            round,
            Transcript(Message(one.agent, one.round, one.text) for one in heard),
            topology,
            {**self.roles, agent.name: agent.role},
            system or None,
            stage,
        )

    async def _speak(self, turns: Sequence[tuple[Agent, Turn]]) -> list[Spoken]:
        """Let agents speak at the same time: all prompts are written before the first is asked.

        A model that batches what waits can so answer them together.
        """
        prompts = await _together(self._logged_or_prompt(agent, turn) for agent, turn in turns)
        return await _together(
            _done(one) if isinstance(one, Spoken) else self._ask(one) for one in prompts
        )

    async def _logged_or_prompt(self, agent: Agent, turn: Turn) -> Spoken | _Prompt:
        logged = self._logged(turn)
        if logged is not None:
            return logged
        discussion = self.discussion
        asked: list[Answer | None] = []

        async def ask(messages: Sequence[Mapping[str, str]], max_new_tokens: int) -> str:
            number = len(asked)
            asked.append(None)
            request = self._request(turn, "policy", number, messages, max_new_tokens)
            asked[number] = answer = await self._answered(turn, "policy", number, request)
            return answer.text

        try:
            context = await (agent.policy or discussion.policy).context(turn, ask)
            if not isinstance(context, Context):
                raise TypeError(
                    f"its context is a {type(context).__name__}; expected a Context, such as "
                    "Context(messages)"
                )
            seconds = seconds_of("its context", context.seconds)
        except Exception as error:
            error.add_note(f"in {agent.name}'s policy, round {turn.round}, {self.task.label}")
            raise
        request = self._request(turn, "message", 0, context.messages, discussion.max_new_tokens)
        request = replace(
            request,
            anchors=tuple(context.anchors),
            method=context.method,
            selector=context.selector,
        )
        answers = tuple(answer for answer in asked if answer is not None)
        return _Prompt(agent, turn.round, request, seconds, answers)

    async def _ask(self, prompt: _Prompt) -> Spoken:
        key = (self.task.id, prompt.round, prompt.agent.name, "message", 0)
        answer = await self._call(
            key, prompt.request, {"policy_seconds": round(prompt.policy_seconds, 6)}
        )
        return Spoken(
            prompt.agent.name, prompt.round, answer, prompt.policy_seconds, prompt.policy_calls
        )

    def _logged(self, turn: Turn) -> Spoken | None:
        key = (self.task.id, turn.round, turn.receiver)
        record = self.log.find((*key, "message", 0))
        if record is None:
            return None
        asked: list[Answer] = []
        while (call := self.log.find((*key, "policy", len(asked)))) is not None:
            asked.append(_answer(call))
        return Spoken(
            turn.receiver,
            turn.round,
            _answer(record),
            record["policy_seconds"],
            tuple(asked),
            from_log=True,
        )

    def _request(
        self,
        turn: Turn,
        call: str,
        number: int,
        messages: Sequence[Mapping[str, str]],
        max_new_tokens: int,
    ) -> Request:
        discussion = self.discussion
        return Request(
            messages,
            max_new_tokens,
            temperature=discussion.temperature,
            seed=_seed(discussion.seed, self.task.id, turn.round, turn.receiver, call, number),
            speaker=turn.receiver,
        )

    async def _answered(self, turn: Turn, call: str, number: int, request: Request) -> Answer:
        """Answer a policy's own prompt, from the log if it has been answered before."""
        key = (self.task.id, turn.round, turn.receiver, call, number)
        record = self.log.find(key)
        if record is None:
            return await self._call(key, request, {})
        if record.get("prompt") != _digest(request):
            raise self.log.damaged(
                key,
                f"the log has another prompt as call {number} of {turn.receiver}'s policy in round "
                f"{turn.round} of {self.task.label}; a policy must write the same prompts for "
                "the same turn",
            )
        return _answer(record)

    async def _call(self, key: Key, request: Request, more: Mapping[str, Any]) -> Answer:
        discussion = self.discussion
        for attempt in range(1, discussion.attempts + 1):
            try:
                answer = await answer_of(discussion.model, request)
                Message(key[2], key[1], answer.text)  # raises for what no transcript can hold
                break
            except Exception as error:
                self.log.failed(key, attempt, error)
                lasting = isinstance(error, LASTING_ERRORS)
                if lasting or attempt == discussion.attempts:
                    raise DiscussionError(self._explained(key, attempt, error)) from error
                await asyncio.sleep(discussion.backoff * 2 ** (attempt - 1))
        record = {**asdict(answer), "seed": request.seed, "prompt": _digest(request), **more}
        self.log.answered(key, record)
        return answer

    def _explained(self, key: Key, attempt: int, error: Any) -> str:
        _, round, agent, call, _ = key
        whose = f"{agent}'s policy" if call == "policy" else agent
        tries = "once" if attempt == 1 else f"{attempt} times"
        kept = (
            "nothing was kept, as there is no log"
            if self.log.path is None
            else f"what was said so far is in {self.log.path}, run again to go on from it"
        )
        return (
            f"the model was asked {tries} for {whose} in round {round} of {self.task.label} and "
            f"failed ({type(error).__name__}: {error}); {kept}"
        )


async def _done(spoken: Spoken) -> Spoken:
    return spoken


async def _together(awaitables: Iterable[Any]) -> list[Any]:
    """Await all, the failing ones too, and raise the first error if there is one."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _seed(*parts: Any) -> int:
    """Return a whole number below 2**31 that depends on all parts, the same on every machine."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def _digest(request: Request) -> str:
    content = repr(([sorted(message.items()) for message in request.messages], request.anchors))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _answer(record: Mapping[str, Any]) -> Answer:
    return Answer(**{name: record[name] for name in Answer.__dataclass_fields__})


def _verdict_record(verdict: Verdict, seconds: float) -> dict[str, Any]:
    return {
        "answer": verdict.answer,
        "votes": dict(verdict.votes),
        "unparsed": verdict.unparsed,
        "seconds": round(seconds, 3),
    }


def _check_agents(agents: Sequence[Agent], schedule: Any) -> None:
    if not isinstance(schedule, Schedule | Topology | Rounds):
        raise ValueError(
            f"schedule is a {type(schedule).__name__}; expected a Schedule such as "
            "Schedule.random(names), a Topology, or Rounds"
        )
    names = names_of(agents)
    if sorted(names) != sorted(schedule.agents):
        raise ValueError(
            f"the agents are {', '.join(names) or 'none'}, but the schedule knows "
            f"{', '.join(schedule.agents)}; expected the same names, each once"
        )
