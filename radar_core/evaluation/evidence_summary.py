"""What the rows of the experiment `evidence` say: every arm against the unsteered model.

All comparisons are paired: the same item with and without steering.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radar_core.evaluation.arms import UNSTEERED
from radar_core.evaluation.experiment import Plot, Row, Summary, Table
from radar_core.evaluation.statistics import Interval, Paired, mean_interval, paired

__all__ = ["Choice", "choose", "halves", "summarise"]

CONFLICT = "conflict"
MEASURES = {True: "margin", False: "log_probability"}
SHORT = {"margin": "margin", "log_probability": "log p"}
# Halves of fewer items than this choose by chance.
LEAST = 4


@dataclass(frozen=True)
class Arm:
    """The rows of one arm, and of the unsteered model, by item."""

    name: str
    rows: Mapping[str, Row]
    unsteered: Mapping[str, Row]

    def values(self, measure: str, items: Sequence[str] | None = None) -> list[float]:
        """Return a measure of the given items, all of this arm's if None."""
        return [float(self.rows[item][measure]) for item in self._items(items)]

    def baseline(self, measure: str, items: Sequence[str] | None = None) -> list[float]:
        """Return the same of the unsteered model."""
        return [float(self.unsteered[item][measure]) for item in self._items(items)]

    def differences(self, measure: str, items: Sequence[str] | None = None) -> list[float]:
        """Return by how much steering changes a measure, item by item."""
        pairs = zip(self.values(measure, items), self.baseline(measure, items), strict=True)
        return [steered - plain for steered, plain in pairs]

    def mean(self, measure: str) -> float | None:
        """Return the mean of a measure over the items that have it; None if none has."""
        values = [row[measure] for row in self.rows.values() if row.get(measure) is not None]
        return sum(values) / len(values) if values else None

    def _items(self, items: Sequence[str] | None) -> Sequence[str]:
        return list(self.rows) if items is None else items


@dataclass(frozen=True)
class Choice:
    """An arm chosen on some items and measured on others.

    Args:
        on: which items it was chosen on.
        arm: its name; where several were chosen, all of them.
        gain: mean gain over the unsteered model on the items that it was chosen on; None where
            several were chosen.
        reported: the gain on the other items.
    """

    on: str
    arm: str
    gain: float | None
    reported: Paired


def summarise(rows: Sequence[Row], seed: int = 0) -> Summary:
    """Compare every arm with the unsteered model.

    Args:
        rows: of `Evidence.measure`, each with its "item".
        seed: of intervals, tests and halves.

    Returns:
        For each data set a table of all arms and a picture; then what comes of choosing an arm on
        one half of the items and reporting it on the other.
    """
    tables, plots = [], []
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    for dataset in datasets:
        of_set = [row for row in rows if row["dataset"] == dataset]
        tables.append(_comparison(dataset, of_set, seed))
        plots.append(_plot(dataset, of_set, seed))
    scopes = {dataset: {dataset} for dataset in datasets}
    questions = set(datasets) - {CONFLICT}
    if len(questions) > 1:
        scopes["all questions"] = questions
    if choices := _choices(scopes, rows, seed):
        tables.append(choices)
    return Summary(tables, plots)


def choose(arms: Sequence[Arm], measure: str, seed: int = 0) -> list[Choice]:
    """Choose the best arm on one half of the items and report it on the other, both ways.

    Args:
        arms: to choose from, of the same items.
        measure: what to choose by: the arm with the largest mean gain over the unsteered model.
        seed: of the halves, the intervals and the tests.

    Returns:
        First half to second, second to first, and both together: every item then counts under the
        arm that was chosen without it. Nothing if there are too few items.
    """
    items = list(arms[0].rows) if arms else []
    if len(items) < 2 * LEAST:
        return []
    parts = halves(items, seed)
    found, steered, plain = [], [], []
    for name, chosen_on, reported_on in (("half 1", *parts), ("half 2", *parts[::-1])):
        gains = [sum(arm.differences(measure, chosen_on)) / len(chosen_on) for arm in arms]
        gain, best = max(zip(gains, arms, strict=True), key=lambda pair: pair[0])
        values, baseline = best.values(measure, reported_on), best.baseline(measure, reported_on)
        found.append(Choice(name, best.name, gain, paired(values, baseline, seed=seed)))
        steered += values
        plain += baseline
    both = " / ".join(dict.fromkeys(choice.arm for choice in found))
    return [*found, Choice("each half", both, None, paired(steered, plain, seed=seed))]


def halves(items: Sequence[str], seed: int = 0) -> tuple[list[str], list[str]]:
    """Split items at random into two halves.

    Args:
        items: their names.
        seed: another one splits otherwise.

    Returns:
        Both halves, the first the larger one if the number is odd. The order of the items does not
        matter.
    """
    drawn = sorted(items, key=lambda item: hashlib.sha256(f"{seed}:{item}".encode()).digest())
    middle = (len(drawn) + 1) // 2
    return drawn[:middle], drawn[middle:]


# -- tables ----------------------------------------------------------------------------------------


def _arms(rows: Sequence[Row]) -> list[Arm]:
    """Return the arms in the order in which they were measured; the unsteered model is none."""
    by_arm: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_arm.setdefault(row["arm"], {})[row["item"]] = row
    unsteered = by_arm.pop(UNSTEERED, {})
    return [Arm(name, held, unsteered) for name, held in by_arm.items()]


def _comparison(dataset: str, rows: Sequence[Row], seed: int) -> Table:
    measure = MEASURES[dataset == CONFLICT]
    arms = _arms(rows)
    extras = _extra_columns(rows)
    sources = list(dict.fromkeys(row["anchors"] for row in rows if row.get("anchors")))
    by_source = len(sources) > 1
    compared_by = ["arm", SHORT[measure], "change", "low", "high", "p", "better"]
    cells: list[list[str | float | int | None]] = []
    if arms:
        unsteered = Arm(UNSTEERED, arms[0].unsteered, {})
        more = [value(unsteered) for value in extras.values()]
        cells.append([*[None] * by_source, UNSTEERED, unsteered.mean(measure), *[None] * 5, *more])
    for arm in arms:
        compared = paired(arm.values(measure), arm.baseline(measure), seed=seed)
        change = compared.difference
        better = sum(gain > 0 for gain in arm.differences(measure)) / len(arm.rows)
        source, _, label = arm.name.partition(": ")
        line = [*[source] * by_source, label, arm.mean(measure)]
        tested = [change.mean, change.low, change.high, compared.p_value, better]
        cells.append([*line, *tested, *(value(arm) for value in extras.values())])
    items = len({row["item"] for row in rows})
    return Table(
        f"{dataset}: {len(arms)} arms against the unsteered model, {items} items, "
        f"{' and '.join(sources)} anchored",
        [*["anchors"] * by_source, *compared_by, *extras],
        cells,
        _NOTES[dataset == CONFLICT],
    )


def _extra_columns(rows: Sequence[Row]) -> dict[str, Callable[[Arm], float | None]]:
    """The columns that these rows have something for."""

    def mean(measure: str) -> Callable[[Arm], float | None]:
        return lambda arm: arm.mean(measure)

    known = {
        "per token": "mean_log_probability",
        "wins": "context_wins",
        "F1": "f1",
        "mass": "mass_before",
        "steered": "mass",
        "recall": "gold_found",
    }
    held = {name for row in rows for name, value in row.items() if value is not None}
    if all(row.get("gold_found", 1) == 1 for row in rows):
        held.discard("gold_found")  # gold itself is anchored
    return {title: mean(measure) for title, measure in known.items() if measure in held}


_SHARED_NOTE = (
    "change: to the unsteered model, mean over the items, with a bootstrap 95 % interval (low, "
    "high); p: sign-flip permutation test, for this arm alone, so that of many arms some fall "
    "below 0.05 by chance; better: share of the items with a gain; mass, steered: share of the "
    "last prompt token's attention on the anchors, before and under steering (SPA works on the "
    "output and leaves it). Biases and target masses steer the answer alone unless they say all "
    "tokens. others: a negative bias on the sentences that are not anchored."
)
_NOTES = {
    False: "log p: log-probability of the gold answer, all its tokens together, in nats; per "
    f"token: its mean over them. {_SHARED_NOTE} recall: share of the gold sentences that are "
    "anchored.",
    True: "margin: log-probability of the answer that the context gives, less that of the "
    f"memorised one, in nats; wins: share of the items where it is above zero. {_SHARED_NOTE}",
}


def _choices(scopes: Mapping[str, set[str]], rows: Sequence[Row], seed: int) -> Table | None:
    cells: list[list[str | float | int | None]] = []
    for scope, datasets in scopes.items():
        of_scope = [row for row in rows if row["dataset"] in datasets]
        measure = MEASURES[scope == CONFLICT]
        for anchors in dict.fromkeys(row.get("anchors") for row in of_scope):
            if anchors is None:
                continue
            own = [row for row in of_scope if row.get("anchors") in (anchors, None)]
            for choice in choose(_arms(own), measure, seed):
                change, tested = choice.reported.difference, choice.reported
                line = [scope, anchors, choice.on, choice.arm.removeprefix(f"{anchors}: ")]
                measured = [tested.n, change.mean, change.low, change.high, tested.p_value]
                cells.append([*line, choice.gain, *measured])
    if not cells:
        return None
    columns = ["data", "anchors", "chosen on", "arm", "gain there", "items"]
    return Table(
        "The best arm, chosen on one half of the items and reported on the other",
        [*columns, "change", "low", "high", "p"],
        cells,
        "gain there: on the half that chose it, which flatters it; change: on the other half, "
        "which did not. each half: every item under the arm that was chosen without it.",
    )


# -- pictures --------------------------------------------------------------------------------------


def _plot(dataset: str, rows: Sequence[Row], seed: int) -> Plot:
    measure = MEASURES[dataset == CONFLICT]
    arms = _arms(rows)
    intervals = [mean_interval(arm.differences(measure), seed=seed) for arm in arms]
    names = [arm.name for arm in arms]
    return Plot(f"evidence-{dataset}", lambda axes: _draw(axes, dataset, measure, names, intervals))


def _draw(
    axes: Any, dataset: str, measure: str, names: Sequence[str], intervals: Sequence[Interval]
) -> None:
    axes.figure.set_size_inches(8, 1.5 + 0.22 * len(names))
    means = [interval.mean for interval in intervals]
    spread = [
        [max(0.0, interval.mean - interval.low) for interval in intervals],
        [max(0.0, interval.high - interval.mean) for interval in intervals],
    ]
    places = range(len(names))
    if any(map(math.isfinite, means)):
        axes.errorbar(means, places, xerr=spread, fmt="o", capsize=3, markersize=4)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(places, names, fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel(f"{SHORT[measure]}, change to unsteered (nats, 95 % intervals)")
    axes.set_title(dataset)
