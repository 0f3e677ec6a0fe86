"""The report says the numbers, what they depend on and how little they rest on."""

from __future__ import annotations

import importlib.util
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from radar_core.evaluation.experiment import Plot, Summary, Table
from radar_core.evaluation.report import (
    as_dict,
    cell,
    load,
    markdown,
    note_on,
    print_summary,
    write,
)
from radar_core.evaluation.runs import Header

HEADER = Header(
    "evidence", {"arms": "quick"}, {"name": "tiny|one"}, 7, {"a.jsonl": "ff"}, {"torch": "2.13"}
)


def draw(axes: Any) -> None:
    axes.plot([1, 2], [3, 4])


SUMMARY = Summary(
    [
        Table(
            "What was found",
            ["arm", "difference", "note"],
            [["a|b", 0.12345, None], ["[bold]c", -1.0, "x"], ["d", None, "y"]],
            "A note.",
        )
    ],
    [Plot("picture", draw)],
)


def test_the_terminal_shows_tables_and_notes_as_they_are():
    out = io.StringIO()
    print_summary(Console(file=out, width=100, markup=False, highlight=False), SUMMARY, 12)
    text = out.getvalue()
    for expected in ("What was found", "a|b", "0.123", "-1.000", "[bold]c", "A note.", "12 items"):
        assert expected in text


def test_the_folder_gets_json_markdown_and_pictures(tmp_path: Path):
    written = write(tmp_path, SUMMARY, HEADER, 12)
    assert [path.name for path in written] == ["summary.json", "report.md", "picture.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(p.name for p in written)
    held = json.loads((tmp_path / "summary.json").read_text())
    assert held == as_dict(SUMMARY, HEADER, 12)
    assert held["items"] == 12 and held["seed"] == 7 and held["settings"] == {"arms": "quick"}
    assert held["tables"][0]["rows"][0] == ["a|b", 0.12345, None]
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "report.md").read_text()
    assert text == markdown(SUMMARY, HEADER, 12, [tmp_path / "picture.png"])
    assert "![picture](picture.png)" in text


def test_a_summary_reads_back(tmp_path: Path):
    with pytest.raises(ValueError, match=r"holds no summary\.json"):
        load(tmp_path)
    write(tmp_path, SUMMARY, HEADER, 12)
    (table,) = load(tmp_path).tables
    assert list(table.columns) == ["arm", "difference", "note"] and table.note == "A note."
    assert [list(row) for row in table.rows] == [list(row) for row in SUMMARY.tables[0].rows]


def test_markdown_tables_keep_their_columns():
    lines = markdown(SUMMARY, HEADER, 12).splitlines()
    start = lines.index("| arm | difference | note |")
    assert lines[start + 1] == "| --- | ---: | --- |"
    assert lines[start + 2 : start + 5] == [
        "| a\\|b | 0.123 |  |",
        "| [bold]c | -1.000 | x |",
        "| d |  | y |",
    ]
    assert "| model: name | tiny\\|one |" in lines
    assert "| data: a.jsonl | ff |" in lines and "| versions: torch | 2.13 |" in lines


def test_few_items_are_called_few():
    assert "read the intervals" in note_on(20) and "20 items" in note_on(20)
    assert note_on(1).startswith("Measured on 1 item.")
    assert note_on(100) == "Measured on 100 items."


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (True, "yes"),
        (3, "3"),
        (0.5, "0.500"),
        (0.0, "0.000"),
        (0.00012, "1.2e-04"),
        (-12.3456, "-12.346"),
        ("x", "x"),
    ],
)
def test_cells(value: Any, text: str):
    assert cell(value) == text


def test_without_matplotlib_there_are_no_pictures_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        written = write(tmp_path, SUMMARY, HEADER, 12)
    assert [path.name for path in written] == ["summary.json", "report.md"]
    assert "radar-kernels[eval]" in caplog.text


def test_what_cannot_be_read_back_is_never_written(tmp_path: Path):
    write(tmp_path, SUMMARY, HEADER, 12)
    before = (tmp_path / "summary.json").read_text()
    bad = Summary([Table("t", ["a"], [[float("nan")]])])
    with pytest.raises(ValueError):
        write(tmp_path, bad, HEADER, 12)
    assert (tmp_path / "summary.json").read_text() == before
