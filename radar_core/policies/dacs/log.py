"""The event log: one JSON object a line, on disk as soon as it happens."""

from __future__ import annotations

import json
import logging
import time
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from radar_core.json_lines import JsonLines, encoded, parsed, whole

__all__ = ["EVENTS", "Event", "EventLog", "read_events", "timestamp"]

logger = logging.getLogger("radar_core")

Event = dict[str, Any]

_FIRST = b'{"event": '

EVENTS = frozenset(
    {
        "RUN_START",
        "REGISTRY_UPDATE",
        "REGISTRY_TRUNCATION",
        "STEERING_REQUEST",
        "TRANSITION",
        "CONTEXT_BUILT",
        "LLM_CALL",
        "CALL_FAILED",
        "STEERING_RESPONSE",
        "STEERING_ABANDONED",
        "INTERRUPT",
        "RESUME",
        "FOCUS_TIMEOUT",
        "USER_MESSAGE",
        "USER_RESPONSE",
        "RUN_END",
    }
)


def timestamp() -> str:
    """Return the time: ISO 8601 in UTC with milliseconds, such as 2026-04-09T12:00:00.000Z."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class EventLog:
    """Writes events; each line has left this process before the next thing happens.

    A line that cannot be written whole, as when the disk is full, is taken back.

    Args:
        path: a new file, one run each; None keeps the events in memory only.

    Raises:
        FileExistsError: the file exists: two runs in one file could not be told apart.
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | PathLike[str] | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._events: list[Event] = []
        self._file: JsonLines | None = None
        self._started = time.monotonic()
        if self.path is not None:
            try:
                self.path.touch(exist_ok=False)  # of two that begin at once, one
            except FileExistsError:
                raise FileExistsError(
                    f"{self.path} exists; every run gets a log of its own"
                ) from None
            self._file = JsonLines(
                self.path,
                _FIRST,
                taken=f"{self.path} is the log of a run that has not ended",
                refused=f"{self.path} is no log of an orchestrator",
                dropped="lost",
            )

    @property
    def events(self) -> list[Event]:
        """Everything written so far, read back from the file if there is one."""
        return list(self._events) if self.path is None else read_events(self.path)

    def write(self, event: str, **fields: Any) -> None:
        """Write an event.

        Args:
            event: one of `EVENTS`.
            **fields: what it is about, as JSON values.

        Raises:
            ValueError: the event is unknown, the log is closed, or a number is not finite.
            TypeError: a field is no JSON value.
            OSError: it cannot be written, and the log is as it was before.
        """
        if event not in EVENTS:
            raise ValueError(f"event is {event!r}; expected one of {', '.join(sorted(EVENTS))}")
        seconds = time.monotonic() - self._started
        record = {"event": event, "timestamp": timestamp(), "seconds": seconds, **fields}
        if self.path is None:
            self._events.append(json.loads(encoded(record)))
            return
        if self._file is None:
            raise ValueError(f"the log {self.path} is closed")
        self._file.write(record)

    def close(self) -> None:
        """Close the file, if there is one; closing twice does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def read_events(path: str | PathLike[str]) -> list[Event]:
    """Read a log back.

    Args:
        path: a file that `EventLog` wrote, perhaps up to a crash.

    Returns:
        Its events. A last line that a crash cut off is left out, with a warning.

    Raises:
        ValueError: another line is no event.
        OSError: the file cannot be read.
    """
    content = Path(path).read_bytes()
    kept = whole(content, _FIRST, f"{path} is no log of an orchestrator")
    if len(kept) < len(content):
        torn = content[len(kept) :]
        logger.warning("%s: the last line was cut off and is left out: %.60r", path, torn)
    lines = kept.splitlines()
    return [_event(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _event(line: bytes, place: str) -> Event:
    try:
        event = parsed(line)
    except ValueError as error:
        raise ValueError(f"{place} is no event of an orchestrator: {error}") from None
    # Compared one by one, as what stands there may be a list, which no set can be asked for.
    if not any(event.get("event") == known for known in EVENTS):
        raise ValueError(f"{place} is no event of an orchestrator: {line[:60]!r}")
    return event
