"""The bars: what steering may cost, as ratios that the rows must stay under."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.rows import Row, ratio

# What a bias may add to Radar's attention with nothing anchored, side by side and over all work: a
# single piece of work does not tell this from the machine's own noise.
MOST_ADDED = 1.03


@dataclass(frozen=True)
class Work:
    """What the bars need to know of a piece of work.

    Args:
        name: the rows' `work`.
        tokens: the prompt's length.
        batch: prompts at once.
        random_weights: whether the model is a shape of `models.SHAPES`, which has bars of its own.
        second_branch: bytes that a second branch adds to the cache, by dtype.
        share_after_first_anchor: of the prompt, in (0, 1].
    """

    name: str
    tokens: int
    share_after_first_anchor: float
    batch: int = 1
    random_weights: bool = False
    second_branch: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Bar:
    """One ratio and its limit.

    Args:
        row: whose time.
        to: the provider it is compared with.
        limit: the ratio may be at most this.
        value: the ratio; None when either was not timed.
    """

    row: Row
    to: str
    limit: float
    value: float | None

    @property
    def passed(self) -> bool:
        """Whether the ratio was measured and is within the limit."""
        return self.value is not None and self.value <= self.limit


def bars(rows: Sequence[Row], works: Iterable[Work]) -> list[Bar]:
    """Hold the rows against every bar that applies to them.

    Args:
        rows: the end-to-end rows.
        works: the pieces of work they name.

    Returns:
        The bars, in the order of the rows.
    """
    by_name = {work.name: work for work in works}
    found = []
    for row in rows:
        for to, limit in _limits(row, by_name[row.work]):
            found.append(Bar(row, to, limit, ratio(rows, row, to)))
    return found


def _limits(row: Row, work: Work) -> list[tuple[str, float]]:
    kind, long = (row.provider, row.phase), work.tokens >= 2048
    if kind == ("radar-seka", "step"):
        return [("unsteered", 1.02)]
    if row.provider == "radar-pasta":
        return [("pastalib", 0.50)] if long else []
    if kind == ("radar-bias", "step"):
        alone = 0.80 if long else 1.00
        return [("unsteered", alone if work.batch == 1 else 1.05)]
    if row.provider == "radar-spa" and work.batch == 1:
        if row.phase == "prefill":
            return [("unsteered", 1.1 * (1.0 + work.share_after_first_anchor))]
        if row.dtype == "bf16":
            small = 0.70 if long else 0.80
            return [("unsteered", 0.90 if work.random_weights else small)]
        return [] if work.random_weights else [("unsteered", 1.40)]
    return []
