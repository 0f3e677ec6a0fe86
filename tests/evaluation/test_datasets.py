"""Loaders: each format gives the same items; what is wrong in a file is said with its place."""

import json
import sys

import pytest

from radar_core.evaluation.datasets import (
    load_choices,
    load_conflicts,
    load_problems,
    load_questions,
    load_talks,
)
from radar_core.evaluation.items import Paragraph

PARAGRAPHS = [
    {"title": "Lake", "sentences": ["It is deep.", " It is cold."], "supporting": [1]},
    {"title": "Hill", "sentences": ["It is high."], "supporting": []},
]


def write(folder, records, name="data.jsonl"):
    path = folder / name
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return path


def hotpot(**changes):
    return {"id": "q1", "question": "How is the lake?", "answer": "cold"} | changes


GOOD = json.dumps(hotpot(paragraphs=PARAGRAPHS))


def test_hotpotqa_in_its_three_layouts(tmp_path):
    own = load_questions(write(tmp_path, [hotpot(paragraphs=PARAGRAPHS)]))
    context = [["Lake", ["It is deep.", " It is cold."]], ["Hill", ["It is high."]]]
    record = hotpot(context=context, supporting_facts=[["Lake", 1], ["Lake", 7]])
    record["_id"] = record.pop("id")
    path = tmp_path / "hotpot_dev.json"
    path.write_text(json.dumps([record]))
    public = load_questions(path)
    hub = hotpot(
        context={"title": ["Lake", "Hill"], "sentences": [c[1] for c in context]},
        supporting_facts={"title": ["Lake"], "sent_id": [1]},
    )
    assert own == public == load_questions(write(tmp_path, [hub], "hub.jsonl"))
    assert own[0].dataset == "hotpotqa" and own[0].answers == ("cold",)
    assert own[0].paragraphs[0] == Paragraph("Lake", ("It is deep.", " It is cold."), (1,))


def test_musique_marks_whole_paragraphs(tmp_path):
    public = {"title": "Lake", "paragraph_text": "It is deep. It is cold.", "is_supporting": True}
    own = {"title": "Lake", "text": "It is deep. It is cold.", "supporting": True}
    first, second = (
        load_questions(write(tmp_path, [hotpot(paragraphs=[p], **{name: ["chilly"]})], file))[0]
        for p, name, file in ((public, "answer_aliases", "a.jsonl"), (own, "aliases", "b.jsonl"))
    )
    assert first == second and first.dataset == "musique"
    assert first.answers == ("cold", "chilly")
    assert first.paragraphs == (Paragraph("Lake", ("It is deep.", "It is cold."), (0, 1)),)


def test_2wiki_takes_the_answer_out_of_the_reasoning(tmp_path):
    record = hotpot(paragraphs=[{"title": "Lake", "text": "It is deep."}])
    del record["answer"]
    record["reasoned_answer"] = "The first answer is: no. So the answer is: Mr. X."
    question = load_questions(write(tmp_path, [record]))[0]
    assert question.dataset == "2wiki" and question.answers == ("Mr. X",)
    record["reasoned_answer"] = "Nobody knows."
    with pytest.raises(ValueError, match=r"data.jsonl:?.*reasoned_answer must end in"):
        load_questions(write(tmp_path, [record]))
    public = hotpot(context=[["Lake", ["Deep."]]], supporting_facts=[], evidences=[])
    assert load_questions(write(tmp_path, [public]))[0].dataset == "2wiki"
    assert load_questions(write(tmp_path, [public]), "hotpotqa")[0].dataset == "hotpotqa"


def test_problems(tmp_path):
    records = [
        {"problem": "1+1?", "solution": "...", "answer": "2", "subject": "Algebra", "level": 4},
        {"problem": "2+2?", "answer": "4", "type": "Algebra", "level": "Level 5", "unique_id": "x"},
    ]
    first, second = load_problems(write(tmp_path, records))
    assert (first.id, first.subject, first.level) == ("math-0", "Algebra", 4)
    assert (second.id, second.subject, second.level) == ("x", "Algebra", 5)


def test_options_that_are_none_are_left_out(tmp_path):
    record = {"question_id": 7, "question": "?", "options": ["N/A", "b", "c"], "answer": "C"}
    only = load_choices(write(tmp_path, [record]))[0]
    assert (only.id, only.options, only.answer) == ("7", ("b", "c"), "B")
    record["answer"] = "D"
    with pytest.raises(ValueError, match="one of 3 options: 'D'"):
        load_choices(write(tmp_path, [record]))


def test_conflicts_and_talks(tmp_path):
    record = {
        "prompt": "Redefine: A. A",
        "base_prompt": "A",
        "subject": "s",
        "context_answer": " x",
        "memorised_answer": " y",
    }
    conflict = load_conflicts(write(tmp_path, [record]))[0]
    assert (conflict.id, conflict.context_answer) == ("conflict-0", " x")
    own = {
        "id": "t",
        "question": "?",
        "answer": "8",
        "mistake_agent": "b",
        "mistake_step": "1",
        "messages": [{"sender": "a", "turn": 0, "text": "hi"}, {"sender": "b", "text": "no"}],
    }
    history = [{"role": "user", "name": "a", "content": "hi"}, {"role": "b", "content": "no"}]
    public = {k: v for k, v in own.items() if k not in ("id", "messages", "answer")}
    public |= {"question_ID": "t", "ground_truth": 8, "history": history}
    one, other = load_talks(write(tmp_path, [own]))[0], load_talks(write(tmp_path, [public]))[0]
    assert one.transcript.messages == other.transcript.messages
    assert (one.answer, one.mistake_step) == (other.answer, other.mistake_step) == ("8", 1)
    with pytest.raises(ValueError, match="mistake_step is 2, but there are 2 messages"):
        load_talks(write(tmp_path, [own | {"mistake_step": 2}]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GOOD + "\n{oops\n", r"data.jsonl:2: not JSON"),
        (GOOD + "\n[1]\n", r"data.jsonl:2: expected a JSON object, got list"),
        ('{"question": "?"}\n{"question": "?"}', r":1: the field 'paragraphs' is missing"),
        ("", "holds no items"),
        (json.dumps(hotpot(paragraphs=[])), "paragraphs must be a list of at least one"),
        (
            "\n".join([json.dumps(hotpot(paragraphs=PARAGRAPHS))] * 2),
            "'q1' occurs twice, before at .*:1",
        ),
        (
            json.dumps(hotpot(paragraphs=[PARAGRAPHS[0] | {"supporting": [2]}])),
            "'Lake' has 2 sentences; supporting names 2",
        ),
    ],
)
def test_unusable_files(tmp_path, text, words):
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        load_questions(path)


def test_a_path_never_asks_the_hub(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    assert load_questions(write(tmp_path, [hotpot(paragraphs=PARAGRAPHS)]))
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        load_questions(tmp_path / "absent.jsonl")
    with pytest.raises(ImportError, match="pip install datasets"):
        load_questions("hotpotqa/hotpot_qa")
