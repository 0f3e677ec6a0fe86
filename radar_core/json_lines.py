"""Files of JSON lines that grow: what a crash has torn is cut off, what failed leaves no trace."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from radar_core.file_lock import hold

__all__ = ["JsonLines", "encoded", "parsed", "refusal", "whole"]

logger = logging.getLogger("radar_core")


class JsonLines:
    """A file of JSON objects, one a line, that this process alone writes.

    Opening it drops a last line that a crash has cut off, with a warning. A line that cannot be
    written whole, as when the disk is full, is taken back, so that the next one begins where it
    should; if that fails too, the file is closed and nothing more is written to it.

    Attributes:
        content: the whole lines that the file held when it was opened.

    Args:
        path: the file, which is made if need be.
        first: what every such file begins with, such as b'{"radar_rows"'; of a file that does not,
            nothing is cut off.
        taken: what to say if another process has the file.
        refused: what to say of a file that begins with something else.
        dropped: what becomes of what a torn line told, for the warning.
        durable: whether a line is on the disk, whatever becomes of the machine, once it is written.
        fresh: throw away what the file holds.

    Raises:
        ValueError: another process has the file, or it begins with something else.
        OSError: the file cannot be opened.
    """

    def __init__(
        self,
        path: Path,
        first: bytes,
        *,
        taken: str,
        refused: str,
        dropped: str,
        durable: bool = False,
        fresh: bool = False,
    ) -> None:
        self.path = path
        self._durable = durable
        # Unbuffered: what is written has left this process, whatever becomes of it.
        self._file: BinaryIO = open(path, "a+b", buffering=0)  # noqa: SIM115 (closed by close)
        try:
            hold(self._file, taken)
            if fresh:
                self._file.truncate(0)
            self._file.seek(0)
            content = self._file.read()
            self.content = whole(content, first, refused)
            self._length = len(self.content)
            if self._length < len(content):
                logger.warning("%s ends in half a line, which is dropped and %s", path, dropped)
                self._file.truncate(self._length)
        except BaseException:
            self._file.close()
            raise

    def write(self, value: Mapping[str, Any]) -> None:
        """Write a line, all of it or nothing.

        Args:
            value: what it holds, as JSON.

        Raises:
            OSError: it cannot be written, and the file is as it was before, or closed.
            ValueError: a number is not finite, or the value holds itself.
            TypeError: a part is nothing that JSON can hold.
        """
        line = encoded(value) + b"\n"
        if self._file.closed:
            raise OSError(
                f"{self.path} is closed, after a line could neither be written nor taken back; "
                "make room on the disk and begin again"
            )
        try:
            left = memoryview(line)
            while left:
                left = left[self._file.write(left) :]
            if self._durable:
                os.fsync(self._file.fileno())
        except BaseException:
            self._take_back()
            raise
        self._length += len(line)

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        self._file.close()

    def _take_back(self) -> None:
        try:
            self._file.truncate(self._length)
        except BaseException:
            self._file.close()
            raise


def encoded(value: Any) -> bytes:
    """Write a value as JSON.

    Raises:
        ValueError: a number is not finite, or the value holds itself.
        TypeError: a part is nothing that JSON can hold.
    """
    return json.dumps(value, allow_nan=False).encode()


def parsed(line: bytes) -> dict[str, Any]:
    """Read a line.

    Args:
        line: a JSON object.

    Returns:
        The object.

    Raises:
        ValueError: it is none.
    """
    try:
        # Not left to json.loads, which takes bytes with zeros in them for UTF-16 or UTF-32.
        value = json.loads(line.decode("utf-8-sig"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(refusal(error)) from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return value


def refusal(error: ValueError | RecursionError) -> str:
    """Say why a line or a file is no JSON, without the line, which the caller knows.

    Args:
        error: what decoding it or `json.loads` raised.

    Returns:
        What is wrong, with the column or the byte where that is known.
    """
    if isinstance(error, RecursionError):
        return "not JSON that can be read: it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        byte = error.object[error.start]
        return f"not UTF-8: {error.reason}, {byte:#04x}; save it as UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
    return f"not JSON: {error}"


def whole(content: bytes, first: bytes, refused: str) -> bytes:
    """Leave out a last line that is not there to its end.

    Args:
        content: what a file holds.
        first: what every such file begins with.
        refused: what to say of one that begins with something else.

    Returns:
        All whole lines.

    Raises:
        ValueError: there is half a line and the file begins with something else, so that nobody
            knows what its half lines are.
    """
    length = content.rfind(b"\n") + 1
    if length < len(content) and not content.startswith(first[: len(content)]):
        raise ValueError(refused)
    return content[:length]


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")
