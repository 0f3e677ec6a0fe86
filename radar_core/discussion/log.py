"""A discussion's log: a line for every answer of a model, from which a discussion goes on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

from radar_core.checks import is_finite, is_whole
from radar_core.discussion.task import Task
from radar_core.json_lines import JsonLines, parsed
from radar_core.transcript import Message

__all__ = ["Key", "Log"]

FORMAT = 1
_FIRST = b'{"radar_discussion"'

Key = tuple[str, int, str, str, int]
Check = Callable[[Key, Mapping[str, Any]], None]

_MEND = "delete this line and all below it, to go on from what is above, or give another path"


class Log(AbstractContextManager["Log"]):
    """A file of JSON lines, held by this process alone while it is open.

    The first line is a header with the settings. Then, each written as it happens:
    {"task", "text", "notes"} when a task begins; {"call", "task", "round", "agent", "number",
    "text", "prompt_tokens", "completion_tokens", "anchor_tokens", "seconds", "seed", "at", ...} for
    every answer, where "call" is "message" for what an agent says (with "policy_seconds") or
    "policy" for what its policy asked; {"failure", ...} for every failed attempt; and {"verdict",
    "task", ...} when a task has ended. A last line that a crash cut off is dropped, and one that
    cannot be written is taken back, so that what it told counts as never said.

    Args:
        path: the file, which is made if need be; None keeps nothing.
        settings: what the answers depend on, as JSON.
        check: called with the key and the record of every call that the file holds; raises
            ValueError for one that the discussion cannot have written. None takes all.

    Raises:
        ValueError: on entering: the file is no log, is damaged, belongs to other settings, or is
            held by another process.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        settings: Mapping[str, Any],
        check: Check | None = None,
    ) -> None:
        self.path = None if path is None else Path(path)
        self._check = check
        # As it reads back, so that it can be compared.
        self.settings = json.loads(json.dumps(settings))
        self._file: JsonLines | None = None
        self._calls: dict[Key, dict[str, Any]] = {}
        self._lines: dict[Key, int] = {}  # where the calls stand that were read
        self._tasks: dict[str, dict[str, Any]] = {}
        self._ended: set[str] = set()

    def __enter__(self) -> Log:
        if self.path is None:
            return self
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = JsonLines(
            self.path,
            _FIRST,
            taken=f"another discussion is writing {self.path}; wait for it, or give another path",
            refused=f"{self.path} is no discussion's log; give another path",
            dropped="what it told is asked again",
        )
        try:
            self._read(self._file.content)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        if self._file is not None:
            self._file.close()

    def begin(self, task: str, text: str, notes: Mapping[str, str]) -> None:
        """Note that a task begins, or goes on.

        Args:
            task: its id.
            text: its text.
            notes: its private notes.

        Raises:
            ValueError: the log has a task of this id with another text or other notes.
        """
        known = self._tasks.get(task)
        if known is None:
            known = {"text": text, "notes": dict(notes)}
            self._write({"task": task, **known})
            self._tasks[task] = known
        elif known != {"text": text, "notes": dict(notes)}:
            raise ValueError(
                f"{self.path} has another task {task!r}, which begins {known['text'][:60]!r}; give "
                "this one another id, or use another log"
            )

    def find(self, key: Key) -> dict[str, Any] | None:
        """Return the record of a call that was answered, None if there is none.

        Args:
            key: (task, round, agent, "message" or "policy", number within the turn).
        """
        return self._calls.get(key)

    def damaged(self, key: Key, why: str) -> ValueError:
        """Build the error of a call that was read and does not go with the discussion.

        Args:
            key: of the call, as in `find`.
            why: what does not go together.

        Returns:
            An error that names the line and what to do.
        """
        return ValueError(f"{self.path}:{self._lines.get(key, '?')}: {why}; {_MEND}")

    def answered(self, key: Key, record: Mapping[str, Any]) -> None:
        """Write an answer.

        Args:
            key: as in `find`.
            record: its fields, as JSON.

        Raises:
            OSError: it cannot be written, and is not found later.
        """
        task, round, agent, call, number = key
        line = {"call": call, "task": task, "round": round, "agent": agent, "number": number}
        self._write({**line, **record, "at": _now()})
        self._calls[key] = {**line, **record}

    def failed(self, key: Key, attempt: int, error: BaseException) -> None:
        """Write that an attempt failed."""
        task, round, agent, call, number = key
        what = f"{type(error).__name__}: {error}"
        self._write(
            {"failure": what, "attempt": attempt, "call": call, "task": task, "round": round}
            | {"agent": agent, "number": number, "at": _now()}
        )

    def ended(self, task: str, verdict: Mapping[str, Any]) -> None:
        """Write what came of a task, once."""
        if task not in self._ended:
            self._write({"verdict": dict(verdict), "task": task, "at": _now()})
            self._ended.add(task)

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(record)

    def _read(self, content: bytes) -> None:
        if not content:
            self._write({"radar_discussion": FORMAT, "settings": self.settings})
            return
        records = [
            _parsed(line, f"{self.path}:{number}")
            for number, line in enumerate(content.splitlines(), start=1)
        ]
        self._check_header(records[0])
        for number, record in enumerate(records[1:], start=2):
            try:
                self._take(record, number)
            except KeyError as missing:
                self._refuse(number, f"{missing} is missing")
            except (TypeError, ValueError) as error:
                self._refuse(number, str(error))

    def _refuse(self, number: int, why: str) -> NoReturn:
        raise ValueError(
            f"{self.path}:{number}: not a line of a discussion's log: {why}; {_MEND}"
        ) from None

    def _check_header(self, header: Mapping[str, Any]) -> None:
        if header.get("radar_discussion") != FORMAT:
            raise ValueError(
                f"{self.path} is no discussion's log of format {FORMAT}; give another path"
            )
        found = header.get("settings")
        if found != self.settings:
            raise ValueError(
                f"{self.path} is the log of a discussion with other settings: "
                f"{_difference(found, self.settings)}; use another log, or the same settings"
            )

    def _take(self, record: dict[str, Any], line: int) -> None:
        if "verdict" in record:
            _expect(record, verdict=_mapping, task=_text)
            self._ended.add(record["task"])
        elif "failure" in record:
            _key(record)
            _expect(record, failure=_text, attempt=is_whole)
        elif "call" in record:
            key = _key(record)
            _check_answer(record)
            if key in self._calls:
                raise ValueError(f"line {self._lines[key]} has this call already")
            if self._check is not None:
                self._check(key, record)
            self._calls[key], self._lines[key] = record, line
        else:
            _expect(record, task=_text)
            if record["task"] in self._tasks:
                raise ValueError(f"the task {record['task']!r} stands above already")
            task = Task(record["text"], record["notes"], record["task"])  # raises for what is none
            self._tasks[task.id] = {"text": task.text, "notes": dict(task.notes)}


def _key(record: Mapping[str, Any]) -> Key:
    """Return the key of a call's line.

    Raises:
        KeyError: a field is missing.
        ValueError: one is none that a log has.
    """
    _expect(record, task=_text, number=_count)
    if record["call"] not in ("message", "policy"):
        raise ValueError(f'call is {record["call"]!r}; expected "message" or "policy"')
    Message(record["agent"], record["round"], "")  # raises for what is no agent or no round
    number = record["number"]
    return record["task"], record["round"], record["agent"], record["call"], number


def _check_answer(record: Mapping[str, Any]) -> None:
    """Raise KeyError or ValueError unless a call's line holds an answer."""
    Message(record["agent"], record["round"], record["text"])
    counts = {f"{whose}_tokens": is_whole for whose in ("prompt", "completion", "anchor")}
    _expect(record, **counts, seconds=is_finite, seed=_count, prompt=_text)
    if record["call"] == "message":
        _expect(record, policy_seconds=is_finite)


def _expect(record: Mapping[str, Any], **kinds: Callable[[Any], bool]) -> None:
    for name, is_right in kinds.items():
        if not is_right(record[name]):
            raise ValueError(f"{name} is {record[name]!r}; expected {_EXPECTED[is_right]}")


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _count(value: Any) -> bool:
    return is_whole(value) and value >= 0


def _mapping(value: Any) -> bool:
    return isinstance(value, dict)


_EXPECTED: dict[Callable[[Any], bool], str] = {
    is_finite: "a finite number",
    is_whole: "a whole number",
    _count: "a whole number of at least 0",
    _mapping: "a JSON object",
    _text: "a text",
}


def _now() -> float:
    """Return the time of day in seconds since 1970, to the millisecond."""
    return round(time.time(), 3)


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    try:
        return parsed(line)
    except ValueError as error:
        raise ValueError(f"{where}: {error}; {_MEND}") from None


def _difference(found: Any, wanted: Any, where: str = "") -> str:
    """Name the first setting that differs, and how."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in dict.fromkeys((*found, *wanted)):
            if found.get(key) != wanted.get(key) or (key in found) != (key in wanted):
                return _difference(found.get(key), wanted.get(key), f"{where}.{key}".strip("."))
    if isinstance(found, list) and isinstance(wanted, list):
        if len(found) != len(wanted):
            return f"{where} had {len(found)} entries and has {len(wanted)}"
        for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
            if one != other:
                return _difference(one, other, f"{where}[{place}]")
    was, now = json.dumps(found), json.dumps(wanted)
    pairs = enumerate(zip(was, now, strict=False))
    same = next((place for place, (one, other) in pairs if one != other), min(len(was), len(now)))
    start = max(0, same - 40) if max(len(was), len(now)) > 200 else 0
    cut = "..." * (start > 0)
    return f"{where} was {cut}{was[start : start + 200]} and is {cut}{now[start : start + 200]}"
