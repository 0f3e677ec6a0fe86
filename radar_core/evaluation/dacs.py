"""Experiment 4: does DACS keep an orchestrator's context in focus?

Scripted agents ask an orchestrator for decisions, several at a time, and its model answers from a
focus context, from a flat one, from a flat one that repeats the request at its end, or from a flat
one that is steered towards the focus context. M1, M2 and M3 of every arm are compared.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from radar_core.discussion.model import Model
from radar_core.evaluation.experiment import Plot, Row, Summary, Table
from radar_core.evaluation.options import names, number, whole_number
from radar_core.evaluation.scenarios import SCENARIOS, Scenario, ScriptedAgent
from radar_core.evaluation.statistics import Interval, mean_interval, paired, welch
from radar_core.methods import AttentionBias, Method
from radar_core.policies.dacs.context import MODES, Mode
from radar_core.policies.dacs.log import EventLog
from radar_core.policies.dacs.metrics import Graded, grade, measure
from radar_core.policies.dacs.orchestrator import STEERING_PROMPT, Orchestrator
from radar_core.policies.dacs.registry import Status
from radar_core.policies.dacs.requests import SteeringRequest
from radar_core.policies.tokens import Tokenizer

if TYPE_CHECKING:
    from radar_core.evaluation.command import Arguments

__all__ = ["Dacs", "Trial", "build", "play", "summarise"]

OPTIONS = {
    "scenarios": "all",
    "arms": ",".join(MODES),
    "trials": "1",
    "max_new_tokens": "48",
    "budget": "4096",
    "bias": "2.0",
}
GUIDANCE_CHARACTERS = 80
BASELINE: Mode = "flat"


@dataclass(frozen=True)
class Trial:
    """A scenario, played once.

    Args:
        scenario: what is played.
        number: which trial of it; its agents ask in another order in each.
    """

    scenario: Scenario
    number: int


@dataclass(frozen=True)
class Dacs:
    """Compares what an orchestrator decides from focus contexts and from flat ones.

    Args:
        model: answers the orchestrator's prompts; it has to steer for the arm "soft".
        tokenizer: the model's own.
        scenarios: what is played.
        arms: "focus", "flat", "fair_flat", "soft".
        trials: how often each scenario is played, the agents asking in another order each time.
        max_new_tokens: length limit of a decision.
        budget: the most tokens of a context.
        method: the steering method of "soft"; None leaves it to the model.
        seed: of the orders in which agents ask.
        model_settings: what the answers depend on, as JSON.
    """

    model: Model
    tokenizer: Tokenizer
    scenarios: Sequence[Scenario] = tuple(SCENARIOS.values())
    arms: Sequence[Mode] = MODES
    trials: int = 1
    max_new_tokens: int = 48
    budget: int = 4096
    method: Method | None = None
    seed: int = 0
    model_settings: Mapping[str, Any] = field(default_factory=dict)
    name: ClassVar[str] = "dacs"

    @property
    def settings(self) -> dict[str, Any]:
        """What the results depend on, as JSON."""
        return {
            "scenarios": [scenario.name for scenario in self.scenarios],
            "arms": list(self.arms),
            "trials": self.trials,
            "max_new_tokens": self.max_new_tokens,
            "budget": self.budget,
            "method": repr(self.method),
            "seed": self.seed,
            "prompt": STEERING_PROMPT,
            **self.model_settings,
        }

    def items(self) -> list[tuple[str, Trial]]:
        """Return every trial of every scenario, all first trials first."""
        return [
            (f"{scenario.name}/{number}", Trial(scenario, number))
            for number in range(self.trials)
            for scenario in self.scenarios
        ]

    def measure(self, item: Trial) -> Iterator[dict[str, Any]]:
        """Play a trial under every arm.

        Args:
            item: the trial.

        Yields:
            A row for each arm: M1 ("accuracy"), M2 in both definitions, M3 (mean and 95th
            percentile), and every answer with what it was graded by.
        """
        yield from (self._play(item, arm) for arm in self.arms)

    def summarise(self, rows: Sequence[Row]) -> Summary:
        """Summarise rows; see `radar_core.evaluation.dacs.summarise`."""
        return summarise(rows, seed=self.seed)

    def _play(self, trial: Trial, arm: Mode) -> dict[str, Any]:
        log = EventLog()
        orchestrator = Orchestrator(
            self.model,
            self.tokenizer,
            budget=self.budget,
            mode=arm,
            log=log,
            method=self.method if arm == "soft" else None,
            max_new_tokens=self.max_new_tokens,
            max_seconds=86_400.0,  # a machine that is slow or was asleep is not measured
            attempts=1,
        )
        order = random.Random(f"{self.seed}/{trial.scenario.name}/{trial.number}")
        began = time.perf_counter()
        asyncio.run(play(trial.scenario, orchestrator, order))
        seconds = time.perf_counter() - began
        abandoned = [event for event in log.events if event["event"] == "STEERING_ABANDONED"]
        if abandoned:
            raise RuntimeError(
                f"{trial.scenario.name}, {arm}: {abandoned[0]['agent_id']!r} got no decision: "
                f"{abandoned[0]['reason']}"
            )
        metrics = measure(log.events, trial.scenario.decisions)
        return {
            "arm": arm,
            "scenario": trial.scenario.name,
            "agents": len(trial.scenario.agents),
            "trial": trial.number,
            "decisions": metrics.decisions,
            "accuracy": metrics.accuracy,
            "contamination_by_keywords": metrics.contamination_by_keywords,
            "contamination_by_ids": metrics.contamination_by_ids,
            "context_tokens": metrics.context_tokens,
            "context_tokens_p95": metrics.context_tokens_p95,
            "seconds": seconds,
            "answers": [_record(graded) for graded in grade(log.events, trial.scenario.decisions)],
        }


async def play(scenario: Scenario, orchestrator: Orchestrator, order: random.Random) -> None:
    """Have the scenario's agents follow their scripts, step by step together.

    All agents take their first step at once, in an order that is drawn; when all have their
    answers they take the second, and so on. So every request of a step waits while the first one
    is answered, and the run does not depend on how fast the model is.

    Args:
        scenario: what is played.
        orchestrator: a new one; it is entered and left here.
        order: draws the order of each step.
    """
    async with orchestrator:
        for agent in scenario.agents:
            orchestrator.register(agent.agent_id, agent.task)
        for number in range(max(len(agent.steps) for agent in scenario.agents)):
            acting = [agent for agent in scenario.agents if number < len(agent.steps)]
            order.shuffle(acting)
            await asyncio.gather(*(_act(orchestrator, agent, number) for agent in acting))


async def _act(orchestrator: Orchestrator, agent: ScriptedAgent, number: int) -> None:
    step, name = agent.steps[number], agent.agent_id
    orchestrator.heartbeat(name, summary=step.summary, urgency=step.urgency, output=step.output)
    if step.question is not None:
        request = SteeringRequest(
            name, step.question, step.output, step.urgency, request_id=f"{name}/{number}"
        )
        response = await orchestrator.steer(request)
        orchestrator.heartbeat(name, summary=f"Was told: {response.text[:GUIDANCE_CHARACTERS]}")
    if number == len(agent.steps) - 1:
        orchestrator.heartbeat(name, status=Status.COMPLETE)


def build(arguments: Arguments) -> Dacs:
    """Build the experiment from the command line's arguments.

    Args:
        arguments: model, tokenizer, seed, limit (of scenarios) and these options: "scenarios"
            ("all" or names with commas), "arms" (names with commas), "trials", "max_new_tokens",
            "budget" (tokens), "bias" (nats, of the generated queries in the upper third of the
            layers, for the arm "soft"). Data and encoder are not used.

    Returns:
        The experiment.

    Raises:
        ValueError: an option is unknown or has no such value.
    """
    from radar_core.discussion.steered_model import SteeredModel

    options = arguments.options_over(OPTIONS)
    scenarios = names("scenarios", options["scenarios"], SCENARIOS)[: arguments.limit]
    arms = names("arms", options["arms"], MODES)
    trials, max_new_tokens, budget = (
        whole_number(name, options[name]) for name in ("trials", "max_new_tokens", "budget")
    )
    bias = number("bias", options["bias"])
    model, tokenizer, _ = arguments.loaded
    method = _upper_third(model, bias)
    return Dacs(
        SteeredModel(model, tokenizer, method),
        tokenizer,
        [SCENARIOS[name] for name in scenarios],
        [mode for mode in MODES if mode in arms],
        trials,
        max_new_tokens,
        budget,
        method,
        arguments.seed,
    )


def _upper_third(model: Any, bias: float) -> AttentionBias:
    layers = model.config.get_text_config().num_hidden_layers
    return AttentionBias(
        bias, layers=tuple(range(layers - layers // 3, layers)), queries="generated"
    )


def _record(graded: Graded) -> dict[str, Any]:
    record = {item.name: getattr(graded, item.name) for item in fields(graded)}
    record["foreign_keywords"] = list(graded.foreign_keywords)
    record["foreign_ids"] = list(graded.foreign_ids)
    return record | {
        "decision": graded.decision.question,
        "keywords": list(graded.decision.keywords),
    }


def summarise(rows: Sequence[Row], seed: int = 0) -> Summary:
    """Compare the arms.

    Args:
        rows: of `Dacs.measure`, each with its "item".
        seed: of intervals and tests.

    Returns:
        Tables of all arms together, by number of agents, and against the flat context; pictures of
        accuracy and context size over the number of agents.
    """
    arms = [arm for arm in MODES if any(row["arm"] == arm for row in rows)]
    sizes = sorted({row["agents"] for row in rows})
    tables = [_overall(rows, arms, seed), _by_size(rows, arms, sizes, seed)]
    if BASELINE in arms and len(arms) > 1:
        tables.append(_against_flat(rows, arms, seed))
    plots = [
        Plot(f"dacs_{measure}", _drawing(rows, arms, sizes, measure, label, seed))
        for measure, label in (
            ("accuracy", "M1, accuracy"),
            ("contamination_by_keywords", "M2, contamination by keywords"),
            ("context_tokens", "M3, tokens of a context"),
        )
    ]
    return Summary(tables, plots)


def _overall(rows: Sequence[Row], arms: Sequence[str], seed: int) -> Table:
    cells = []
    for arm in arms:
        own = _of(rows, arm=arm)
        cells.append([arm, len(own), sum(row["decisions"] for row in own), *_measures(own, seed)])
    return Table(
        "An orchestrator's decisions, by what it was shown",
        ["context", "trials", "decisions", *_HEADS],
        cells,
        "Means over trials, 95 % bootstrap intervals in brackets. M1: the answer has a keyword of "
        "its own decision. M2: it has a keyword, or the name, of another agent. M3: tokens of the "
        "context that was built, system prompt and template not counted. A keyword in an answer is "
        "a coarse judge: it neither sees a refusal nor a wrong reason.",
    )


def _by_size(rows: Sequence[Row], arms: Sequence[str], sizes: Sequence[int], seed: int) -> Table:
    cells = []
    for size in sizes:
        for arm in arms:
            if own := _of(rows, arm=arm, agents=size):
                cells.append([size, arm, len(own), *_measures(own, seed)])
    return Table("The same by number of agents", ["agents", "context", "trials", *_HEADS], cells)


def _against_flat(rows: Sequence[Row], arms: Sequence[str], seed: int) -> Table:
    flat = {row["item"]: row for row in _of(rows, arm=BASELINE)}
    cells: list[list[str | float | int | None]] = []
    for arm in arms:
        own = [row for row in _of(rows, arm=arm) if row["item"] in flat]
        if arm == BASELINE or not own:
            continue
        values = [row["accuracy"] for row in own]
        baseline = [flat[row["item"]]["accuracy"] for row in own]
        difference = paired(values, baseline, seed=seed)
        ratios = [flat[row["item"]]["context_tokens"] / row["context_tokens"] for row in own]
        cells.append(
            [
                arm,
                difference.n,
                _interval(difference.difference, 3),
                difference.p_value,
                welch(values, baseline).p_value if len(values) > 1 else None,
                sum(ratios) / len(ratios),
            ]
        )
    return Table(
        "Accuracy against the flat context",
        ["context", "trials", "difference of M1", "p, paired", "p, Welch", "flat tokens / tokens"],
        cells,
        "Paired: sign-flip permutation test on the same trials. Welch's t as in the paper, which "
        "ignores that the trials are the same.",
    )


_HEADS = (
    "M1 accuracy",
    "M2 by keywords",
    "M2 by ids",
    "M3 tokens",
    "M3 tokens, p95",
)


def _measures(rows: Sequence[Row], seed: int) -> list[str | float | int | None]:
    shares = ("accuracy", "contamination_by_keywords", "contamination_by_ids")
    cells: list[str | float | int | None] = [
        _interval(mean_interval([row[name] for row in rows], seed=seed), 3) for name in shares
    ]
    sizes = mean_interval([row["context_tokens"] for row in rows], seed=seed)
    return [*cells, _interval(sizes, 0), max(row["context_tokens_p95"] for row in rows)]


def _interval(interval: Interval, digits: int) -> str:
    mean, low, high = (f"{x:.{digits}f}" for x in (interval.mean, interval.low, interval.high))
    return f"{mean} [{low}, {high}]"


def _of(rows: Sequence[Row], **values: Any) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def _drawing(
    rows: Sequence[Row],
    arms: Sequence[str],
    sizes: Sequence[int],
    measure: str,
    label: str,
    seed: int,
) -> Any:
    def draw(axes: Any) -> None:
        for arm in arms:
            groups = {size: _of(rows, arm=arm, agents=size) for size in sizes}
            found = {
                size: mean_interval([row[measure] for row in own], seed=seed)
                for size, own in groups.items()
                if own
            }
            means = [interval.mean for interval in found.values()]
            below = [interval.mean - interval.low for interval in found.values()]
            above = [interval.high - interval.mean for interval in found.values()]
            axes.errorbar(list(found), means, yerr=[below, above], label=arm, capsize=3, marker="o")
        axes.set_xlabel("agents")
        axes.set_ylabel(label)
        axes.set_xticks(list(sizes))
        axes.legend()

    return draw
