"""A file of lines holds whole lines only, whatever becomes of the disk and the process."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from radar_core.json_lines import JsonLines, parsed
from tests.full_disk import no_room

FIRST = b'{"lines"'


def opened(path: Path, **options: bool) -> JsonLines:
    return JsonLines(
        path, FIRST, taken="taken", refused="refused", dropped="asked again", **options
    )


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("left", [0, 1, 10])
def test_a_line_that_does_not_fit_leaves_no_trace(tmp_path: Path, left: int, durable: bool):
    path = tmp_path / "lines.jsonl"
    file = opened(path, durable=durable)
    file.write({"lines": 1})
    with no_room(path, left), pytest.raises(OSError, match="too large"):
        file.write({"a": "long line"})
    assert path.read_bytes() == b'{"lines": 1}\n'
    file.write({"b": 2})
    file.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"lines": 1}, {"b": 2}]
    assert opened(path).content == path.read_bytes()


@pytest.mark.parametrize("error", [OSError("no disk"), KeyboardInterrupt()])
def test_a_line_that_may_not_last_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
):
    def fail(descriptor: int) -> None:
        raise error

    file = opened(tmp_path / "lines.jsonl", durable=True)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(type(error)):
            file.write({"lines": 1})
    assert (tmp_path / "lines.jsonl").read_bytes() == b""
    file.write({"lines": 2})
    assert (tmp_path / "lines.jsonl").read_bytes() == b'{"lines": 2}\n'


def test_what_cannot_be_taken_back_is_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "lines.jsonl"
    file = opened(path)
    file.write({"lines": 1})

    class Broken:
        closed = False

        def write(self, line: memoryview) -> int:
            if len(line) > 5:
                return kept.write(line[:5])
            raise OSError("no room")

        def truncate(self, length: int) -> None:
            raise OSError("no disk")

        def close(self) -> None:
            self.closed = True
            kept.close()

    kept, file._file = file._file, Broken()  # type: ignore[assignment]
    with pytest.raises(OSError, match="no disk"):
        file.write({"b": 2})
    torn = path.read_bytes()
    with pytest.raises(OSError, match="is closed, after a line could neither be written nor taken"):
        file.write({"c": 3})
    assert path.read_bytes() == torn
    file.close()
    assert opened(path).content == b'{"lines": 1}\n', "and the next one cuts it off"


def test_a_torn_line_is_cut_off_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"lines": 1}\n{"a": ')
    with caplog.at_level(logging.WARNING):
        assert opened(path).content == b'{"lines": 1}\n'
    assert "ends in half a line, which is dropped and asked again" in caplog.text
    assert path.read_text() == '{"lines": 1}\n'


@pytest.mark.parametrize("content", ["x", "a note", '{"other": 1}\n{"a": ', "\n\n{"])
def test_nothing_is_cut_off_another_file(tmp_path: Path, content: str):
    path = tmp_path / "lines.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match="refused"):
        opened(path)
    assert path.read_text() == content


@pytest.mark.parametrize("line", ["5", "[]", "null", "{", "", '{"a": NaN}', "[" * 100_000, "\x00"])
def test_what_is_no_object_is_refused(line: str):
    with pytest.raises(ValueError, match=r"not JSON|expected a JSON object"):
        parsed(line.encode())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            b'{"a": 1,}',
            r"^not JSON: Illegal trailing comma .* at column 8$|^not JSON: Exp.* column 9$",
        ),
        (b'{"a', r"^not JSON: Unterminated string starting at column 2$"),
        (b'{"a": "\xff"}', r"^not UTF-8: invalid start byte, 0xff; save it as UTF-8$"),
        ('{"a": 1}'.encode("utf-16-le"), r"^not JSON: Expecting property name .* at column 2$"),
        (b'{"a": Infinity}', r"^not JSON: Infinity is no number of JSON$"),
    ],
)
def test_a_refusal_leaves_the_line_to_the_caller(line: bytes, words: str):
    with pytest.raises(ValueError, match=words):
        parsed(line)
