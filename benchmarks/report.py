"""Rows for people: a table with ratios, what was checked, and a plot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.bars import Work
from benchmarks.rows import Row, ratio


def console(**options: Any) -> Any:
    """Return a rich console that is wide enough for the tables when it is no terminal.

    Args:
        options: passed to `rich.console.Console`.

    Returns:
        The console.

    Raises:
        ImportError: rich is not installed.
    """
    try:
        from rich.console import Console
    except ImportError as error:
        raise ImportError('benchmarks need rich: pip install "radar-kernels[bench]"') from error
    wide = Console(**options)
    return wide if wide.is_terminal else Console(width=200, **options)


@contextmanager
def progress(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """Show a progress bar on standard error.

    Args:
        total: how often the second function will be called.

    Yields:
        A function that says what is being done, and one that advances by one.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True)) as bar:
        task = bar.add_task("starting", total=total)
        yield (lambda text: bar.update(task, description=text), lambda: bar.advance(task))


def print_table(
    out: Any,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Sequence[str] = (),
) -> None:
    """Print texts as one Markdown table.

    Args:
        out: a `rich.console.Console`.
        columns: the heads of columns of words.
        rows: their cells, then those of the columns of numbers.
        numbers: the heads of columns of numbers, which end at the right.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.MARKDOWN)
    for column in columns:
        table.add_column(column, no_wrap=True)
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    out.print(table)


def print_rows(out: Any, rows: Sequence[Row], baseline: str | Callable[[str], str]) -> None:
    """Print the times as one Markdown table, then what each contender was checked against.

    Args:
        out: a `rich.console.Console`.
        rows: what to print; work, dtype and provider keep their order.
        baseline: the provider whose ratio is 1.00x, or a function work -> provider.
    """
    phases = list(dict.fromkeys(row.phase for row in rows))
    numbers = []
    for phase in phases:
        numbers += [f"{phase} ms".strip(), "p20-p80", "ratio"]
        numbers += ["floor ms"] * _has_floor(rows, phase)
    by_key = {(row.work, row.dtype, row.provider, row.phase): row for row in rows}
    table = []
    for work, dtype, provider in dict.fromkeys(key[:3] for key in by_key):
        cells = [work, dtype, provider]
        for phase in phases:
            row = by_key.get((work, dtype, provider, phase))
            cells += _cells(row, rows, _baseline_of(work, baseline))[
                : 4 if _has_floor(rows, phase) else 3
            ]
        table.append(cells)
    print_table(out, ("work", "dtype", "provider"), table, numbers)
    out.print("\nchecked before timing:")
    for key in dict.fromkeys((row.provider, row.dtype, row.failed) for row in rows):
        texts = list(
            dict.fromkeys(r.checked for r in rows if (r.provider, r.dtype, r.failed) == key)
        )
        more = f" (and {len(texts) - 1} more like it)" if texts[1:] else ""
        out.print(f"  {key[0]} {key[1]}: {texts[0]}{more}", markup=False, highlight=False)


def print_machine(out: Any, described: Mapping[str, Any]) -> None:
    """Print what `machine.describe` found in one line.

    Args:
        out: a `rich.console.Console`.
        described: what it found.
    """
    out.print(", ".join(f"{name} {value}" for name, value in described.items()), highlight=False)


def plotting(option: str) -> Any:
    """Return `matplotlib.pyplot`, drawing to files.

    Args:
        option: the command-line option that asked for a plot.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            f'{option} needs matplotlib: pip install "radar-kernels[bench]"'
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(pyplot: Any, figure: Any, path: Path) -> None:
    """Write a figure to a file, whose folder is made when missing, and close it."""
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def plot_ratios(path: Path, rows: Sequence[Row], baseline: str | Callable[[str], str]) -> None:
    """Draw every provider's ratio to the baseline, one panel a dtype and phase.

    Args:
        path: the image file; its ending chooses the format.
        rows: the rows.
        baseline: the provider that is 1.0, or a function work -> provider.

    Raises:
        ImportError: matplotlib is not installed.
    """
    pyplot = plotting("--plot")

    panels = list(dict.fromkeys((row.dtype, row.phase) for row in rows))
    works = list(dict.fromkeys(row.work for row in rows))
    baselines = {_baseline_of(work, baseline) for work in works}
    providers = [p for p in dict.fromkeys(row.provider for row in rows) if p not in baselines]
    size = (5 * len(panels), 1.5 + 0.2 * len(works) * len(providers))
    figure, axes = pyplot.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False)
    for axis, (dtype, phase) in zip(axes[0], panels, strict=True):
        for index, provider in enumerate(providers):
            bars = {
                works.index(row.work) + (index + 0.5) / len(providers) * 0.8 - 0.4: value
                for row in rows
                if (row.dtype, row.provider, row.phase) == (dtype, provider, phase)
                and (value := ratio(rows, row, _baseline_of(row.work, baseline))) is not None
            }
            axis.barh(list(bars), list(bars.values()), 0.8 / len(providers), label=provider)
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_title(f"{dtype} {phase}".strip())
        axis.set_xlabel(f"time / {' or '.join(sorted(baselines))}")
    axes[0][0].set_yticks(range(len(works)), works)
    axes[0][0].invert_yaxis()
    axes[0][-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(pyplot, figure, path)


def plot_steps(path: Path, rows: Sequence[Row], works: Sequence[Work], baseline: str) -> None:
    """Draw tokens per second, and the ratio of a step to the baseline's, against both sizes.

    One column of panels a dtype and batch, against the prompt's length; then one a dtype and
    length, against the batch. A panel with one size only is left out, unless none has more. Of
    several positions of the anchors the first counts. A provider has one colour everywhere.

    Args:
        path: the image file; its ending chooses the format.
        rows: the rows.
        works: what they name.
        baseline: the provider that is 1.0.

    Raises:
        ImportError: matplotlib is not installed.
    """
    pyplot = plotting("--growth")

    named = {(work.tokens, work.batch): work for work in reversed(works)}
    firsts = {work.name: work for work in named.values()}
    steps = [row for row in rows if row.phase == "step" and row.work in firsts and row.median_ms]
    panels: dict[tuple[str, str], list[tuple[int, Row]]] = {}
    for row in steps:
        work = firsts[row.work]
        title = f"{row.dtype}, batch {work.batch}"
        panels.setdefault((title, "tokens of the prompt"), []).append((work.tokens, row))
    for row in steps:
        work = firsts[row.work]
        title = f"{row.dtype}, {work.tokens} tokens"
        panels.setdefault((title, "batch"), []).append((work.batch, row))
    growing = {k: p for k, p in panels.items() if len({size for size, _ in p}) > 1}
    drawn = growing or {k: p for k, p in panels.items() if k[1] != "batch"}
    providers = list(dict.fromkeys(row.provider for row in steps))
    figure, axes = pyplot.subplots(
        2, len(drawn), figsize=(4.5 * len(drawn), 7), sharex="col", squeeze=False
    )
    for (above, below), ((title, label), points) in zip(axes.T, drawn.items(), strict=True):
        for number, provider in enumerate(providers):
            own = sorted(
                (size, firsts[row.work].batch * 1e3 / row.median_ms, ratio(steps, row, baseline))
                for size, row in points
                if row.provider == provider and row.median_ms
            )
            if own:
                sizes, speed, times = zip(*own, strict=True)
                above.plot(sizes, speed, "o-", color=f"C{number}", label=provider)
                below.plot(sizes, times, "o-", color=f"C{number}", label=provider)
        above.set_title(title)
        below.set_xscale("log", base=2)
        below.set_xlabel(label)
        below.axhline(1.0, color="black", linewidth=0.8)
    axes[0][0].legend(fontsize="x-small")
    axes[0][0].set_ylabel("tokens per second")
    axes[1][0].set_ylabel(f"time of a step / {baseline}")
    save(pyplot, figure, path)


def _baseline_of(work: str, baseline: str | Callable[[str], str]) -> str:
    return baseline if isinstance(baseline, str) else baseline(work)


def _has_floor(rows: Sequence[Row], phase: str) -> bool:
    return any(row.floor_ms is not None for row in rows if row.phase == phase)


def _cells(row: Row | None, rows: Sequence[Row], baseline: str) -> list[str]:
    if row is None:
        return [""] * 4
    if row.median_ms is None or row.p20_ms is None or row.p80_ms is None:
        return ["failed", "", "", ""]
    times = ratio(rows, row, baseline)
    return [
        _short(row.median_ms),
        f"{_short(row.p20_ms)}-{_short(row.p80_ms)}",
        "" if times is None else f"{times:.2f}x",
        "" if row.floor_ms is None else _short(row.floor_ms),
    ]


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
