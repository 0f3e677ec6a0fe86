"""Every operator against what people use instead, and against the bytes that must be read.

    python -m benchmarks.kernels --json results/kernels.json --plots results

Every contender's result is checked against float64 before it is timed; contenders take turns, and
the figures are medians. The last table holds the ratios against what we ask of each operator.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks import attention, decoder, linear, machine, relevance, sampling
from benchmarks.growth import draw_growth
from benchmarks.report import console, print_machine, print_rows, print_table, progress
from benchmarks.rows import Row, write_json
from benchmarks.tasks import FLOOR, Bar, Met, hold, run

SUITES: dict[str, ModuleType] = {
    "attention": attention,
    "linear": linear,
    "sampling": sampling,
    "relevance": relevance,
    "decoder": decoder,
}
DTYPES = ("bf16", "fp32")


def bars(suites: Iterable[str]) -> list[Bar]:
    """Return what is asked of the operators of some suites.

    Args:
        suites: names of `SUITES`.

    Returns:
        The bars.
    """
    return [bar for suite in suites for bar in SUITES[suite].BARS]


def baseline(rows: Sequence[Row]) -> Callable[[str], str]:
    """Return which provider of a work is the 1.00x: the first that is not Radar's.

    Args:
        rows: the rows.

    Returns:
        work -> provider.
    """
    first = {}
    for row in rows:
        if not row.provider.startswith("radar"):
            first.setdefault(row.work, row.provider)
    return lambda work: first.get(work, "")


def print_bars(out: Any, found: Sequence[Met]) -> None:
    """Print the bars as one Markdown table.

    Args:
        out: a `rich.console.Console`.
        found: the bars held against the rows.
    """
    if not found:
        return
    out.print(f"\nbars: {sum(met.passed for met in found)} of {len(found)} passed")
    rows = (
        (
            f"{met.bar.benchmark} {met.row.work}",
            met.row.dtype,
            met.bar.provider,
            "bytes" if met.bar.to == FLOOR else met.bar.to,
            "not timed" if met.value is None else f"{met.value:.3g}x",
            f"{met.bar.limit:.3g}x",
            "" if met.bar.stretch is None else f"{met.bar.stretch:.2f}x",
            "pass" if met.passed else "FAIL",
        )
        for met in found
    )
    columns = ("work", "dtype", "ratio of", "to", "measured", "at most", "stretch", "")
    print_table(out, columns, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line.

    Args:
        arguments: command-line arguments; the process's own when None.

    Returns:
        0, or 1 when a contender's result was wrong.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine and rows")
    parser.add_argument(
        "--plots", type=Path, metavar="FOLDER", help="draw how cost grows with size"
    )
    parser.add_argument("--only", nargs="+", choices=list(SUITES), default=list(SUITES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="three rounds of small shapes")
    parsed = parser.parse_args(arguments)
    rounds = min(3, parsed.rounds) if parsed.quick else parsed.rounds
    out = console()
    described = machine.describe()
    builds = [
        build for suite in parsed.only for build in SUITES[suite].plan(parsed.dtypes, parsed.quick)
    ]
    read_gb_s = machine.Reader(machine.read_bytes_beyond_cache()).gb_s
    with torch.inference_mode(), progress(len(builds)) as (announce, advance):
        rows = run(builds, rounds, read_gb_s, announce, advance)
    print_machine(out, described)
    print_rows(out, rows, baseline(rows))
    out.print(
        "\nratio: to the first contender of each work that is not Radar's. floor: the bytes that "
        "must be read, over the read bandwidth, measured in every round."
    )
    if parsed.quick:
        out.print("--quick: shapes too small for the bars, and for conclusions.")
    print_bars(out, hold(bars(parsed.only), rows))
    if parsed.json:
        write_json(parsed.json, described, rows)
    if parsed.plots:
        series = [
            one for suite in parsed.only for one in SUITES[suite].growth("bf16", parsed.quick)
        ]
        points = sum(len(one.points) for one in series)
        with torch.inference_mode(), progress(points) as (announce, advance):
            for one in series:
                path = draw_growth(parsed.plots, one, rounds, read_gb_s, announce, advance)
                out.print(f"drew {path}", highlight=False)
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
