"""Running an experiment item by item, so that what is interrupted goes on where it stopped.

A run is a folder. Its rows.jsonl begins with a header, which tells what the results depend on, and
holds one line for each item that is done.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from radar_core.evaluation.experiment import Experiment, Row
from radar_core.json_lines import JsonLines, encoded, parsed, whole

__all__ = ["ROWS", "Header", "Outcome", "Run", "execute", "machine", "read", "versions"]

ROWS = "rows.jsonl"
FORMAT = 1
_FIRST = b'{"radar_rows"'


@dataclass(frozen=True)
class Header:
    """What a run's results depend on.

    Args:
        name: of the experiment.
        settings: the experiment's own, as JSON.
        model: which model, with its number format and the device; empty if there is none.
        seed: of everything that is drawn.
        data: SHA-256 of each data file, by the file's name.
        versions: of the packages that compute.
        machine: where the run began; the only part that may differ when it goes on.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    data: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str | None] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Return the header as it reads back from JSON.

        Raises:
            ValueError: a setting is nothing that JSON can hold.
        """
        try:
            return json.loads(encoded(asdict(self)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"settings of {self.name!r} cannot be written: {error}") from None

    @property
    def digest(self) -> str:
        """Eight characters that differ between runs whose results may differ."""
        compared = {key: value for key, value in self.plain().items() if key != "machine"}
        text = json.dumps(compared, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Args:
        rows: of all items that are done, each with its item's name as "item".
        done: how many of the wanted items are done.
        total: how many were wanted.
        interrupted: whether Ctrl-C ended it.
    """

    rows: list[dict[str, Any]]
    done: int
    total: int
    interrupted: bool


class Run(AbstractContextManager["Run"]):
    """A run's folder, held by this process alone while it is open.

    Args:
        folder: the folder; it is made if need be.
        header: what this run's results depend on; an earlier run in the folder must have the same.
        fresh: throw away what an earlier run left.

    Raises:
        ValueError: on entering: another process holds the folder, or the folder holds a run with
            another header, or a damaged one, or a file of another kind in its place.
    """

    def __init__(self, folder: Path, header: Header, *, fresh: bool = False) -> None:
        self.folder = folder
        self.header = header
        self.fresh = fresh
        self.done: dict[str, list[dict[str, Any]]] = {}
        self._file: JsonLines | None = None

    def __enter__(self) -> Run:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / ROWS
        self._file = JsonLines(
            path,
            _FIRST,
            taken=f"another process is writing {self.folder}; wait for it, or give another folder "
            "by --out",
            refused=_no_run(path),
            dropped="measured again",
            durable=True,
            fresh=self.fresh,
        )
        try:
            header, self.done = _parsed(self._file.content, path)
            if header is None:
                self._file.write({"radar_rows": FORMAT, **self.header.plain()})
                _sync_folder(self.folder)
            else:
                _check_same(self.header.plain(), header, self.folder)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        assert self._file is not None
        self._file.close()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of all items that are done."""
        return _rows(self.done)

    def add(self, item: str, rows: Sequence[Row], seconds: float) -> None:
        """Write down an item that is done; afterwards nothing can lose it.

        Args:
            item: its name.
            rows: what was measured.
            seconds: how long it took.

        Raises:
            ValueError: a row holds what JSON cannot.
            OSError: the rows cannot be written, and none of them is.
        """
        assert self._file is not None
        kept = [dict(row) for row in rows]
        try:
            self._file.write({"item": item, "seconds": round(seconds, 3), "rows": kept})
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the rows of item {item!r} cannot be written ({error}); rows hold numbers that "
                "are finite, str, bool, and None where something is undefined"
            ) from None
        self.done[item] = kept


# Seconds after which a line says where an item is.
LONG_SILENCE = 20.0


def execute(
    experiment: Experiment,
    folder: Path,
    header: Header,
    *,
    fresh: bool = False,
) -> Outcome:
    """Measure what is not measured yet.

    Progress is shown on stderr. Ctrl-C ends the run between two items or in the midst of one, which
    is then measured again when the run goes on.

    Args:
        experiment: what to measure.
        folder: where its rows are kept.
        header: what its results depend on.
        fresh: begin anew, whatever the folder holds.

    Returns:
        The rows of everything the folder holds, and how far it got.

    Raises:
        ValueError: as `Run` does, or two items have the same name.
    """
    items = experiment.items()
    names = [name for name, _ in items]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two items are called {twice!r}; every item needs a name of its own")
    with Run(folder, header, fresh=fresh) as run:
        wanted = [(name, item) for name, item in items if name not in run.done]
        interrupted = False
        with _progress(len(items), len(items) - len(wanted)) as progress:
            try:
                for name, item in wanted:
                    start = time.perf_counter()
                    rows = []
                    try:
                        for row in experiment.measure(item):
                            rows.append(row)
                            progress.row(name, len(rows), str(row.get("arm", "")))
                    except ValueError as error:
                        raise ValueError(f"item {name!r}: {error}") from error
                    seconds = time.perf_counter() - start
                    run.add(name, rows, seconds)
                    progress.item(seconds)
            except KeyboardInterrupt:
                interrupted = True
        done = sum(name in run.done for name in names)
        return Outcome(run.rows, done, len(items), interrupted)


def read(folder: Path) -> tuple[Header, list[dict[str, Any]], int]:
    """Read a run's folder, which another process may be writing.

    Args:
        folder: the folder.

    Returns:
        The header, the rows of all items that are done, and how many items that is.

    Raises:
        ValueError: there is no run, or it is damaged.
    """
    path = folder / ROWS
    if not path.is_file():
        raise ValueError(f"{folder} holds no run, there is no {ROWS} in it")
    header, done = _parsed(whole(path.read_bytes(), _FIRST, _no_run(path)), path)
    if header is None:
        raise ValueError(f"{path} is empty: that run was ended before it began")
    known = {key: header[key] for key in Header.__dataclass_fields__ if key in header}
    return Header(**known), _rows(done), len(done)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def versions() -> dict[str, str | None]:
    """Return the versions of what computes; None where a package is not installed."""
    found: dict[str, str | None] = {}
    for name in ("radar-kernels", "torch", "transformers", "sentence-transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def machine() -> dict[str, Any]:
    """Describe the machine in a few words."""
    import torch

    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass  # no Linux: the architecture's name has to do
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "processor": name,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


# -- the file --------------------------------------------------------------------------------------


def _rows(done: Mapping[str, Sequence[Row]]) -> list[dict[str, Any]]:
    return [{"item": item, **row} for item, rows in done.items() for row in rows]


def _no_run(path: Path) -> str:
    return (
        f"{path} does not begin as a run of this version does; give another folder by --out, or "
        "--fresh to throw it away"
    )


def _parsed(
    content: bytes, path: Path
) -> tuple[dict[str, Any] | None, dict[str, list[dict[str, Any]]]]:
    header: dict[str, Any] | None = None
    done: dict[str, list[dict[str, Any]]] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            value = parsed(line)
            if header is None:
                header = _header(value)
            else:
                item, rows = _item(value)
                done[item] = rows
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}, is not what a run of this version writes ({error}); give "
                "another folder by --out, or --fresh to throw it away"
            ) from None
    return header, done


def _header(value: dict[str, Any]) -> dict[str, Any]:
    if value.pop("radar_rows", None) != FORMAT:
        raise ValueError(f"it is no header of format {FORMAT}")
    return value


def _item(value: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    item, rows = value.get("item"), value.get("rows")
    if not isinstance(item, str):
        raise ValueError(f"item must be a str, got {item!r:.80}")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"rows must be a list of objects, got {rows!r:.80}")
    return item, rows


def _check_same(wanted: Mapping[str, Any], held: Mapping[str, Any], folder: Path) -> None:
    """Raise ValueError unless both headers agree in all but the machine."""
    mine, theirs = (
        dict(_flat({key: value for key, value in header.items() if key != "machine"}))
        for header in (wanted, held)
    )
    different = [
        f"{key} is {_shown(theirs, key)} there and {_shown(mine, key)} here"
        for key in dict.fromkeys([*mine, *theirs])
        if mine.get(key, _ABSENT) != theirs.get(key, _ABSENT)
    ]
    if different:
        more = f" (and {len(different) - 3} more)" if different[3:] else ""
        raise ValueError(
            f"{folder} holds another run: {'; '.join(different[:3])}{more}. Give a folder of its "
            f"own by --out {_free(folder)}, take that run's settings, or --fresh to throw it away"
        )


_ABSENT = object()


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else key)
    else:
        yield name, value


def _shown(flat: Mapping[str, Any], key: str) -> str:
    return json.dumps(flat[key]) if key in flat else "absent"


def _free(folder: Path) -> Path:
    """Return a folder beside one that does not exist yet."""
    number = 2
    while (other := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    return other


def _sync_folder(folder: Path) -> None:
    """Have the system write down that the file exists at all."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- progress --------------------------------------------------------------------------------------


class _Progress(Protocol):
    """Shows how far a run is."""

    def row(self, item: str, rows: int, arm: str) -> None:
        """Note that an item under way has got another row, of this arm."""

    def item(self, seconds: float) -> None:
        """Note that an item is done, and how long it took."""


@contextmanager
def _progress(total: int, done: int) -> Iterator[_Progress]:
    """Yield what shows how far a run is: a bar on a terminal, lines elsewhere."""
    if not sys.stderr.isatty():
        yield _Lines(total, done)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
    from rich.progress import TextColumn as Text
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), Remaining())
    text = Text("{task.description}", markup=False)
    # An item may take minutes, of which the default would look at the last half.
    with Progress(
        *columns, text, console=Console(stderr=True), transient=True, speed_estimate_period=3600
    ) as progress:
        yield _Bar(progress, progress.add_task("", total=total, completed=done))


class _Bar:
    def __init__(self, progress: Any, task: Any) -> None:
        self._progress, self._task = progress, task

    def row(self, item: str, rows: int, arm: str) -> None:
        self._progress.update(self._task, description=f"{item}: {arm}")

    def item(self, seconds: float) -> None:
        self._progress.update(self._task, advance=1, description="")


class _Lines:
    def __init__(self, total: int, done: int) -> None:
        self._total, self._done = total, done
        self._spent: list[float] = []
        self._said = time.monotonic()
        if done:
            going = "nothing is left to measure" if done == total else "going on"
            self._say(f"[{done}/{total}] done before, {going}")

    def row(self, item: str, rows: int, arm: str) -> None:
        if time.monotonic() - self._said >= LONG_SILENCE:
            self._say(f"[{self._so_far}/{self._total}] {item}: row {rows}, {arm}")

    def item(self, seconds: float) -> None:
        self._spent.append(seconds)
        left = (self._total - self._so_far) * sum(self._spent) / len(self._spent)
        counted = f"[{self._so_far}/{self._total}]"
        self._say(f"{counted} {seconds:.1f} s, about {left / 60:.1f} min left")

    @property
    def _so_far(self) -> int:
        return self._done + len(self._spent)

    def _say(self, text: str) -> None:
        self._said = time.monotonic()
        print(text, file=sys.stderr, flush=True)
