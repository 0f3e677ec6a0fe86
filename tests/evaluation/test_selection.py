"""The experiment that tells how well selectors find the evidence."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from radar_core.evaluation.command import Arguments, Loaded
from radar_core.evaluation.conversation import SOLVER, report
from radar_core.evaluation.items import Paragraph, Question
from radar_core.evaluation.selection import (
    DECAYS,
    THRESHOLDS,
    Placement,
    Selection,
    build,
    summarise,
)
from radar_core.evaluation.selectors import Chance
from tests.evaluation.conftest import unloaded


def question(number=0, relay=False):
    return Question(
        f"q{number}",
        "hotpotqa",
        "Where was the founder of Acme born?",
        ("Oslo",),
        (
            Paragraph("relay 1" if relay else "Acme", ("Ann Lee founded Acme.", "It sells."), (0,)),
            Paragraph("Ann Lee", ("Ann Lee was born in Oslo.", "She likes tea."), (0,)),
            Paragraph("Oslo", ("Oslo is a town.", "It has trams.", "It snows there."), ()),
        ),
    )


class Scripted:
    """Gives sentences the similarities of a table, 0.1 where it has none."""

    def __init__(self, table):
        self.table = table

    def similarities(self, reading):
        found = [self.table.get(item.text, 0.1) for item in reading.sentences]
        return np.array(found, dtype=np.float32)


RIGHT = Scripted(
    {"Ann Lee founded Acme.": 0.93, "Ann Lee was born in Oslo.": 0.72, "It snows there.": 0.5}
)
HALF = Scripted({"Ann Lee founded Acme.": 0.9, "It snows there.": 0.8})
WRONG = Scripted({"Ann Lee founded Acme.": 0.0, "Ann Lee was born in Oslo.": 0.0})


def measured(selectors, questions=None, **arguments):
    experiment = Selection(selectors, questions or [question()], **arguments)
    rows = [
        {**row, "item": name}
        for name, item in experiment.items()
        for row in experiment.measure(item)
    ]
    return json.loads(json.dumps(rows)), experiment


def of(rows, **wanted):
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def test_rankings_are_measured_by_hand():
    rows, _ = measured({"right": RIGHT, "half": HALF, "wrong": WRONG})
    plain = {row["arm"]: row for row in of(rows, kind="ranking", decays="off")}
    assert plain["right"]["auc"] == 1 and plain["right"]["recall@1"] == 0.5
    assert plain["right"]["recall@3"] == 1 and plain["right"]["precision@3"] == pytest.approx(2 / 3)
    # One of two beats all five others, the other ties with four and loses against one.
    assert plain["half"]["auc"] == pytest.approx((1 + 4 * 0.5 / 5) / 2)
    assert plain["wrong"]["auc"] == 0 and plain["wrong"]["recall@5"] == 0


def test_thresholds_are_measured_by_hand():
    placement = Placement(farthest=1, rounds=1)
    rows, _ = measured({"half": HALF}, placement=placement)
    found = {row["value"]: row for row in of(rows, kind="threshold")}
    assert list(found) == list(THRESHOLDS)
    assert found[0.05]["chosen"] == 7 and found[0.05]["recall"] == 1
    assert found[0.05]["precision"] == pytest.approx(2 / 7)
    assert (found[0.75]["precision"], found[0.75]["recall"]) == (0.5, 0.5)
    assert (found[0.85]["precision"], found[0.85]["chosen"]) == (1, 1)
    assert len(of(rows, kind="spatial_decay")) == len(DECAYS)


def test_decays_follow_the_placement():
    placement = Placement(farthest=3, rounds=4, seed=5)
    item = question()
    topology, rounds = placement.place(report(item), "hotpotqa/q0")
    hops = topology.hops_to(SOLVER)
    rows, _ = measured({"right": RIGHT}, placement=placement, spatial_decay=0.5, temporal_decay=0.8)
    first = 0.93 * 0.5 ** (hops["Acme"] - 1) * 0.8 ** (4 - rounds[0] - 1)
    second = 0.72 * 0.5 ** (hops["Ann Lee"] - 1) * 0.8 ** (4 - rounds[1] - 1)
    for row in of(rows, kind="threshold"):
        assert row["recall"] == ((first >= row["value"]) + (second >= row["value"])) / 2


@pytest.mark.parametrize("kind", ["spatial_decay", "temporal_decay"])
def test_each_decay_is_varied_alone(kind):
    questions = [question(number) for number in range(8)]
    rows, _ = measured({"right": RIGHT}, questions)
    by_value = {}
    for value in DECAYS:
        other, _ = measured({"right": RIGHT}, questions, **{kind: value})
        expected = [row["auc"] for row in of(other, kind="ranking", decays="on")]
        by_value[value] = [row["auc"] for row in of(rows, kind=kind, value=value)]
        assert by_value[value] == expected
    assert by_value[0.6] != by_value[1.0]


def test_a_placement_is_drawn_again_alike_and_differs_between_questions():
    reported = report(question())
    draws = [Placement(seed=seed).place(reported, name) for seed in range(20) for name in "ab"]
    again = [Placement(seed=seed).place(reported, name) for seed in range(20) for name in "ab"]

    def placed(draw):
        hops = draw[0].hops_to(SOLVER)
        return tuple(hops[sender] for sender in reported.transcript.senders), tuple(draw[1])

    assert [placed(one) for one in draws] == [placed(one) for one in again]
    assert len({placed(one) for one in draws}) > 30
    distances = {hops for one in draws for hops in placed(one)[0]}
    assert distances == {1, 2, 3} and {r for one in draws for r in one[1]} == {0, 1, 2, 3}


def test_an_agent_may_be_called_as_a_relay():
    rows, _ = measured({"right": RIGHT}, [question(relay=True)])
    assert of(rows, kind="ranking", decays="off")[0]["auc"] == 1


@pytest.mark.parametrize("supporting", [(), (0, 1)])
def test_a_question_without_both_kinds_of_sentences_is_refused(supporting):
    item = Question("q", "2wiki", "Who?", ("x",), (Paragraph("A", ("One.", "Two."), supporting),))
    with pytest.raises(ValueError, match="expected some, but not all"):
        measured({"right": RIGHT}, [item])


def test_the_summary_says_what_the_rows_say():
    questions = [question(number) for number in range(6)]
    rows, experiment = measured({"half": HALF, "right": RIGHT, "wrong": WRONG}, questions)
    summary = experiment.summarise(rows)
    ranking, thresholds, decays = summary.tables
    cells = {(row[0], row[1]): row for row in ranking.rows}
    assert cells["right", "off"][2] == 1 and cells["half", "off"][2] == 0.7
    assert cells["half", "off"][-1] is None  # what the others are compared with
    assert cells["wrong", "off"][4] == 0 and cells["half", "off"][4] == 1
    assert cells["wrong", "off"][-2] == -1 and cells["wrong", "off"][-1] < 0.05
    assert len(thresholds.rows) == 3 * len(THRESHOLDS) and len(decays.rows) == 6 * len(DECAYS)
    assert [plot.name for plot in summary.plots] == [
        "hotpotqa-threshold",
        "hotpotqa-spatial-decay",
        "hotpotqa-temporal-decay",
    ]


def test_plots_draw_every_selector():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    rows, _ = measured({"half": HALF, "right": RIGHT}, [question(1), question(2)])
    for plot in summarise(rows).plots:
        axes = Figure().subplots()
        plot.draw(axes)
        assert {line.get_label().split(":")[0] for line in axes.get_lines()} == {"half", "right"}


def arguments(tmp_path, load, **options):
    lines = [
        {
            "id": item.id,
            "question": item.question,
            "answer": item.answers[0],
            "kind": "bridge",
            "level": "easy",
            "paragraphs": [
                {
                    "title": paragraph.title,
                    "sentences": list(paragraph.sentences),
                    "supporting": list(paragraph.supporting),
                }
                for paragraph in item.paragraphs
            ],
        }
        for item in (question(1), question(2))
    ]
    path = tmp_path / "hotpotqa.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))

    return Arguments(load, [path], 1, 3, options)


def test_it_is_built_from_the_command_line_and_runs(tmp_path, smollm2):
    from radar_core.embedded import load_encoder

    loaded = Loaded(*smollm2, load_encoder())
    experiment = build(arguments(tmp_path, lambda: loaded, farthest="2"))
    assert experiment.placement == Placement(2, 4, 3) and len(experiment.items()) == 1
    ((_, item),) = experiment.items()
    rows = list(experiment.measure(item))
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    assert arms == ["dense", "dense-title", "lexical", "attention", "combined", "recommended"]
    plain = {row["arm"]: row for row in of(rows, kind="ranking", decays="off")}
    assert plain["combined"]["recall@5"] == 1
    json.dumps(experiment.settings)


def test_chance_looks_at_nothing_and_repeats_itself():
    def drawn(query, seed=0):
        return Chance(seed).similarities(SimpleNamespace(query=query, sentences=range(4000)))

    assert drawn("Who?").dtype == np.float32
    assert np.array_equal(drawn("Who?"), drawn("Who?"))
    for other in (drawn("Where?"), drawn("Who?", seed=1)):
        assert abs(np.corrcoef(drawn("Who?"), other)[0, 1]) < 0.1
    assert drawn("Who?").mean() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"selectors": "dense,magic"}, "selectors is 'magic'"),
        ({"selectors": ","}, "expected some of dense"),
        ({"farthest": "two"}, "farthest is 'two'; expected a whole number"),
        ({"farthest": "0"}, "at least 1"),
        ({"spatial_decay": "high"}, "spatial_decay is 'high'; expected a number"),
        ({"temporal_decay": "2"}, "temporal_decay"),
    ],
)
def test_malformed_options(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        build(arguments(tmp_path, unloaded, **options))
