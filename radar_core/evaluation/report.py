"""What a run found, for people and for programs: tables, markdown, JSON and pictures.

Only what an experiment put into its summary is written, never the items' own text: some data sets
must not be published.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radar_core.evaluation.experiment import Plot, Summary, Table
from radar_core.evaluation.runs import Header

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["as_dict", "load", "markdown", "note_on", "print_summary", "write"]

logger = logging.getLogger("radar_core")

SUMMARY = "summary.json"
REPORT = "report.md"
# Below this many items, a difference of a few hundredths cannot be told from chance.
FEW = 100


def print_summary(console: Console, summary: Summary, items: int) -> None:
    """Print the tables, each with its note; of those with details only what they are.

    Args:
        console: where to.
        summary: what the experiment found.
        items: how many items it rests on.
    """
    for table in summary.tables:
        if table.detail:
            continue
        console.print(_rich(table))
        if table.note:
            console.print(table.note)
        console.print()
    if details := [table.title for table in summary.tables if table.detail]:
        console.print(f"In {REPORT} besides: {'; '.join(details)}.")
    console.print(note_on(items))


def write(folder: Path, summary: Summary, header: Header, items: int) -> list[Path]:
    """Write summary.json, report.md and the pictures into a run's folder.

    Args:
        folder: the run's folder.
        summary: what the experiment found.
        header: what the results depend on.
        items: how many items they rest on.

    Returns:
        The files. Without matplotlib there are no pictures, which is logged.
    """
    pictures = _draw(folder, summary.plots)
    text = json.dumps(as_dict(summary, header, items), indent=2, allow_nan=False) + "\n"
    _replace(folder / SUMMARY, text)
    _replace(folder / REPORT, markdown(summary, header, items, pictures))
    return [folder / SUMMARY, folder / REPORT, *pictures]


def as_dict(summary: Summary, header: Header, items: int) -> dict[str, Any]:
    """Return a summary as JSON-ready dicts, with all that the results depend on.

    Args:
        summary: what the experiment found.
        header: what the results depend on.
        items: how many items they rest on.
    """
    return {
        **header.plain(),
        "items": items,
        "tables": [
            {
                "title": table.title,
                "columns": list(table.columns),
                "rows": [list(row) for row in table.rows],
                "note": table.note,
                "detail": table.detail,
            }
            for table in summary.tables
        ],
        "plots": [f"{plot.name}.png" for plot in summary.plots],
    }


def load(folder: Path) -> Summary:
    """Read the tables of a summary.json again.

    Args:
        folder: the run's folder.

    Raises:
        ValueError: there is none.
    """
    path = folder / SUMMARY
    if not path.is_file():
        raise ValueError(f"{folder} holds no {SUMMARY}; it is written when a run ends")
    held = json.loads(path.read_text(encoding="utf-8"))
    return Summary([Table(**table) for table in held["tables"]])


def markdown(summary: Summary, header: Header, items: int, pictures: Sequence[Path] = ()) -> str:
    """Return the report as markdown.

    Args:
        summary: what the experiment found.
        header: what the results depend on.
        items: how many items they rest on.
        pictures: files beside the report to show.
    """
    parts = [f"# Radar: {header.name}", note_on(items)]
    for table in summary.tables:
        parts += [f"## {table.title}", _markdown_table(table)]
        if table.note:
            parts.append(table.note)
    parts += [f"![{path.stem}]({path.name})" for path in pictures]
    parts += ["## What this depends on", _markdown_table(_dependencies(header))]
    return "\n\n".join(parts) + "\n"


def note_on(items: int) -> str:
    """Say how far so many items carry."""
    note = f"Measured on {items} item{'s' * (items != 1)}."
    if items < FEW:
        note += (
            " So few tell large effects from none and no more: read the intervals, not the means, "
            "and take a ranking of neighbours for chance."
        )
    return note


def cell(value: str | float | int | None) -> str:
    """Return a cell as text: three decimals, more where nothing would be left, "" for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}" if value == 0 or abs(value) >= 0.001 else f"{value:.1e}"


def _dependencies(header: Header) -> Table:
    plain = header.plain()
    rows: list[list[str | float | int | None]] = [
        ["experiment", header.name],
        ["seed", header.seed],
    ]
    for part in ("model", "settings", "data", "versions", "machine"):
        rows += [[f"{part}: {name}", _inline(value)] for name, value in plain[part].items()]
    return Table("", ["what", "value"], rows)


def _inline(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _markdown_table(table: Table) -> str:
    right = _numeric(table)
    lines = [
        table.columns,
        ["---:" if numeric else "---" for numeric in right],
        *([cell(value) for value in row] for row in table.rows),
    ]
    return "\n".join(
        "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in line) + " |"
        for line in lines
    )


def _rich(table: Table) -> Any:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(
        title=Text(table.title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for name, numeric in zip(table.columns, _numeric(table), strict=True):
        shown.add_column(Text(name), justify="right" if numeric else "left", no_wrap=numeric)
    for row in table.rows:
        shown.add_row(*(Text(cell(value)) for value in row))
    return shown


def _numeric(table: Table) -> list[bool]:
    """Which columns hold nothing but numbers."""
    return [
        all(isinstance(row[column], int | float | None) for row in table.rows)
        for column in range(len(table.columns))
    ]


def _draw(folder: Path, plots: Sequence[Plot]) -> list[Path]:
    if plots and importlib.util.find_spec("matplotlib") is None:
        logger.warning(
            'no pictures are drawn, which needs matplotlib: pip install "radar-kernels[eval]"'
        )
        return []
    drawn = []
    for plot in plots:
        # Not through pyplot, which would keep every figure and choose a window to show it in.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure()
        FigureCanvasAgg(figure)
        plot.draw(figure.subplots())
        path = folder / f"{plot.name}.png"
        figure.savefig(path, dpi=120, bbox_inches="tight")
        drawn.append(path)
    return drawn


def _replace(path: Path, text: str) -> None:
    """Write a file at once: who reads it meanwhile sees the old one or the new one."""
    work = path.with_name(f".{path.name}")
    work.write_text(text, encoding="utf-8")
    os.replace(work, path)
