"""The one row schema of all benchmarks, its JSON file and the ratios computed from it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.timing import Summary


@dataclass(frozen=True)
class Row:
    """One contender's time for one piece of work in one phase.

    Args:
        benchmark: which script measured it ("end_to_end", "anchor_attention").
        work: the shapes, e.g. "SmolLM2-135M prompt=1024 anchors@50%".
        dtype: "fp32" or "bf16".
        provider: the contender, e.g. "radar-spa".
        phase: "prefill", "step" or "" where there is only one.
        median_ms: median in milliseconds; None when the result was wrong, which is never timed.
        p20_ms: 20th percentile.
        p80_ms: 80th percentile.
        floor_ms: bytes that must move over the measured read bandwidth; None where meaningless.
        checked: what the result was compared with and how near it came, "failed: ..." if wrong.
    """

    benchmark: str
    work: str
    dtype: str
    provider: str
    phase: str
    median_ms: float | None
    p20_ms: float | None
    p80_ms: float | None
    floor_ms: float | None
    checked: str

    @property
    def failed(self) -> bool:
        """Whether the result was wrong."""
        return self.checked.startswith("failed")


class Label(NamedTuple):
    """The fields of a row that say what was measured; see `Row`."""

    benchmark: str
    work: str
    dtype: str
    provider: str
    phase: str = ""


def timed(label: Label, summary: Summary, floor_ms: float | None, checked: str) -> Row:
    """Build the row of a contender that was right.

    Args:
        label: what was measured.
        summary: its times.
        floor_ms: see `Row`.
        checked: see `Row`.

    Returns:
        The row.
    """
    return Row(*label, *summary, floor_ms=floor_ms, checked=checked)


def untimed(label: Label, checked: str) -> Row:
    """Build the row of a contender that was wrong: no times.

    Args:
        label: what would have been measured.
        checked: what was wrong.

    Returns:
        The row, its `checked` starting with "failed: ".
    """
    return Row(*label, None, None, None, floor_ms=None, checked=f"failed: {checked}")


def ratio(rows: Iterable[Row], row: Row, to: str) -> float | None:
    """Compute a row's median over that of another provider doing the same work.

    Args:
        rows: rows that may hold the other provider's.
        row: the numerator.
        to: the other provider.

    Returns:
        The ratio; None when either was not timed.
    """
    for other in rows:
        same = (other.work, other.dtype, other.phase) == (row.work, row.dtype, row.phase)
        if same and other.provider == to and other.median_ms and row.median_ms is not None:
            return row.median_ms / other.median_ms
    return None


def write_json(path: Path, machine: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Write `{"machine": {...}, "rows": [...]}`.

    Args:
        path: the file; its folder is made when missing.
        machine: `machine.describe()`.
        rows: the rows; ratios are for the reader to compute.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"machine": dict(machine), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(document, indent=1) + "\n")
