"""A run loses nothing that was done, measures nothing twice, and never mixes two settings."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from radar_core.evaluation.experiment import Row, Summary
from radar_core.evaluation.runs import ROWS, Header, Run, execute, read
from tests.full_disk import no_room

HEADER = Header("squares", {"power": 2, "layers": (1, 2)}, seed=3, machine={"cpu": "one"})


@dataclasses.dataclass
class Squares:
    """Squares numbers; `before` sees each one first."""

    count: int
    before: Callable[[int], None] = lambda number: None
    name: str = "squares"
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def items(self) -> list[tuple[str, int]]:
        return [(f"n{number}", number) for number in range(self.count)]

    def measure(self, item: int) -> list[dict[str, Any]]:
        self.before(item)
        return [{"arm": arm, "value": item**power} for arm, power in (("one", 1), ("two", 2))]

    def summarise(self, rows: Sequence[Row]) -> Summary:
        return Summary([])


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / ROWS).read_text().splitlines()]


def test_a_run_writes_a_header_and_a_line_an_item(tmp_path: Path):
    outcome = execute(Squares(3), tmp_path / "a" / "run", HEADER)
    assert (outcome.done, outcome.total, outcome.interrupted) == (3, 3, False)
    header, *items = lines(tmp_path / "a" / "run")
    assert header["name"] == "squares" and header["settings"] == {"power": 2, "layers": [1, 2]}
    assert header["seed"] == 3 and header["machine"] == {"cpu": "one"}
    assert [item["item"] for item in items] == ["n0", "n1", "n2"]
    assert items[2]["rows"] == [{"arm": "one", "value": 2}, {"arm": "two", "value": 4}]
    assert outcome.rows[-1] == {"item": "n2", "arm": "two", "value": 4}


def test_what_is_done_is_not_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    execute(Squares(2), tmp_path, HEADER)
    measured: list[int] = []
    outcome = execute(Squares(4, measured.append), tmp_path, HEADER)
    assert measured == [2, 3]
    assert outcome.done == 4 and [row["value"] for row in outcome.rows[::2]] == [0, 1, 2, 3]
    said = capsys.readouterr().err
    assert "[2/4] done before" in said and "[4/4]" in said and "min left" in said


def test_fewer_items_keep_what_more_have_found(tmp_path: Path):
    execute(Squares(4), tmp_path, HEADER)
    outcome = execute(Squares(2), tmp_path, HEADER)
    assert (outcome.done, outcome.total) == (2, 2) and len(outcome.rows) == 8


def test_ctrl_c_keeps_what_is_done(tmp_path: Path):
    def interrupt(number: int) -> None:
        if number == 2:
            raise KeyboardInterrupt

    outcome = execute(Squares(4, interrupt), tmp_path, HEADER)
    assert outcome.interrupted and (outcome.done, outcome.total) == (2, 4)
    assert len(lines(tmp_path)) == 3
    assert execute(Squares(4), tmp_path, HEADER).done == 4


def test_a_long_item_tells_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("radar_core.evaluation.runs.LONG_SILENCE", 0.0)
    execute(Squares(2), tmp_path, HEADER)
    said = capsys.readouterr().err.splitlines()
    assert said[:2] == ["[0/2] n0: row 1, one", "[0/2] n0: row 2, two"]
    assert said[3] == "[1/2] n1: row 1, one"
    execute(Squares(2), tmp_path, HEADER)
    assert capsys.readouterr().err == "[2/2] done before, nothing is left to measure\n"


def test_an_error_names_the_item_and_keeps_the_others(tmp_path: Path):
    def fail(number: int) -> None:
        if number == 1:
            raise ValueError("no evidence")

    with pytest.raises(ValueError, match="item 'n1': no evidence"):
        execute(Squares(3, fail), tmp_path, HEADER)
    assert len(lines(tmp_path)) == 2
    assert execute(Squares(3), tmp_path, HEADER).done == 3, "the lock is let go of"


@hypothesis_settings(deadline=None, max_examples=60)
@given(cut=st.integers(min_value=1, max_value=400))
def test_a_line_cut_anywhere_is_measured_again(cut: int, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("cut")
    whole = execute(Squares(4), folder, HEADER)
    path = folder / ROWS
    content = path.read_bytes()
    kept = content[: max(0, len(content) - cut)]
    path.write_bytes(kept)
    measured: list[int] = []
    again = execute(Squares(4, measured.append), folder, HEADER)
    assert again.rows == whole.rows
    done = max(0, kept.count(b"\n") - 1)
    assert measured == list(range(done, 4))
    assert len(lines(folder)) == 5


def test_a_torn_line_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    execute(Squares(2), tmp_path, HEADER)
    with (tmp_path / ROWS).open("a") as file:
        file.write('{"item": "n2", "ro')
    assert read(tmp_path)[2] == 2
    with caplog.at_level(logging.WARNING):
        execute(Squares(3), tmp_path, HEADER)
    (record,) = caplog.records
    assert "half a line" in record.getMessage()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"settings": {"power": 3, "layers": [1, 2]}}, "settings.power is 2 there and 3 here"),
        ({"settings": {"layers": [1, 2]}}, "settings.power is 2 there and absent here"),
        ({"seed": 4}, "seed is 3 there and 4 here"),
        ({"name": "cubes"}, 'name is "squares" there and "cubes" here'),
        ({"data": {"a.jsonl": "ff"}}, 'data.a.jsonl is absent there and "ff" here'),
        ({"versions": {"torch": "3"}}, 'versions.torch is absent there and "3" here'),
    ],
)
def test_another_setting_is_refused_and_named(
    change: dict[str, Any], expected: str, tmp_path: Path
):
    folder = tmp_path / "run"
    (tmp_path / "run-2").mkdir()
    execute(Squares(2), folder, HEADER)
    before = (folder / ROWS).read_bytes()
    other = dataclasses.replace(HEADER, **change)
    with pytest.raises(ValueError, match="holds another run") as caught:
        execute(Squares(2), folder, other)
    assert expected in str(caught.value) and f"--out {tmp_path / 'run-3'}," in str(caught.value)
    assert (folder / ROWS).read_bytes() == before
    assert other.digest != HEADER.digest
    fresh = execute(Squares(1), folder, other, fresh=True)
    assert len(fresh.rows) == 2 and len(lines(folder)) == 2


def test_another_machine_may_go_on(tmp_path: Path):
    execute(Squares(1), tmp_path, HEADER)
    other = dataclasses.replace(HEADER, machine={"cpu": "two"})
    assert execute(Squares(2), tmp_path, other).done == 2
    assert other.digest == HEADER.digest


def test_two_cannot_write_one_folder(tmp_path: Path):
    with Run(tmp_path, HEADER) as run:
        run.add("n0", [{"arm": "one"}], 0.1)
        for fresh in (False, True):
            with pytest.raises(ValueError, match="another process is writing"):
                execute(Squares(2), tmp_path, HEADER, fresh=fresh)
        assert read(tmp_path)[1] == [{"item": "n0", "arm": "one"}], "reading is free"
    assert execute(Squares(2), tmp_path, HEADER).done == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object()])
def test_a_row_that_json_cannot_hold_is_refused_whole(value: Any, tmp_path: Path):
    with Run(tmp_path, HEADER) as run, pytest.raises(ValueError, match="rows of item 'n0'"):
        run.add("n0", [{"arm": "one", "value": value}], 0.1)
    assert len(lines(tmp_path)) == 1


def test_two_items_of_one_name_are_refused(tmp_path: Path):
    class Twice(Squares):
        def items(self) -> list[tuple[str, int]]:
            return [("same", 1), ("same", 2)]

    with pytest.raises(ValueError, match="two items are called 'same'"):
        execute(Twice(2), tmp_path, HEADER)


def test_what_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="holds no run"):
        read(tmp_path)
    (tmp_path / ROWS).write_text("")
    with pytest.raises(ValueError, match="is empty"):
        read(tmp_path)
    (tmp_path / ROWS).write_text('{"radar_rows": 1, "name": "squares"}\nnonsense\n{}\n')
    for attempt in (lambda: read(tmp_path), lambda: execute(Squares(1), tmp_path, HEADER)):
        with pytest.raises(ValueError, match="line 2, is not what a run"):
            attempt()


@pytest.mark.parametrize("content", ["a note, not a run", '{"a": 1}\n{"b": 2}\n{"c"'])
def test_nothing_is_cut_off_what_is_no_run(content: str, tmp_path: Path):
    (tmp_path / ROWS).write_text(content)
    for attempt in (lambda: read(tmp_path), lambda: execute(Squares(1), tmp_path, HEADER)):
        with pytest.raises(ValueError, match="does not begin as a run of this version does"):
            attempt()
    assert (tmp_path / ROWS).read_text() == content


@pytest.mark.parametrize(
    "line",
    [
        '{"item": "i1", "rows": {"v": 1}}',
        '{"item": "i1", "rows": 5}',
        '{"item": "i1", "rows": [1]}',
        '{"item": "i1", "rows": [[1]]}',
        '{"item": "i1", "rows": null}',
        '{"item": "i1"}',
        '{"item": 1, "rows": []}',
        '{"item": ["i1"], "rows": []}',
        '{"rows": []}',
        '{"item": "i1", "rows": [{"v": NaN}]}',
        '{"item": "i1", "rows": [{"v": -Infinity}]}',
        '{"item": "i1", "rows": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"item": "i1", "rows": [{"v": ' + "9" * 10_000 + "}]}",
        '["item", "rows"]',
        "null",
        "5",
        "",
        "\udcff",
    ],
    ids=lambda line: line[:40],
)
def test_a_damaged_line_is_named(line: str, tmp_path: Path):
    execute(Squares(1), tmp_path, HEADER)
    path = tmp_path / ROWS
    path.write_bytes(path.read_bytes() + line.encode(errors="surrogateescape") + b"\n")
    before = path.read_bytes()
    for attempt in (lambda: read(tmp_path), lambda: execute(Squares(1), tmp_path, HEADER)):
        with pytest.raises(ValueError, match=r"line 3, is not what a run of this version writes"):
            attempt()
    assert path.read_bytes() == before


@pytest.mark.parametrize("header", ["{}", "5", '{"radar_rows": 2}', "[" * 100_000])
def test_a_damaged_header_is_refused(header: str, tmp_path: Path):
    (tmp_path / ROWS).write_text(header + "\n")
    with pytest.raises(ValueError, match="line 1, is not what a run"):
        read(tmp_path)


def test_a_disk_that_is_full_for_a_moment_costs_one_item(tmp_path: Path):
    with Run(tmp_path, HEADER) as run:
        run.add("n0", [{"value": 0}], 0.1)
        with no_room(tmp_path / ROWS), pytest.raises(OSError, match="too large"):
            run.add("n1", [{"value": "1" * 100}], 0.1)
        run.add("n2", [{"value": 2}], 0.1)
        assert list(run.done) == ["n0", "n2"]
    assert read(tmp_path)[1] == [{"item": "n0", "value": 0}, {"item": "n2", "value": 2}]
    with Run(tmp_path, HEADER) as run:
        assert list(run.done) == ["n0", "n2"]


SLOW = """
    import sys, time
    from pathlib import Path
    from tests.evaluation.test_runs import HEADER, Squares
    from radar_core.evaluation.runs import execute

    execute(Squares(int(sys.argv[2]), lambda number: time.sleep(0.02)), Path(sys.argv[1]), HEADER)
"""


def test_a_killed_process_loses_no_item(tmp_path: Path):
    count = 400
    command = [sys.executable, "-c", textwrap.dedent(SLOW), str(tmp_path), str(count)]
    path = tmp_path / ROWS
    seen: list[bytes] = []
    for _ in range(2):
        wanted = len(seen) + 5
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=os.getcwd())
        deadline = time.monotonic() + 30
        while not path.exists() or path.read_bytes().count(b"\n") < wanted:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1].splitlines()
        assert whole[: len(seen)] == seen, "what was done stays as it was"
        assert wanted <= len(whole) < count
        seen = whole
    measured: list[int] = []
    outcome = execute(Squares(count, measured.append), tmp_path, HEADER)
    assert outcome.done == count and measured == list(range(len(seen) - 1, count))
    assert path.read_bytes().splitlines()[: len(seen)] == seen
