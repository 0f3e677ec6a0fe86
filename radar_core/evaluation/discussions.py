"""Experiment: what policies and systems make of discussions, and what they cost.

Four agents discuss in two rounds. A question's paragraphs are dealt out as their private notes, so
that they have to talk; problems and choices are plain tasks. For every item all arms run one after
another in a random order, so that what slows the machine down slows all of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from radar_core.discussion.agent import Agent
from radar_core.discussion.baselines import chain, debate, self_consistency, single_agent
from radar_core.discussion.decision import ByReference
from radar_core.discussion.dropout import agent_dropout
from radar_core.discussion.outcome import Outcome
from radar_core.discussion.pruning import agent_prune
from radar_core.discussion.rounds import Rounds
from radar_core.discussion.runner import Discussion
from radar_core.discussion.settings import described
from radar_core.discussion.steered_model import SteeredModel
from radar_core.discussion.task import Task
from radar_core.evaluation import discussions_summary
from radar_core.evaluation.datasets import (
    first_fields,
    load_choices,
    load_problems,
    load_questions,
)
from radar_core.evaluation.discussion_tasks import (
    Item,
    dataset_of,
    form,
    parse_answer,
    score,
    task_for,
    work,
)
from radar_core.evaluation.discussions_summary import PLAIN, STEERED
from radar_core.evaluation.experiment import Row, Summary
from radar_core.evaluation.options import names, whole_number, yes_or_no
from radar_core.policies.agent_radar import AgentRadarPolicy
from radar_core.policies.compaction import Compaction
from radar_core.policies.full import FullContext
from radar_core.policies.policy import Policy
from radar_core.policies.rcr import RCRRouter
from radar_core.recommended import CHOICE, recommended_method, recommended_policy
from radar_core.schedule import Schedule
from radar_core.topology import Topology

if TYPE_CHECKING:
    from radar_core.evaluation.command import Arguments

__all__ = ["ARMS", "Discussions", "build", "summarise"]

ROLES = ("planner", "searcher", "checker", "solver")
RADAR, ATTENTION, PAPER = STEERED
POLICIES = (PLAIN, *STEERED, "rcr", "compaction")
# Who hears nobody has all notes.
ALONE = ("single", "self-consistency")
LEARNED = ("agent-prune", "agent-dropout")
ARMS = (*POLICIES, *ALONE, "chain", "debate", *LEARNED)
OPTIONS = {
    "arms": ",".join(name for name in ARMS if name not in LEARNED),
    "agents": "4",
    "rounds": "2",
    "samples": "8",
    "max_new_tokens": "128",
    "schedule": "random",
    "fixed_length": "no",
    "train": "0",
}
SCHEDULES: Mapping[str, Callable[[Sequence[str], int], Schedule]] = {
    "random": lambda names, seed: Schedule.random(names, seed=seed),
    "complete": lambda names, seed: Schedule.complete(names),
    "layered": lambda names, seed: Schedule.layered(names),
    "chain": lambda names, seed: Schedule.chain(names),
    "debate": lambda names, seed: Schedule.debate(names),
    "star": lambda names, seed: Schedule.star(names),
}
WARM_UP = Task("Name a color.", id="warm-up")

summarise = discussions_summary.summarise


@dataclass(frozen=True, eq=False)
class Discussions:
    """Compares policies and systems by score, tokens and time per task.

    Args:
        model: a transformers causal language model in evaluation mode.
        tokenizer: its tokenizer, with a chat template.
        encoder: a sentence encoder for the policies that need one.
        tasks: questions, problems and choices.
        arms: which of `ARMS`, "full" among them, which the others are held against.
        agents: how many agents discuss.
        rounds: in how many rounds.
        samples: of self-consistency.
        max_new_tokens: length limit of a message, in tokens.
        schedule: "random", "complete", "layered", "chain", "debate" or "star".
        fixed_length: no message ends before its length limit, so that times compare the same work.
        training: what "agent-prune" and "agent-dropout" learn on; none of the tasks.
        seed: of the random schedule, the order of arms, all draws and intervals.

    Raises:
        ValueError: an arm or the schedule is unknown, "full" is missing, or there is nothing to
            learn on.
    """

    model: Any
    tokenizer: Any
    encoder: Any
    tasks: Sequence[Item]
    arms: Sequence[str] = tuple(name for name in ARMS if name not in LEARNED)
    agents: int = 4
    rounds: int = 2
    samples: int = 8
    max_new_tokens: int = 128
    schedule: str = "random"
    fixed_length: bool = False
    training: Sequence[Item] = ()
    seed: int = 0
    _warm: set[str] = field(init=False, repr=False, default_factory=set)
    _learned: dict[tuple[str, str], Schedule | Rounds] = field(
        init=False, repr=False, default_factory=dict
    )
    name: ClassVar[str] = "discussion"

    def __post_init__(self) -> None:
        _check(self.arms, self.schedule, self.training)

    @property
    def settings(self) -> dict[str, Any]:
        """What the results depend on, as JSON."""
        return {
            "arms": list(self.arms),
            "agents": described(self._agents(self.tasks[0])) if self.tasks else [],
            "rounds": self.rounds,
            "samples": self.samples,
            "max_new_tokens": self.max_new_tokens,
            "schedule": described(self._schedule),
            "fixed_length": self.fixed_length,
            "policies": {name: described(policy) for name, policy in self._policies.items()},
            "training": [f"{dataset_of(item)}/{item.id}" for item in self.training],
        }

    def items(self) -> list[tuple[str, Item]]:
        """Return every task with its name."""
        return [(f"{dataset_of(item)}/{item.id}", item) for item in self.tasks]

    def measure(self, item: Item) -> Iterator[dict[str, Any]]:
        """Run every arm on one item, in a random order.

        Before an arm runs for the first time in this process, it discusses a task that is not
        measured. What "agent-prune" and "agent-dropout" learn is learned before, too.

        Args:
            item: the item.

        Yields:
            A row for each arm, in the order in which they ran.
        """
        order = list(self.arms)
        draw = hashlib.sha256(f"{self.seed}:{dataset_of(item)}/{item.id}".encode()).digest()
        random.Random(draw).shuffle(order)
        discussions = {arm: self._discussion(arm, item) for arm in order}
        for arm, discussion in discussions.items():
            if arm not in self._warm:
                asyncio.run(replace(discussion, max_new_tokens=4).run(WARM_UP))
                self._warm.add(arm)
        for place, arm in enumerate(order):
            yield self._row(arm, item, self._run(arm, discussions[arm], item), place)

    def summarise(self, rows: Sequence[Row]) -> Summary:
        """Summarise rows; see `radar_core.evaluation.discussions_summary`."""
        return summarise(rows, seed=self.seed)

    # -- one arm -----------------------------------------------------------------------------------

    def _discussion(self, arm: str, item: Item) -> Discussion:
        model, agents = self._model, self._agents(item)
        parse = partial(parse_answer, item)
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "seed": self.seed}
        alone = Agent("solver", "solver", "You solve tasks carefully.", instruction=work(item))
        if arm == "single":
            return single_agent(model, alone, **options)
        if arm == "self-consistency":
            # Its draws are the model's own: nothing but temperature may shape them.
            return self_consistency(model, parse, self.samples, alone, **options)
        if arm == "chain":
            return chain(agents, model, **options)
        if arm == "debate":
            return debate(model, parse, agents, self.rounds, **options)
        options["decision"] = ByReference(_decider(item))
        policy = self._policies.get(arm, FullContext())
        plain = Discussion(agents, self._schedule, model, policy, self.rounds, **options)
        if arm in LEARNED:
            return replace(plain, schedule=self._learn(arm, plain, item))
        return plain

    def _run(self, arm: str, discussion: Discussion, item: Item) -> Outcome:
        names = [agent.name for agent in discussion.agents]
        return asyncio.run(discussion.run(task_for(item, names, shared=arm in ALONE)))

    def _row(self, arm: str, item: Item, outcome: Outcome, place: int) -> dict[str, Any]:
        return {
            "arm": arm,
            "dataset": dataset_of(item),
            "score": score(item, outcome.verdict.text),
            "answer": outcome.answer,
            "unparsed": outcome.verdict.unparsed,
            "seconds": outcome.seconds,
            "policy_seconds": outcome.policy_seconds,
            "prompt_tokens": outcome.prompt_tokens,
            "completion_tokens": outcome.completion_tokens,
            "anchor_tokens": sum(said.answer.anchor_tokens for said in outcome.spoken),
            "calls": outcome.calls,
            "place": place,
        }

    # -- what the arms are made of -----------------------------------------------------------------

    @cached_property
    def _model(self) -> SteeredModel:
        # The models' own repetition penalties and the like would not be the same work for all.
        options: dict[str, Any] = {"repetition_penalty": 1.0}
        if self.fixed_length:
            options["eos_token_id"] = None
        most = max(self.agents, self.samples)
        return SteeredModel(self.model, self.tokenizer, batch_size=most, options=options)

    @cached_property
    def _policies(self) -> dict[str, Policy]:
        """Every policy by its arm's name, each with embeddings of its own."""
        built: dict[str, Callable[[], Policy]] = {
            PLAIN: FullContext,
            RADAR: lambda: AgentRadarPolicy(self.encoder, method=recommended_method(), **CHOICE),
            ATTENTION: lambda: recommended_policy(self.model, self.tokenizer, self.encoder),
            PAPER: lambda: AgentRadarPolicy.paper(self.encoder),
            "rcr": lambda: RCRRouter(self.encoder, tokenizer=self.tokenizer),
            "compaction": lambda: Compaction(
                max_new_tokens=self.max_new_tokens, threshold=0, tokenizer=self.tokenizer
            ),
        }
        return {name: build() for name, build in built.items() if name in self.arms}

    @cached_property
    def _schedule(self) -> Schedule:
        return SCHEDULES[self.schedule](self._names, self.seed)

    @cached_property
    def _names(self) -> list[str]:
        names = []
        for place in range(self.agents):
            again, role = divmod(place, len(ROLES))
            names.append(ROLES[role] + (f" {again + 1}" if again else ""))
        return names

    def _agents(self, item: Item) -> list[Agent]:
        return [
            Agent(
                name,
                name.split()[0],
                f"You are the {name} in a small team. Each of you may know what nobody else knows.",
                instruction=work(item),
            )
            for name in self._names
        ]

    def _learn(self, arm: str, plain: Discussion, item: Item) -> Schedule | Rounds:
        """Learn a schedule for items of the same kind, once."""
        kind = type(item)
        known = self._learned.get((arm, kind.__name__))
        if known is not None:
            return known
        items = [one for one in self.training if type(one) is kind]
        if not items:
            raise ValueError(f"there is no item to learn on for {arm} on {dataset_of(item)}")

        async def utility(graphs: Schedule | Rounds, one: Item) -> float:
            discussion = replace(
                plain,
                agents=self._agents(one),
                decision=ByReference(_decider(one)),
                schedule=graphs,
                rounds=self.rounds,
            )
            outcome = await discussion.run(task_for(one, self._names))
            return score(one, outcome.verdict.text)

        everybody = Topology.complete(self._names)
        if arm == "agent-prune":
            pruned = agent_prune(everybody, everybody, utility, items, seed=self.seed)
            learned: Schedule | Rounds = asyncio.run(pruned).schedule
        else:
            dropped = agent_dropout(
                everybody, everybody, utility, items, rounds=self.rounds, seed=self.seed
            )
            learned = asyncio.run(dropped).rounds
        self._learned[arm, kind.__name__] = learned
        return learned


def build(arguments: Arguments) -> Discussions:
    """Build the experiment that the command line asks for.

    Args:
        arguments: with the options `arms` (names, by commas), `agents`, `rounds`, `samples`,
            `max_new_tokens`, `schedule`, `fixed_length` ("yes" or "no") and `train` (how many of
            each file's first items are set aside to learn on).

    Returns:
        The experiment.

    Raises:
        ValueError: no data is given, or an option is unknown or malformed.
    """
    options = arguments.options_over(OPTIONS)
    if not arguments.data:
        raise ValueError("--data: expected at least one file of questions, problems or choices")
    numbers = {
        name: whole_number(name, options[name], least)
        for name, least in (
            ("agents", 2),
            ("rounds", 1),
            ("samples", 1),
            ("max_new_tokens", 1),
            ("train", 0),
        )
    }
    train = numbers.pop("train")
    fixed_length = yes_or_no("fixed_length", options["fixed_length"])
    chosen = tuple(names("arms", options["arms"], ARMS))
    tasks: list[Item] = []
    training: list[Item] = []
    for path in arguments.data:
        loaded = _load(path)
        training += loaded[:train]
        end = None if arguments.limit is None else train + arguments.limit
        tasks += loaded[train:end]
    _check(chosen, options["schedule"], training)
    return Discussions(
        *arguments.loaded,
        tasks,
        chosen,
        schedule=options["schedule"],
        fixed_length=fixed_length,
        training=training,
        seed=arguments.seed,
        **numbers,
    )


def _decider(item: Item) -> Agent:
    return Agent(
        "decider",
        "decider",
        "You read what a team has found out and settle on one final answer.",
        instruction=f"Weigh what the others said and decide. {form(item)}",
    )


def _load(path: Path) -> Sequence[Item]:
    """Load a file of questions, problems or choices, by the fields of its first item."""
    fields = first_fields(path)
    if "options" in fields:
        return load_choices(path)
    return load_problems(path) if "problem" in fields else load_questions(path)


def _check(arms: Sequence[str], schedule: str, training: Sequence[Item]) -> None:
    """Check what `Discussions` refuses, for which there need be no model yet."""
    if set(arms) - set(ARMS) or PLAIN not in arms:
        raise ValueError(
            f"arms is {', '.join(arms)}; expected {PLAIN} and any of {', '.join(ARMS[1:])}"
        )
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}; expected one of {', '.join(SCHEDULES)}")
    if set(arms) & set(LEARNED) and not training:
        raise ValueError(
            f"{' and '.join(LEARNED)} need items to learn on; set aside some by --set train=10"
        )
