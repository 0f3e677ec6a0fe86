"""The bars: what steering may cost, as ratios that the rows must stay under."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.rows import Row, ratio


@dataclass(frozen=True)
class Work:
    """What the bars need to know of a piece of work.

    Args:
        name: the rows' `work`.
        tokens: the prompt's length.
        batch: prompts at once.
        second_branch: bytes that a second branch adds to the cache, by dtype.
        share_after_first_anchor: of the prompt, in (0, 1].
    """

    name: str
    tokens: int
    share_after_first_anchor: float
    batch: int = 1
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
    key = (row.provider, row.phase, row.dtype)
    if work.batch > 1:
        return [("unsteered", 1.05)] if key[:2] == ("radar-bias", "step") else []
    if key == ("radar-spa", "step", "bf16"):
        return [("unsteered", 0.70 if work.tokens >= 2048 else 0.80)]
    if key == ("radar-spa", "step", "fp32"):
        return [("unsteered", 1.40)]
    if key[:2] == ("radar-spa", "prefill"):
        return [("unsteered", 1.1 * (1.0 + work.share_after_first_anchor))]
    if row.provider == "radar-bias":
        limits = [("radar-unsteered", 1.03)]
        if row.phase == "step":
            limits.append(("unsteered", 0.80 if work.tokens >= 2048 else 1.00))
        return limits
    return []
