"""What the rows of the experiment `discussion` say: scores, tokens, time, and two bars on time.

All comparisons are paired: the same item with the plain system and with another arm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radar_core.evaluation.experiment import Plot, Row, Summary, Table
from radar_core.evaluation.statistics import mean_interval, paired

__all__ = ["LARGEST_OVERHEAD", "LARGEST_SHARE", "PLAIN", "STEERED", "summarise"]

PLAIN = "full"
STEERED = ("agent-radar", "agent-radar-attention", "agent-radar-paper")
LARGEST_OVERHEAD = 1.10
LARGEST_SHARE = 0.02
PAPERS_OVERHEAD = 1.235


@dataclass(frozen=True)
class Arm:
    """The rows of one arm and of the plain system, by item."""

    name: str
    rows: Mapping[str, Row]
    plain: Mapping[str, Row]

    def values(self, measure: str) -> list[float]:
        """Return a measure of every item."""
        return [float(row[measure]) for row in self.rows.values()]

    def plain_values(self, measure: str) -> list[float]:
        """Return the same items' measure under the plain system."""
        return [float(self.plain[item][measure]) for item in self.rows]

    def total(self, measure: str) -> float:
        """Return the sum of a measure."""
        return sum(self.values(measure))

    def mean(self, measure: str) -> float:
        """Return the mean of a measure."""
        return self.total(measure) / len(self.rows)

    @property
    def overhead(self) -> float:
        """Time of all tasks over the plain system's."""
        return self.total("seconds") / sum(self.plain_values("seconds"))

    @property
    def overheads(self) -> list[float]:
        """Time over the plain system's, task by task."""
        pairs = zip(self.values("seconds"), self.plain_values("seconds"), strict=True)
        return [mine / plain for mine, plain in pairs]

    @property
    def overhead_per_token(self) -> float | None:
        """Time per generated token over the plain system's; None if nothing was generated."""
        mine, plain = self.total("completion_tokens"), sum(self.plain_values("completion_tokens"))
        return self.overhead * plain / mine if mine and plain else None

    @property
    def share(self) -> float:
        """Share of the time that the policy took, model calls left out."""
        return self.total("policy_seconds") / self.total("seconds")


def summarise(rows: Sequence[Row], seed: int = 0) -> Summary:
    """Compare every arm with the plain system.

    Args:
        rows: of `Discussions.measure`, each with its "item".
        seed: of intervals and tests.

    Returns:
        What the arms cost and whether the bars hold; then, for each data set, a table of scores and
        a picture.
    """
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    tables, plots = [_costs(rows, seed)], []
    for dataset in datasets:
        of_set = [row for row in rows if row["dataset"] == dataset]
        tables.append(_scores(dataset, of_set, seed))
        plots.append(Plot(f"discussion-{dataset}", _drawing(dataset, of_set, seed)))
    return Summary(tables, plots)


def _arms(rows: Sequence[Row]) -> list[Arm]:
    """Return the arms in alphabetical order, the plain system first."""
    by_arm: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_arm.setdefault(row["arm"], {})[row["item"]] = row
    plain = by_arm[PLAIN]
    names = sorted(by_arm, key=lambda name: (name != PLAIN, name))
    return [Arm(name, by_arm[name], plain) for name in names]


def _costs(rows: Sequence[Row], seed: int) -> Table:
    arms = _arms(rows)
    cells: list[list[str | float | int | None]] = []
    for arm in arms:
        interval = mean_interval(arm.overheads, seed=seed)
        each = ("seconds", "calls", "prompt_tokens", "completion_tokens", "anchor_tokens")
        line: list[Any] = [
            arm.name,
            *map(arm.mean, each),
            arm.overhead,
            interval.low,
            interval.high,
        ]
        cells.append([*line, arm.overhead_per_token, arm.share, _bars(arm)])
    return Table(
        f"What a task takes: {len(arms)} arms, {len(arms[0].rows)} items",
        [
            "arm",
            "seconds",
            "calls",
            "prompt tokens",
            "completion tokens",
            "anchored tokens",
            "overhead",
            "low",
            "high",
            "overhead per token",
            "policy's share",
            "bars",
        ],
        cells,
        "seconds: wall time per task; the arms of an item run one after another in a random order. "
        f"overhead: time of all tasks over that of {PLAIN!r}, the plain system; low, high: "
        "bootstrap 95 % interval of its mean over tasks; per token: the same per generated token, "
        "as arms end their messages sooner or later. policy's share: time spent on choosing what "
        "to show and to anchor, model calls left out. bars, for Agent-Radar: an overhead of at "
        f"most {LARGEST_OVERHEAD:.2f} (the paper's is {PAPERS_OVERHEAD}), a share of at most "
        f"{LARGEST_SHARE:.0%}.",
    )


def _bars(arm: Arm) -> str | None:
    if arm.name not in STEERED:
        return None
    missed = ["overhead"] * (arm.overhead > LARGEST_OVERHEAD)
    missed += ["share"] * (arm.share > LARGEST_SHARE)
    return f"missed: {', '.join(missed)}" if missed else "met"


def _scores(dataset: str, rows: Sequence[Row], seed: int) -> Table:
    cells: list[list[str | float | int | None]] = []
    arms = _arms(rows)
    for arm in arms:
        interval = mean_interval(arm.values("score"), seed=seed)
        line: list[Any] = [arm.name, interval.mean, interval.low, interval.high]
        if arm.name == PLAIN:
            line += [None] * 4
        else:
            compared = paired(arm.values("score"), arm.plain_values("score"), seed=seed)
            change = compared.difference
            line += [change.mean, change.low, change.high, compared.p_value]
        cells.append([*line, arm.mean("unparsed")])
    return Table(
        f"{dataset}: scores of {len(arms)} arms, {len(arms[0].rows)} items",
        ["arm", "score", "low", "high", "difference", "low", "high", "p", "unparsed votes"],
        cells,
        f"score: F1 or share of right answers, with a bootstrap 95 % interval; difference to "
        f"{PLAIN!r}, paired; p: sign-flip permutation test, for this arm alone. unparsed votes: "
        "answers per task in which none could be found, where there is a vote; they never win.",
    )


def _drawing(dataset: str, rows: Sequence[Row], seed: int) -> Callable[[Any], None]:
    arms = _arms(rows)
    intervals = [mean_interval(arm.values("score"), seed=seed) for arm in arms]

    def draw(axes: Any) -> None:
        for arm, interval in zip(arms, intervals, strict=True):
            spread = [[interval.mean - interval.low], [interval.high - interval.mean]]
            place = arm.mean("seconds")
            axes.errorbar([place], [interval.mean], yerr=spread, fmt="o", capsize=3)
            axes.annotate(arm.name, (place, interval.mean), fontsize="small")
        axes.set_xlabel("seconds per task")
        axes.set_ylabel("score (95 % intervals)")
        axes.set_title(dataset)

    return draw
