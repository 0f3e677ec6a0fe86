"""The event log is on disk as it happens and reads back."""

from __future__ import annotations

import json

import pytest

from radar_core.policies.dacs import EventLog, read_events
from tests.full_disk import no_room


def test_a_line_is_on_disk_before_the_log_is_closed(tmp_path):
    log = EventLog(tmp_path / "run.jsonl")
    log.write("RUN_START", mode="focus")
    log.write("RUN_END", reason="done")
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["RUN_START", "RUN_END"]
    assert log.events == read_events(tmp_path / "run.jsonl")
    log.close()
    log.close()
    with pytest.raises(ValueError, match="closed"):
        log.write("RUN_END")


def test_memory_and_file_hold_the_same(tmp_path):
    text = "zweite Zeile\n\u2028 \U0001f642 \ud800"
    memory = EventLog()
    with EventLog(tmp_path / "run.jsonl") as file:
        for log in (memory, file):
            log.write("USER_MESSAGE", text=text, tags=("a", "b"))
    (one,), (other,) = memory.events, file.events
    assert one["text"] == other["text"] == text
    assert one["tags"] == other["tags"] == ["a", "b"]
    assert one["seconds"] >= 0 and one["timestamp"].endswith("Z")


def test_a_torn_last_line_is_left_out_with_a_warning(tmp_path, caplog):
    path = tmp_path / "run.jsonl"
    with EventLog(path) as log:
        log.write("RUN_START")
        log.write("RUN_END", reason="done")
    path.write_text(path.read_text()[:-20])
    assert [event["event"] for event in read_events(path)] == ["RUN_START"]
    assert "cut off" in caplog.text


@pytest.mark.parametrize("line", ["{", "[1]", '{"event": "PARTY"}', '{"event": []}', ""])
def test_a_line_that_is_no_event_is_an_error_that_says_where(tmp_path, line):
    path = tmp_path / "run.jsonl"
    path.write_text('{"event": "RUN_START"}\n' + line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        read_events(path)


def test_a_file_that_exists_is_not_written_over(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text("precious")
    with pytest.raises(FileExistsError, match="a log of its own"):
        EventLog(path)
    assert path.read_text() == "precious"


def test_a_line_that_a_full_disk_cuts_off_is_taken_back(tmp_path):
    path = tmp_path / "run.jsonl"
    with EventLog(path) as log:
        log.write("RUN_START")
        with no_room(path), pytest.raises(OSError):
            log.write("USER_MESSAGE", text="never kept")
        log.write("RUN_END", reason="done")
    assert [event["event"] for event in read_events(path)] == ["RUN_START", "RUN_END"]


def test_unknown_events_and_odd_values_are_refused():
    with pytest.raises(ValueError, match="PARTY"):
        EventLog().write("PARTY")
    with pytest.raises(TypeError):
        EventLog().write("RUN_START", model=object())
