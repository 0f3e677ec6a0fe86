"""The summary finds what was put into made-up rows, and does not flatter chance."""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radar_core.evaluation.arms import UNSTEERED
from radar_core.evaluation.evidence_summary import _arms, choose, halves, summarise
from radar_core.evaluation.report import write
from radar_core.evaluation.runs import Header


def rows(
    gains: dict[str, float],
    count: int,
    dataset: str = "hotpotqa",
    noise: float = 0.1,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Rows in which every arm gains what it is told to, plus noise."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        base = {"item": f"{dataset}/{number}", "dataset": dataset}
        plain = -10 + 3 * draw.random()
        made.append({**base, "arm": UNSTEERED, "log_probability": plain})
        for label, gain in gains.items():
            made.append(
                {
                    **base,
                    "arm": f"gold: {label}",
                    "anchors": "gold",
                    "label": label,
                    "log_probability": plain + gain + draw.gauss(0, noise),
                    "mass_before": 0.1,
                    "mass": 0.3,
                }
            )
    return made


def table(summary: Any, number: int = 0) -> list[dict[str, Any]]:
    held = summary.tables[number]
    return [dict(zip(held.columns, row, strict=True)) for row in held.rows]


def test_differences_are_paired_and_have_intervals():
    made = rows({"good": 1.0, "nothing": 0.0, "bad": -2.0}, 30)
    unsteered, good, nothing, bad = table(summarise(made))
    assert unsteered["arm"] == UNSTEERED and unsteered["change"] is None
    assert good["change"] == pytest.approx(1.0, abs=0.1)
    assert good["low"] < good["change"] < good["high"] and good["low"] > 0.9
    assert good["p"] < 0.01 and good["better"] == 1
    assert nothing["low"] < 0.05 and nothing["high"] > -0.05 and nothing["p"] > 0.01
    assert bad["change"] == pytest.approx(-2.0, abs=0.1) and bad["better"] == 0
    assert good["log p"] - unsteered["log p"] == pytest.approx(good["change"])
    assert good["mass"] == pytest.approx(0.1)
    assert good["steered"] == pytest.approx(0.3) and unsteered["steered"] is None
    assert "F1" not in good


def test_each_data_set_has_its_table_and_all_questions_choose_together():
    made = rows({"a": 1.0, "b": 0.0}, 10) + rows({"a": 0.5, "b": 0.0}, 10, "musique", seed=1)
    for number in range(10):
        base = {"item": f"conflict/{number}", "dataset": "conflict", "log_probability": -1.0}
        made.append({**base, "arm": UNSTEERED, "margin": -1.0, "context_wins": False})
        steered = {"anchors": "gold", "label": "a", "margin": 2.0, "context_wins": number < 4}
        made.append({**base, "arm": "gold: a", **steered})
    summary = summarise(made)
    titles = [held.title for held in summary.tables]
    assert [title.split(":")[0] for title in titles[:3]] == ["hotpotqa", "musique", "conflict"]
    assert table(summary, 2)[1]["change"] == pytest.approx(3.0)
    assert table(summary, 2)[1]["wins"] == pytest.approx(0.4)
    chosen = table(summary, 3)
    assert [line["data"] for line in chosen[::3]] == [
        "hotpotqa", "musique", "conflict", "all questions",
    ]  # fmt: skip
    assert {line["arm"] for line in chosen} == {"a"}
    assert chosen[-1]["items"] == 20 and chosen[-1]["change"] == pytest.approx(0.75, abs=0.1)
    assert [plot.name for plot in summary.plots] == [
        "evidence-hotpotqa", "evidence-musique", "evidence-conflict",
    ]  # fmt: skip


def test_the_pictures_can_be_drawn(tmp_path: Path):
    summary = summarise(rows({"a": 1.0, "b": 0.0}, 3))
    written = write(tmp_path, summary, Header("evidence"), 3)
    assert written[-1].name == "evidence-hotpotqa.png" and written[-1].stat().st_size > 5000


def test_the_best_arm_is_chosen_on_one_half_and_reported_on_the_other():
    made = rows({"weak": 0.3, "strong": 1.0}, 20)
    first, second, both = choose(_arms(made), "log_probability", seed=2)
    assert first.arm == second.arm == both.arm == "gold: strong"
    assert (first.reported.n, second.reported.n, both.reported.n) == (10, 10, 20)
    own, other = halves([f"hotpotqa/{number}" for number in range(20)], seed=2)
    strong = next(arm for arm in _arms(made) if arm.name == "gold: strong")
    assert first.gain == pytest.approx(statistics.mean(strong.differences("log_probability", own)))
    assert first.reported.difference.mean == pytest.approx(
        statistics.mean(strong.differences("log_probability", other))
    )
    mean = (first.reported.difference.mean + second.reported.difference.mean) / 2
    assert both.reported.difference.mean == pytest.approx(mean)


def test_halves_that_disagree_are_both_named():
    made = rows({"a": 0.0, "b": 0.0}, 20, noise=0.0)
    own, _ = halves([f"hotpotqa/{number}" for number in range(20)])
    for row in made:
        if row["arm"] == ("gold: a" if row["item"] in own else "gold: b"):
            row["log_probability"] += 1
    first, second, both = choose(_arms(made), "log_probability")
    assert (first.arm, second.arm, both.arm) == ("gold: a", "gold: b", "gold: a / gold: b")
    assert first.gain == pytest.approx(1) and both.reported.difference.mean == pytest.approx(0)


def test_chance_looks_good_where_it_was_chosen_and_not_where_it_is_reported():
    gains, reported = [], []
    for seed in range(30):
        made = rows({f"arm {number}": 0.0 for number in range(20)}, 16, noise=1.0, seed=seed)
        first, _, both = choose(_arms(made), "log_probability")
        gains.append(first.gain or 0.0)
        reported.append(both.reported.difference.mean)
    assert statistics.mean(gains) > 0.4
    assert abs(statistics.mean(reported)) < 0.15


def test_too_few_items_choose_nothing():
    assert choose(_arms(rows({"a": 1.0}, 7)), "log_probability") == []
    assert len(summarise(rows({"a": 1.0}, 7)).tables) == 1
    assert choose([], "log_probability") == []


@settings(deadline=None)
@given(st.lists(st.text(), unique=True, max_size=40), st.integers(0, 5), st.randoms())
def test_halves_are_halves_whatever_the_order(items: list[str], seed: int, random: Any):
    first, second = halves(items, seed)
    assert sorted(first + second) == sorted(items) and len(first) - len(second) in (0, 1)
    random.shuffle(items)
    assert halves(items, seed) == (first, second)
