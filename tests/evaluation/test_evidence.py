"""The experiment anchors what it says, and scores what the model gives."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from radar_core.anchors import render_chat, render_text
from radar_core.demo import answer_probability
from radar_core.evaluation.arms import APPENDED, UNSTEERED, arms
from radar_core.evaluation.command import Arguments, Loaded
from radar_core.evaluation.conversation import report
from radar_core.evaluation.evidence import INSTRUCTION, Evidence, build
from radar_core.methods import SPA, AttentionBias
from tests.core.test_cli import Words
from tests.evaluation.conftest import SECRET, TOPICS, conflict, question, unloaded, write


@pytest.fixture
def arguments(model: Any, tokenizer: Any, questions_file: Path, conflicts_file: Path) -> Any:
    def load() -> Loaded:
        return Loaded(model, tokenizer, Words())

    def make(*data: Path, load: Any = load, limit: int | None = 2, **options: str) -> Arguments:
        return Arguments(load, data or (questions_file, conflicts_file), limit, 5, options)

    return make


@pytest.fixture
def experiment(arguments: Any) -> Evidence:
    return build(arguments())


def contents(prompt: Any) -> list[str]:
    return [prompt.messages[a.message]["content"][a.start : a.end] for a in prompt.anchors]


def by_arm(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    rows = list(rows)
    held = {row["arm"]: row for row in rows}
    assert len(held) == len(rows)
    return held


def test_the_items_are_those_of_the_files(experiment: Evidence):
    names = [name for name, _ in experiment.items()]
    assert names[:2] == ["hotpotqa/q0", "hotpotqa/q1"] and len(names) == len(set(names)) == 4
    assert all(name.startswith("conflict/") for name in names[2:])


def test_gold_anchors_are_the_gold_sentences_and_the_question(experiment: Evidence):
    item = experiment.questions[1]
    prompt = experiment._prompt(item, report(item), "gold")
    *sentences, asked = contents(prompt)
    assert sorted(sentences) == [
        "Person 1 was born in 1801.",
        "The castle was founded by person 1.",
    ]
    assert asked == item.question and prompt.messages[0]["content"] == INSTRUCTION
    assert prompt.messages[1]["content"].endswith(f"Your task, solver:\n{item.question}")


def test_a_selector_chooses_as_many_as_it_is_told(arguments: Any):
    experiment = build(arguments(anchors="dense", top_k="3"))
    item = experiment.questions[0]
    prompt = experiment._prompt(item, report(item), "dense")
    assert len(prompt.anchors) == 4 and contents(prompt)[-1] == item.question


def test_the_scores_are_those_of_the_rendered_prompt(
    experiment: Evidence, model: Any, tokenizer: Any
):
    item = experiment.questions[0]
    rows = by_arm(experiment.measure(item))
    prompt = experiment._prompt(item, report(item), "gold")
    rendered = render_chat(tokenizer, prompt.messages)
    ids = torch.tensor([rendered.input_ids])
    for name, method, question_too in (
        (UNSTEERED, SPA(1.0), False),
        ("gold: SPA 1.4", SPA(1.4), False),
        ("gold: bias 2, last third", AttentionBias(2.0, None, [2], "generated"), False),
        (
            "gold: bias 2, all layers + question",
            AttentionBias(2.0, queries="generated"),
            True,
        ),
    ):
        from radar_core.steered import Steered

        anchors = prompt.anchors if question_too else prompt.anchors[:-1]
        mask = Steered(model, tokenizer).prepare([prompt.messages], [anchors])["anchors"]
        chance = answer_probability(model, tokenizer, ids, mask, method, "", item.answers[0])
        row = rows[name]
        assert row["log_probability"] == pytest.approx(math.log(chance), abs=1e-4)
        assert row["mean_log_probability"] == pytest.approx(row["log_probability"] / row["tokens"])
        assert row["prompt_tokens"] == len(rendered)
        if name != UNSTEERED:
            assert row["anchor_tokens"] == int(mask.sum())


def test_every_arm_has_a_row_with_what_it_did(experiment: Evidence, model: Any):
    rows = list(experiment.measure(experiment.questions[0]))
    assert rows[0]["arm"] == UNSTEERED
    labels = [row["label"] for row in rows[1:]]
    assert labels == [arm.label for arm in arms(model, "quick", question=True)]
    found = by_arm(rows)
    assert {row["gold_found"] for row in rows[1:]} == {1.0}
    bias, spa = found["gold: bias 2, all layers"], found["gold: SPA 2"]
    assert bias["mass"] > bias["mass_before"] == spa["mass_before"] == pytest.approx(spa["mass"])
    asked = found["gold: bias 2, all layers + question"]
    assert asked["anchor_tokens"] > bias["anchor_tokens"]
    assert asked["mass_before"] > bias["mass_before"]


def test_what_the_model_has_read_to_choose_is_not_run_again(arguments: Any, model: Any):
    def tokens_of(selector: str) -> tuple[int, int]:
        experiment = build(arguments(anchors=selector, arms="answer"))
        ran = []
        hook = model.get_input_embeddings().register_forward_hook(
            lambda module, given, output: ran.append(given[0].numel())
        )
        rows = list(experiment.measure(experiment.items()[0][1]))
        hook.remove()
        return sum(ran), rows[0]["prompt_tokens"]

    (alone, prompt), (read, _) = tokens_of("gold"), tokens_of("attention")
    # The selector's own reading of the prompt, its query and the blank one, but no second prompt.
    assert alone < read < alone + prompt


def test_appended_sentences_stand_before_the_task(experiment: Evidence, model: Any, tokenizer: Any):
    item = experiment.questions[1]
    prompt = experiment._prompt(item, report(item), "gold")
    content = prompt.messages[1]["content"].replace(
        "Your task, solver:",
        "The sentences that matter most:\nThe castle: The castle was founded by person 1.\n"
        "Person 1: Person 1 was born in 1801.\n\nYour task, solver:",
    )
    rendered = render_chat(tokenizer, [prompt.messages[0], {"role": "user", "content": content}])
    ids = torch.tensor([rendered.input_ids])
    chance = answer_probability(
        model, tokenizer, ids, torch.zeros_like(ids), SPA(1.0), "", item.answers[0]
    )
    row = by_arm(experiment.measure(item))[f"gold: {APPENDED}"]
    assert row["log_probability"] == pytest.approx(math.log(chance), abs=1e-4)
    assert row.get("mass") is None


def test_a_conflict_sets_the_context_against_memory(
    experiment: Evidence, model: Any, tokenizer: Any
):
    item = experiment.conflicts[0]
    rendered = render_text(tokenizer, item.prompt)
    ids = torch.tensor([rendered.input_ids])
    start = item.prompt.index(item.base_prompt)
    fact = (start, item.prompt.index(".", start))
    assert item.prompt[slice(*fact)] == "The harbour stands in Oslo"
    mask = torch.tensor(
        [[span[0] < fact[1] and fact[0] < span[1] for span in rendered.token_spans]]
    )
    rows = by_arm(experiment.measure(item))
    for name, method in ((UNSTEERED, SPA(1.0)), ("gold: SPA 1.4", SPA(1.4))):
        context, memorised = (
            math.log(answer_probability(model, tokenizer, ids, mask, method, "", answer))
            for answer in (" Oslo", " New Delhi")
        )
        row = rows[name]
        assert row["margin"] == pytest.approx(context - memorised, abs=1e-4)
        assert row["log_probability"] == pytest.approx(context, abs=1e-4)
        assert row["context_wins"] is (context > memorised)
    assert "question" not in " ".join(rows) and APPENDED not in " ".join(rows)


def test_replies_are_scored_where_asked_for(arguments: Any):
    experiment = build(arguments(replies="yes", reply_tokens="3"))
    rows = list(experiment.measure(experiment.questions[0]))
    assert all(0 <= row["f1"] <= 1 for row in rows)
    assert experiment.settings["reply_tokens"] == 3
    assert build(arguments(reply_tokens="3")).settings["reply_tokens"] == 0


def test_the_rows_hold_no_text_of_the_data(arguments: Any):
    experiment = build(arguments(limit=1, replies="yes", reply_tokens="2"))
    rows = [list(experiment.measure(item)) for _, item in experiment.items()]
    text = json.dumps(rows).lower()
    assert all(word not in text for word in (SECRET, "person", "oslo", "delhi", *TOPICS))


def test_all_adds_the_arms_that_run_the_whole_prompt(arguments: Any, model: Any):
    quick, everything = (
        [arm.label for arm in arms(model, chosen, question=True)] for chosen in ("quick", "all")
    )
    assert set(quick) < set(everything) and len(set(everything)) == len(everything)
    assert "bias 2, first third, all tokens" in set(everything) - set(quick)
    experiment = build(arguments(arms="all", limit=1))
    assert len(list(experiment.measure(experiment.questions[0]))) == 1 + len(everything)


def test_the_thirds_are_the_upper_and_lower_layers(model: Any):
    of = {arm.label: arm.method for arm in arms(model, "all", question=False)}
    assert of["bias 1, last third"] == AttentionBias(1.0, None, [2], "generated")
    assert of["bias 1, first third, all tokens"] == AttentionBias(1.0, None, [0])
    assert of["bias 1, all layers, all tokens"] == AttentionBias(1.0)


def test_a_question_without_evidence_has_no_gold(arguments: Any, tmp_path: Path):
    bare = question(0)
    for paragraph in bare["paragraphs"]:
        paragraph["supporting"] = []
    experiment = build(arguments(write(tmp_path / "bare.jsonl", [bare])))
    with pytest.raises(ValueError, match="marks no evidence here"):
        list(experiment.measure(experiment.questions[0]))


def test_a_conflict_that_does_not_hold_its_fact_is_refused(arguments: Any, tmp_path: Path):
    odd = {**conflict(0), "prompt": "Redefine: Oslo is where it stands. The harbour stands in"}
    experiment = build(arguments(write(tmp_path / "odd.jsonl", [odd])))
    with pytest.raises(ValueError, match="does not hold its stem"):
        list(experiment.measure(experiment.conflicts[0]))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"strength": "2"}, "no option strength; expected one of these"),
        ({"arms": "some"}, "arms is 'some'; expected one of answer, quick, all"),
        ({"anchors": "gold, best"}, "anchors is 'best'; expected some of gold, dense"),
        ({"anchors": " "}, "anchors is empty"),
        ({"top_k": "0"}, "top_k is '0'; expected a whole number"),
        ({"reply_tokens": "x"}, "reply_tokens is 'x'; expected a whole number"),
        ({"replies": "maybe"}, "replies is 'maybe'; expected yes or no"),
    ],
)
def test_bad_options_are_refused(options: dict[str, str], expected: str, arguments: Any):
    with pytest.raises(ValueError, match=expected):
        build(arguments(load=unloaded, **options))


def test_no_data_is_refused():
    with pytest.raises(ValueError, match="--data: expected at least one file"):
        build(Arguments(unloaded))
