"""Operators side by side: pieces of work, their contenders, and the bars that ratios must meet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.checks import Verdict
from benchmarks.rows import Label, Row, timed, untimed
from benchmarks.timing import Measurement, interleave, summarise, time_call

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FLOOR = "floor"
# GB/s, or what measures them.
ReadBandwidth = float | Callable[[], float]


@dataclass(frozen=True)
class Contender:
    """One way to do a piece of work.

    Args:
        call: copy number -> result; as in a model, every copy is another layer's tensors.
        check: whether the result for copy 0 is right.
        clock: copy number -> seconds, where a call's own duration is not what counts.
    """

    call: Callable[[int], Any]
    check: Callable[[Any], Verdict]
    clock: Callable[[int], list[float]] | None = None


@dataclass(frozen=True)
class Task:
    """One piece of work.

    Args:
        benchmark: which operator.
        work: the shapes.
        dtype: "fp32" or "bf16".
        contenders: provider to contender.
        copies: how many copies of the tensors there are; a round goes through all.
        floor_bytes: bytes that must be read, for the floor; None where meaningless.
        most_rounds: rounds are no more than this, where one takes seconds and has many samples.
    """

    benchmark: str
    work: str
    dtype: str
    contenders: Mapping[str, Contender]
    copies: int = 1
    floor_bytes: int | None = None
    most_rounds: int | None = None


Build = Callable[[], Task]


@dataclass(frozen=True)
class Growth:
    """The same work at growing sizes, for a plot.

    Args:
        title: what is done.
        axis: what grows.
        points: (size, builder of the task).
    """

    title: str
    axis: str
    points: Sequence[tuple[int, Build]]


@dataclass(frozen=True)
class Bar:
    """A ratio within one task that must be met.

    Args:
        benchmark: which operator.
        work: the start of the works that it holds for.
        dtypes: for which.
        provider: whose time.
        to: over whose; "floor" for the bytes over the read bandwidth.
        limit: the ratio may be at most this.
        stretch: what we would like; None for nothing more.
    """

    benchmark: str
    work: str
    dtypes: Sequence[str]
    provider: str
    to: str
    limit: float
    stretch: float | None = None


@dataclass(frozen=True)
class Met:
    """A bar held against one row.

    Args:
        bar: the bar.
        row: whose time.
        value: the ratio; None when either was not timed.
    """

    bar: Bar
    row: Row
    value: float | None

    @property
    def passed(self) -> bool:
        """Whether the ratio was measured and is within the limit."""
        return self.value is not None and self.value <= self.bar.limit


def run(
    builds: Iterable[Build],
    rounds: int,
    read_gb_s: ReadBandwidth,
    announce: Callable[[str], None] = lambda text: None,
    advance: Callable[[], None] = lambda: None,
) -> list[Row]:
    """Check every contender of every task, then time those that were right.

    Args:
        builds: builders of the tasks, whose tensors are only held while they run.
        rounds: how often each contender goes through all copies.
        read_gb_s: the read bandwidth, for the floors; or what measures it, in every round anew,
            since that of a machine that is shared drifts.
        announce: told what is being done.
        advance: called after every task.

    Returns:
        The rows.
    """
    rows: list[Row] = []
    for build in builds:
        task = build()
        announce(f"{task.benchmark} {task.work} {task.dtype}")
        rows += _rows(task, rounds, read_gb_s)
        advance()
    return rows


def hold(bars: Iterable[Bar], rows: Sequence[Row]) -> list[Met]:
    """Hold rows against the bars that apply to them.

    Args:
        bars: the bars.
        rows: the rows.

    Returns:
        One result for every bar and row that it holds for, in the order of the bars.
    """
    return [
        Met(bar, row, _ratio(bar, row, rows))
        for bar in bars
        for row in rows
        if row.benchmark == bar.benchmark
        and row.work.startswith(bar.work)
        and row.dtype in bar.dtypes
        and row.provider == bar.provider
    ]


def close_to(expected: Tensor, tolerance: float) -> Callable[[Tensor], Verdict]:
    """Return a check of the largest difference over the largest expected number.

    Args:
        expected: float64, what should come out.
        tolerance: the largest error that is still right.

    Returns:
        Result -> verdict.
    """
    scale = float(expected.abs().max())

    def check(found: Tensor) -> Verdict:
        error = float((found.double() - expected).abs().max()) / scale
        text = f"within {error:.1e} of float64, of the largest number"
        return Verdict(error <= tolerance, text if error <= tolerance else f"NOT {text}")

    return check


def _ratio(bar: Bar, row: Row, rows: Sequence[Row]) -> float | None:
    if row.median_ms is None:
        return None
    if bar.to == FLOOR:
        return row.median_ms / row.floor_ms if row.floor_ms else None
    for other in rows:
        same = (other.benchmark, other.work, other.dtype) == (row.benchmark, row.work, row.dtype)
        if same and other.provider == bar.to and other.median_ms:
            return row.median_ms / other.median_ms
    return None


def _rows(task: Task, rounds: int, read_gb_s: ReadBandwidth) -> list[Row]:
    verdicts = {name: one.check(one.call(0)) for name, one in task.contenders.items()}
    measurements = {
        name: _measurement(task.contenders[name], task.copies)
        for name, verdict in verdicts.items()
        if verdict.right
    }
    if task.floor_bytes is not None:
        measurements[FLOOR] = _reading(task.floor_bytes, read_gb_s)
    samples = interleave(measurements, min(rounds, task.most_rounds or rounds), warm_up=1)
    floor = summarise(samples[FLOOR][""]).median_ms if FLOOR in samples else None
    rows = []
    for name, verdict in verdicts.items():
        label = Label(task.benchmark, task.work, task.dtype, name)
        if verdict.right:
            rows.append(timed(label, summarise(samples[name][""]), floor, verdict.text))
        else:
            rows.append(untimed(label, verdict.text))
    return rows


def _reading(size: int, read_gb_s: ReadBandwidth) -> Measurement:
    def measure() -> Mapping[str, list[float]]:
        return {"": [size / (read_gb_s() if callable(read_gb_s) else read_gb_s) / 1e9]}

    return measure


def _measurement(contender: Contender, copies: int) -> Measurement:
    def measure() -> Mapping[str, list[float]]:
        if contender.clock is not None:
            return {"": [second for copy in range(copies) for second in contender.clock(copy)]}
        return {"": [time_call(partial(contender.call, copy)) for copy in range(copies)]}

    return measure
