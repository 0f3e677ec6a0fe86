"""The benchmark of selection: what it writes, and that wrong selections are found out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import machine, selection
from benchmarks.rows import Label, Row, timed, untimed
from benchmarks.selection import QUICK, Shape, build, exact_dense
from benchmarks.timing import Summary


def test_the_conversation_has_the_messages_and_characters_asked_for() -> None:
    work = build(Shape(10, 3_001), repetitions=3)
    assert len(work.known) == 9 and len(work.following) == 3
    messages = [*work.known, work.last(1)]
    assert 3_001 <= sum(len(message.text) for message in messages) <= 3_010
    texts = [message.text for message in work.known] + work.following
    assert len(set(texts)) == 12
    assert work.last(0).sender == selection.AGENTS[9 % 6]


def test_the_command_line_writes_the_rows_of_all_contenders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "read_bytes_beyond_cache", lambda: 1 << 22)
    path = tmp_path / "selection.json"
    assert selection.main(["--quick", "--rounds", "2", "--json", str(path)]) == 0
    rows = [Row(**row) for row in json.loads(path.read_text())["rows"]]
    select, prompt = f"select: {QUICK}", f"prompt: {QUICK}"
    assert [(row.work, row.provider) for row in rows] == [
        (select, "numpy"),
        (select, "radar-dense"),
        (select, "radar-lexical"),
        (prompt, "radar-dense"),
        (prompt, "radar-lexical"),
    ]
    assert all(row.median_ms and "of float64, the best 20 chosen" in row.checked for row in rows)
    assert f"bar: {select}: radar-dense" in capsys.readouterr().out


def test_wrong_scores_and_wrong_choices_are_found_out() -> None:
    (first, *_) = selection.tasks(QUICK, 2)
    contender = first().contenders["radar-dense"]
    messages, scores, selected = contender.call(0)
    assert contender.check((messages, scores, selected)).right
    worst = int(np.argmin(scores))
    for wrong in (
        (messages, [scores[0] + 1e-3, *scores[1:]], selected),
        (messages, scores[1:], selected),
        (messages, scores, [worst, *selected[1:]]),
        (messages, scores, selected[1:]),
        ([replace(messages[0], round=5), *messages[1:]], scores, selected),
    ):
        assert not contender.check(wrong).right
    assert len(exact_dense(messages)) == len(scores)


def test_the_bar_holds_for_the_default_alone() -> None:
    def row(provider: str, median: float | None) -> Row:
        label = Label("selection", "w", "fp32", provider)
        if median is None:
            return untimed(label, "wrong")
        return timed(label, Summary(median, median, median), None, "right")

    rows = [row("radar-dense", 49.0), row("radar-dense", 51.0), row("radar-dense", None)]
    assert selection.bar([*rows, row("radar-lexical", 90.0)]) == [
        ("w", 49.0, True),
        ("w", 51.0, False),
        ("w", None, False),
    ]
