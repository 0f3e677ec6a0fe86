"""What every experiment is: items, measured one at a time, and a summary of all the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["Experiment", "Plot", "Row", "Summary", "Table"]

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """A table to print, to write as markdown and as JSON.

    Args:
        title: one line above it.
        columns: the heads of its columns.
        rows: the cells, str or numbers; None for an empty one.
        note: what a reader has to know below it; "" for nothing.
        detail: whether it is for the report alone, too long for a terminal.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float | int | None]]
    note: str = ""
    detail: bool = False


@dataclass(frozen=True)
class Plot:
    """A picture.

    Args:
        name: of the file, without its ending.
        draw: draws on a matplotlib Axes that it is given.
    """

    name: str
    draw: Callable[[Any], None]


@dataclass(frozen=True)
class Summary:
    """What an experiment found.

    Args:
        tables: the first one is printed first.
        plots: pictures, one file each.
    """

    tables: Sequence[Table]
    plots: Sequence[Plot] = field(default=())


class Experiment(Protocol):
    """One question put to data."""

    @property
    def name(self) -> str:
        """What it is called on the command line."""
        ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """Everything that the results depend on, as JSON: another setting is another run."""
        ...

    def items(self) -> Sequence[tuple[str, Any]]:
        """Return what is measured: (a name that no other item has, the item)."""
        ...

    def measure(self, item: Any) -> Iterable[dict[str, Any]]:
        """Measure one item: rows of JSON values, each with the "arm" it belongs to.

        Rows that come one by one, from a generator, show how far it is.
        """
        ...

    def summarise(self, rows: Sequence[Row]) -> Summary:
        """Summarise the rows of all items measured so far; each has its item's name as "item"."""
        ...
