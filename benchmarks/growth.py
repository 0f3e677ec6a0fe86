"""How cost grows with size: one plot a series of growing tasks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import plotting, save
from benchmarks.tasks import Growth, ReadBandwidth, run


def draw_growth(
    folder: Path,
    growth: Growth,
    rounds: int,
    read_gb_s: ReadBandwidth,
    announce: Callable[[str], None] = lambda text: None,
    advance: Callable[[], None] = lambda: None,
) -> Path:
    """Time a series and draw its medians, both axes logarithmic.

    Args:
        folder: where the image goes; made when missing.
        growth: the series.
        rounds: how often each contender goes through a task.
        read_gb_s: as in `tasks.run`.
        announce: told what is being done.
        advance: called after every task.

    Returns:
        The image file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    pyplot = plotting("--plots")

    lines: dict[str, list[tuple[int, float]]] = {}
    dtype = ""
    for size, build in growth.points:
        for row in run([build], rounds, read_gb_s, announce, advance):
            dtype = row.dtype
            if row.median_ms is not None:
                lines.setdefault(row.provider, []).append((size, row.median_ms))
            if row.floor_ms is not None:
                lines.setdefault("bytes to read", [])
                if (size, row.floor_ms) not in lines["bytes to read"]:
                    lines["bytes to read"].append((size, row.floor_ms))
    figure, axis = pyplot.subplots(figsize=(6, 4))
    for provider, points in lines.items():
        style = "k--" if provider == "bytes to read" else "o-"
        axis.loglog(*zip(*points, strict=True), style, label=provider)
    axis.set_xlabel(growth.axis)
    axis.set_ylabel("ms")
    axis.set_title(f"{growth.title}, {dtype}")
    axis.legend(fontsize="small")
    name = re.sub(r"[^a-z0-9]+", "-", f"{growth.title} {dtype}".lower()).strip("-")
    path = folder / f"{name}.png"
    save(pyplot, figure, path)
    return path
