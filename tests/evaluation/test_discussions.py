"""The experiment `discussion`: items as tasks, all arms on a small model, and what is reported."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from radar_core.discussion import Discussion
from radar_core.evaluation import discussions
from radar_core.evaluation.command import Arguments, Loaded
from radar_core.evaluation.discussion_tasks import parse_answer, score, task_for, work
from radar_core.evaluation.discussions import ARMS, Discussions, build
from radar_core.evaluation.discussions_summary import STEERED, summarise
from radar_core.evaluation.items import Choice, Paragraph, Problem, Question
from tests.evaluation.conftest import unloaded
from tests.models.tiny import SHAPE, tiny_model

QUESTION = Question(
    "q1",
    "hotpotqa",
    "Who wrote the opera that the theatre opened with?",
    ("Verdi",),
    tuple(
        Paragraph(f"Title {n}", (f"The fact number {n} is here. ", f"It has {n} parts."), (0,))
        for n in range(5)
    ),
)
PROBLEM = Problem("p1", "What is $1/2 + 1/4$?", "\\frac{3}{4}")
CHOICE = Choice("c1", "Which is red?", ("grass", "blood", "snow"), "B")
NAMES = ["planner", "searcher", "checker", "solver"]


class Encoder:
    """Embeds a text by its letters."""

    def encode(self, texts):
        return np.array(
            [[text.lower().count(letter) + 0.1 for letter in "abcdefgh"] for text in texts]
        )


@pytest.fixture(scope="module")
def small():
    from radar_core.embedded import load_tokenizer

    tokenizer = load_tokenizer()
    shape = SHAPE | {"head_dim": 16, "vocab_size": len(tokenizer), "max_position_embeddings": 4096}
    model = tiny_model("Llama", shape=shape)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return SimpleNamespace(model=model, tokenizer=tokenizer)


def experiment(small, tasks=(QUESTION,), warm_up=False, **options):
    options = dict(max_new_tokens=4, samples=3, fixed_length=True) | options
    built = Discussions(small.model, small.tokenizer, Encoder(), tasks, **options)
    built._warm.update(ARMS * (not warm_up))
    return built


def test_paragraphs_are_dealt_out_so_that_each_is_known_to_one_agent():
    task = task_for(QUESTION, NAMES)
    assert task.text == QUESTION.question and task.id == "hotpotqa/q1"
    for n in range(5):
        knowing = [name for name, note in task.notes.items() if f"fact number {n}" in note]
        assert knowing == [NAMES[n % 4]]
    assert task.notes["searcher"] == "Title 1: The fact number 1 is here. It has 1 parts."
    together = task_for(QUESTION, ["solver"], shared=True)
    assert together.notes["solver"].count("Title") == 5


def test_problems_and_choices_are_plain_tasks():
    assert task_for(PROBLEM, NAMES).text == PROBLEM.problem and not task_for(PROBLEM, NAMES).notes
    assert task_for(CHOICE, NAMES).text == "Which is red?\nA. grass\nB. blood\nC. snow"
    assert len({work(item) for item in (QUESTION, PROBLEM, CHOICE)}) == 3


@pytest.mark.parametrize(
    ("item", "text", "parsed", "scored"),
    [
        (QUESTION, "Answer: Rossini? No.\nAnswer: The Verdi.", "verdi", 1.0),
        (QUESTION, "It was Verdi\nor not", None, 0.5),
        (QUESTION, "Answer: ", None, 0.0),
        (PROBLEM, "so \\boxed{1} or rather \\boxed{\\frac{3}{4}}.", "\\frac{3}{4}", 1.0),
        (PROBLEM, "thus \\boxed{0.75}", "0.75", 1.0),
        (PROBLEM, "it is \\boxed{\\frac{3}{5}}", "\\frac{3}{5}", 0.0),
        (PROBLEM, "no idea", None, 0.0),
        (QUESTION, "I have thought.\n**Answer**: Verdi", "verdi", 1.0),
        (PROBLEM, "Thus it is three quarters.\n\\boxed{0.75", None, 0.0),
        (CHOICE, "Snow is white. The answer is (B).", "B", 1.0),
        (CHOICE, "The answer is (C).", "C", 0.0),
        (CHOICE, "hm", None, 0.0),
    ],
)
def test_answers_are_parsed_and_scored(item, text, parsed, scored):
    assert parse_answer(item, text) == parsed
    assert score(item, text) == pytest.approx(scored)
    assert score(item, None) == 0.0


def test_every_arm_runs_and_is_accounted_for(small):
    built = experiment(small, arms=ARMS, training=(QUESTION,))
    # Learning takes many discussions; what it learns is tested where it is done.
    for arm in ("agent-prune", "agent-dropout"):
        built._learned[arm, "Question"] = built._schedule
    rows = list(built.measure(QUESTION))
    assert sorted(row["arm"] for row in rows) == sorted(ARMS)
    assert [row["place"] for row in rows] == list(range(len(ARMS)))
    by_arm = {row["arm"]: row for row in rows}
    # Four agents in two rounds and a decider; compaction asks before all that heard something.
    calls = {arm: row["calls"] for arm, row in by_arm.items()}
    assert {calls[arm] for arm in ("full", *STEERED)} == {9}
    assert calls["single"] == 1 and calls["self-consistency"] == 3
    assert calls["chain"] == 4 and calls["debate"] == 8 and 9 < calls["compaction"] <= 18
    for row in rows:
        assert row["completion_tokens"] == 4 * row["calls"]  # the length is fixed
        assert row["seconds"] > row["policy_seconds"] >= 0
    steered = {arm for arm, row in by_arm.items() if row["anchor_tokens"]}
    assert steered == set(STEERED)
    assert by_arm["single"]["prompt_tokens"] * 3 == pytest.approx(
        by_arm["self-consistency"]["prompt_tokens"], abs=9
    )
    json.dumps([rows, dict(built.settings)])


def test_the_order_of_arms_changes_from_item_to_item_and_not_from_run_to_run(small):
    problems = [Problem(f"p{n}", f"What is {n}?", f"{n}") for n in range(5)]
    arms = ("full", "single", "chain")
    built = experiment(small, problems, arms=arms, max_new_tokens=1, rounds=1)
    orders = [[row["arm"] for row in built.measure(item)] for _, item in built.items()]
    again = experiment(small, problems, arms=arms, max_new_tokens=1, rounds=1)
    assert [row["arm"] for row in again.measure(problems[0])] == orders[0]
    assert len({tuple(order) for order in orders}) > 1


def test_an_arm_is_warmed_up_once_before_it_is_measured(small, monkeypatch):
    asked = []
    run = Discussion.run

    async def noted(self, task, **options):
        asked.append(task.text)
        return await run(self, task, **options)

    monkeypatch.setattr(Discussion, "run", noted)
    built = experiment(small, [PROBLEM], warm_up=True, arms=("full", "single"), rounds=1)
    list(built.measure(PROBLEM))
    list(built.measure(PROBLEM))
    assert asked == ["Name a color."] * 2 + [PROBLEM.problem] * 4


def test_pruning_learns_on_items_that_are_not_measured(small, monkeypatch):
    learned_on = []

    async def prune(spatial, temporal, utility, items, **options):
        learned_on.extend(items)
        assert 0.0 <= await utility(built._schedule, items[0]) <= 1.0
        return SimpleNamespace(schedule=built._schedule)

    monkeypatch.setattr(discussions, "agent_prune", prune)
    other = Problem("p2", "What is 2?", "2")
    built = experiment(small, [QUESTION], arms=("full", "agent-prune"), training=[other], rounds=1)
    with pytest.raises(ValueError, match="no item to learn on for agent-prune on hotpotqa"):
        list(built.measure(QUESTION))
    built = experiment(small, [PROBLEM], arms=("full", "agent-prune"), training=[other], rounds=1)
    assert len(list(built.measure(PROBLEM))) == len(list(built.measure(PROBLEM))) == 2
    assert learned_on == [other]


def rows(times, item="i1", score=0.5, **changes):
    return [
        {
            "item": item,
            "arm": arm,
            "dataset": "hotpotqa",
            "score": score + 0.1 * (arm == "agent-radar"),
            "unparsed": 0,
            "seconds": seconds,
            "policy_seconds": 0.01 if arm == "full" else 0.3,
            "prompt_tokens": 100,
            "completion_tokens": 50 if arm != "debate" else 25,
            "anchor_tokens": 7,
            "calls": 9,
        }
        | changes
        for arm, seconds in times.items()
    ]


def cell(table, arm, column):
    row = next(row for row in table.rows if row[0] == arm)
    return row[list(table.columns).index(column)]


def test_the_summary_tells_overheads_shares_and_bars():
    found = summarise(
        rows({"full": 10.0, "agent-radar": 10.8, "agent-radar-paper": 20.0, "debate": 10.0})
        + rows({"full": 20.0, "agent-radar": 21.0, "agent-radar-paper": 16.0, "debate": 5.0}, "i2")
    )
    costs, scores = found.tables
    assert cell(costs, "full", "overhead") == 1.0 and cell(costs, "full", "bars") is None
    assert cell(costs, "agent-radar", "overhead") == pytest.approx(31.8 / 30)
    assert cell(costs, "agent-radar", "policy's share") == pytest.approx(0.6 / 31.8)
    assert cell(costs, "agent-radar", "bars") == "met"
    assert cell(costs, "agent-radar-paper", "bars") == "missed: overhead"
    assert cell(costs, "debate", "overhead per token") == pytest.approx(1.0)
    assert cell(costs, "debate", "seconds") == 7.5
    assert cell(scores, "agent-radar", "difference") == pytest.approx(0.1)
    assert cell(scores, "full", "score") == pytest.approx(0.5)
    assert [plot.name for plot in found.plots] == ["discussion-hotpotqa"]


def test_a_large_share_misses_its_bar():
    given = rows({"full": 10.0, "agent-radar": 10.0}, policy_seconds=0.5)
    assert cell(summarise(given).tables[0], "agent-radar", "bars") == "missed: share"


def test_the_picture_can_be_drawn():
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    found = summarise(rows({"full": 10.0, "agent-radar": 11.0}))
    found.plots[0].draw(axes)
    assert [text.get_text() for text in axes.texts] == ["full", "agent-radar"]


def write(path: Path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_files_of_every_kind_are_taken_and_some_items_set_aside(small, tmp_path):
    problems = [
        {"problem": f"What is {n}?", "solution": "", "answer": f"{n}", "subject": "A", "level": 1}
        for n in range(4)
    ]
    choices = [
        {"question": f"Which is {n}?", "options": ["x", "y"], "answer": "A", "category": "law"}
        for n in range(4)
    ]
    files = [write(tmp_path / "p.jsonl", *problems), write(tmp_path / "c.jsonl", *choices)]
    options = {"train": "2", "agents": "6", "arms": "full,debate"}
    loaded = Loaded(small.model, small.tokenizer, Encoder())
    built = build(Arguments(lambda: loaded, files, 1, 3, options))
    assert [
        item.problem if isinstance(item, Problem) else item.question for item in built.tasks
    ] == [
        "What is 2?",
        "Which is 2?",
    ]
    assert len(built.training) == 4 and built.seed == 3 and built.arms == ("full", "debate")
    assert built._names == [*NAMES, "planner 2", "searcher 2"]
    assert not {name for name, _ in built.items()} & set(built.settings["training"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(arms="agent-radar"), "expected full and any of"),
        (dict(arms="full,unknown"), "arms is 'unknown'"),
        (dict(agents="1"), "agents is '1'"),
        (dict(schedule="ring"), "schedule is 'ring'"),
        (dict(fixed_length="maybe"), "fixed_length is 'maybe'"),
        (dict(arms="full,agent-prune"), "need items to learn on"),
    ],
)
def test_unusable_options_are_refused(tmp_path, options, message):
    file = write(
        tmp_path / "p.jsonl",
        {"problem": "What is 1?", "solution": "", "answer": "1", "subject": "A", "level": 1},
    )
    with pytest.raises(ValueError, match=message):
        build(Arguments(unloaded, [file], options=options))
    with pytest.raises(ValueError, match="at least one file"):
        build(Arguments(unloaded))
