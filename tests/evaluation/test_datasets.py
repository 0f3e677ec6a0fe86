"""Loaders: each format gives the same items; what is wrong in a file is said with its place."""

import json
import sys

import pytest

from radar_core.evaluation.datasets import (
    first_fields,
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
CONTEXT = hotpot(
    context=[["Lake", ["It is deep.", " It is cold."]]], supporting_facts=[["Lake", 1]]
)
PROBLEM = {"problem": "1+1?", "answer": "2", "subject": "Algebra", "level": 4}
CHOICE = {"question": "?", "options": ["a", "b", "c"], "answer": "B", "category": "law"}
CONFLICT = {
    "prompt": "Redefine: A. A",
    "base_prompt": "A",
    "subject": "s",
    "context_answer": " x",
    "memorised_answer": " y",
}
TALK = {
    "question": "?",
    "answer": "8",
    "mistake_agent": "b",
    "mistake_step": 1,
    "messages": [{"sender": "a", "text": "hi"}, {"sender": "b", "text": "no"}],
}


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
    record["reasoned_answer"] = "So the answer is: "
    with pytest.raises(
        ValueError, match=r"data.jsonl:1: reasoned_answer must end in .* got ...'So"
    ):
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


def paragraph(**changes):
    return {"paragraphs": [PARAGRAPHS[0] | changes]}


MARKED = "must be true, false or a list of places of sentences, got"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"question": ""}, "question must be text that is not blank, got ''"),
        ({"question": 5}, "question must be text that is not blank, got 5"),
        ({"question": "\ud800"}, "question holds half a surrogate pair at character 0"),
        ({"answer": " "}, "answer must be text that is not blank or a number, got ' '"),
        ({"answer": None}, "answer must be text that is not blank or a number, got None"),
        ({"answer": float("nan")}, "answer must be text that is not blank or a number, got nan"),
        ({"answer": True}, "answer must be text that is not blank or a number, got True"),
        ({"id": ["x"]}, r"id must be text that is not blank or a number, got \['x'\]"),
        ({"aliases": "NYC"}, "aliases must be a list, got 'NYC'"),
        ({"aliases": {}}, "aliases must be a list, got {}"),
        ({"answer_aliases": "NYC"}, "answer_aliases must be a list, got 'NYC'"),
        ({"aliases": ["x", None]}, r"aliases\[1\] must be text that is not blank or a .* got None"),
        ({"aliases": [""]}, r"aliases\[0\] must be text that is not blank or a number, got ''"),
        ({"paragraphs": "Lake"}, "paragraphs must be a list of at least one, got 'Lake'"),
        ({"paragraphs": ["Lake"]}, r"paragraphs\[0\]: expected a JSON object, got 'Lake'"),
        (
            {"paragraphs": [{"title": "Lake"}]},
            r"paragraphs\[0\]: the field 'sentences' or .*; got t",
        ),
        (
            {"paragraphs": [{"text": ""}]},
            r"paragraphs\[0\]: text must be text that is not b.* got ''",
        ),
        ({"paragraphs": [{"text": ["x"]}]}, r"paragraphs\[0\]: text must be .* got \['x'\]"),
        (paragraph(title=["x"]), r"paragraphs\[0\]: title must be text, got \['x'\]"),
        (paragraph(sentences="Deep."), r"paragraphs\[0\]: sentences must be a list, got 'Deep.'"),
        (paragraph(sentences=None), r"paragraphs\[0\]: sentences must be a list, got None"),
        (paragraph(sentences=[None]), r"sentences\[0\] must be text, got None"),
        (paragraph(sentences=["x", 1]), r"sentences\[1\] must be text, got 1"),
        (paragraph(sentences=["\udc00"]), r"sentences\[0\] holds half a surrogate pair"),
        (paragraph(supporting="false"), f"supporting {MARKED} 'false'"),
        (paragraph(supporting=1), f"supporting {MARKED} 1"),
        (paragraph(supporting=[True]), "'Lake' has 2 sentences; supporting names True"),
        (paragraph(supporting=[-1]), "'Lake' has 2 sentences; supporting names -1"),
    ],
)
def test_unusable_questions(tmp_path, changes, words):
    path = write(tmp_path, [hotpot(paragraphs=PARAGRAPHS), hotpot(paragraphs=PARAGRAPHS) | changes])
    with pytest.raises(ValueError, match=rf"data\.jsonl:2: .*{words}"):
        load_questions(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"context": 5}, "context must be a list, got 5"),
        ({"context": []}, "context holds no paragraphs"),
        ({"context": ["Lake"]}, r"context\[0\] must be a list of title and sentences, got 'Lake'"),
        (
            {"context": [{"title": "Lake", "sentences": []}]},
            r"context\[0\] must be a list of title",
        ),
        ({"context": [["Lake", ["x"], 1]]}, r"context\[0\] must be a list of title and sentences"),
        ({"context": [["Lake", "It."]]}, r"sentences of context\[0\] must be a list, got 'It.'"),
        ({"context": [["Lake", [None]]]}, r"sentences of context\[0\]\[0\] must be text, got None"),
        ({"context": [[1, ["x"]]]}, r"title of context\[0\] must be text, got 1"),
        (
            {"context": {"title": ["Lake"]}},
            "the field 'sentences' or 'content' is missing; got title",
        ),
        (
            {"context": {"title": ["Lake"], "content": []}},
            "context must have two lists of the same length, got 1 and 0",
        ),
        ({"supporting_facts": "Lake"}, "supporting_facts must be a list, got 'Lake'"),
        (
            {"supporting_facts": [["Lake"]]},
            r"supporting_facts\[0\] must be a list of title and sent_id",
        ),
        (
            {"supporting_facts": [[None, 0]]},
            r"title of supporting_facts\[0\] must be text, got None",
        ),
        (
            {"supporting_facts": [["Lake", -1]]},
            r"sent_id of supporting_facts\[0\] must be .* got -1",
        ),
        ({"supporting_facts": [["Lake", "x"]]}, r"sent_id of supporting_facts\[0\] .* got 'x'"),
        ({"supporting_facts": [["Lake", 1.0]]}, r"sent_id of supporting_facts\[0\] .* got 1.0"),
    ],
)
def test_unusable_contexts(tmp_path, changes, words):
    path = tmp_path / "dev.json"
    path.write_text(json.dumps([CONTEXT | {"id": "q0"}, CONTEXT | changes]))
    with pytest.raises(ValueError, match=rf"dev\.json, item 1: .*{words}"):
        load_questions(path)


@pytest.mark.parametrize(
    ("load", "good", "changes", "words"),
    [
        *(
            (load_problems, PROBLEM, {name: ""}, f"{name} must be")
            for name in ("problem", "answer")
        ),
        (load_problems, PROBLEM, {"subject": 3}, "subject must be text, got 3"),
        (load_problems, PROBLEM, {"level": [1, 2]}, r"level must be a whole .* got \[1, 2\]"),
        (load_problems, PROBLEM, {"level": 2.5}, "level must be a whole number .* got 2.5"),
        (load_problems, PROBLEM, {"level": "hard"}, "level must be a whole number .* got 'hard'"),
        (load_problems, PROBLEM, {"level": True}, "level must be a whole number .* got True"),
        *(
            (load_choices, CHOICE, {"answer": letters}, f".*one of 3 options: '{letters}'")
            for letters in ("", "AB", "BC", "ABC", "b", "1")
        ),
        (load_choices, CHOICE, {"answer": None}, "answer must be text or a number, got None"),
        (load_choices, CHOICE, {"question": ""}, "question must be text that is not blank"),
        (load_choices, CHOICE, {"options": "abc"}, "options must be a list of at least one"),
        (load_choices, CHOICE, {"options": ["a", None]}, r"options\[1\] must be text .* got None"),
        (load_choices, CHOICE, {"options": ["x"] * 11}, "options must be at most 10, got 11"),
        *((load_conflicts, CONFLICT, {name: " "}, f"{name} must be") for name in CONFLICT),
        *(
            (load_talks, TALK, {name: ""}, f"{name} must be text")
            for name in ("question", "answer")
        ),
        (load_talks, TALK, {"mistake_step": 1.9}, "mistake_step must be a whole number .* got 1.9"),
        (load_talks, TALK, {"mistake_step": "x"}, "mistake_step must be a whole number .* got 'x'"),
        (
            load_talks,
            TALK,
            {"mistake_step": "-1"},
            "mistake_step must be a .* at least 0, got '-1'",
        ),
        (load_talks, TALK, {"mistake_agent": "c"}, "mistake_agent must be one of a, b; got 'c'"),
        (load_talks, TALK, {"messages": {"a": 1}}, "messages must be a list of at least one"),
        (load_talks, TALK, {"messages": []}, "messages must be a list of at least one"),
        (
            load_talks,
            TALK,
            {"messages": ["hi"]},
            r"messages\[0\]: expected a JSON object, got 'hi'",
        ),
        (load_talks, TALK, {"messages": [{"text": ""}]}, r"messages\[0\]: the field 'sender' or"),
        (
            load_talks,
            TALK,
            {"messages": [{"role": "a", "content": None}]},
            r"messages\[0\]: content must be text, got None",
        ),
    ],
)
def test_other_unusable_items(tmp_path, load, good, changes, words):
    assert len(load(write(tmp_path, [good]))) == 1
    with pytest.raises(ValueError, match=rf"data\.jsonl:1: {words}"):
        load(write(tmp_path, [good | changes]))


def test_what_only_looks_unusable_is_taken(tmp_path):
    gaps = hotpot(paragraphs=[{"sentences": ["", " "], "title": None, "supporting": None}])
    taken = load_questions(
        write(tmp_path, [gaps | {"aliases": None, "context": None, "answer": 7}])
    )
    assert taken[0].paragraphs == (Paragraph("", ("", " ")),) and taken[0].answers == ("7",)
    wide = CONTEXT | {"supporting_facts": [["Hill", 0], ["Lake", 9], ["Lake", 0]]}
    assert load_questions(write(tmp_path, [wide]))[0].paragraphs[0].supporting == (0,)
    unknown = [PROBLEM | {"level": level} for level in ("Level ?", None, "", " level 3")]
    assert [problem.level for problem in load_problems(write(tmp_path, unknown))] == [0, 0, 0, 3]
    ten = CHOICE | {"options": ["N/A", *"bcdefghij"], "answer": "J"}
    assert load_choices(write(tmp_path, [ten]))[0].answer == "I"
    said = [{"role": "Boss (-> Worker)", "content": ""}, {"role": "Worker", "content": "done"}]
    talk = TALK | {"messages": said, "mistake_agent": "boss", "mistake_step": " 1 "}
    assert load_talks(write(tmp_path, [talk]))[0].mistake_agent == "boss"
    talk["mistake_agent"] = "boss (-> worker)"
    assert load_talks(write(tmp_path, [talk]))[0].mistake_agent == "boss (-> worker)"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[\n" + GOOD + ",\n{oops}\n]", r":3: not JSON: Expecting property name .* at column 2$"),
        ("[\n" + GOOD + "\n]\n]", r":4: not JSON: Extra data at column 1$"),
        ('{\n "question": "?",\n oops}', r":3: not JSON: Expecting property name .* at column 2$"),
        ("\n\n{oops}", r":3: not JSON: Expecting property name .* at column 2$"),
        ("{" + GOOD + "\n" + GOOD, r":1: not JSON: .* at column 2$"),
        (GOOD[:-1] + "\n" + GOOD, r":1: not JSON: Expecting ',' delimiter at column"),
        (GOOD + "\n" + GOOD[:20], r":2: not JSON: Unterminated string starting at column 14$"),
        ("\n\n" + json.dumps(hotpot()), r":3: the field 'paragraphs' is missing"),
        (json.dumps([hotpot()]), r", item 0: the field 'paragraphs' is missing"),
        (GOOD + "\n" + "[" * 100_000, r":2: not JSON that can be read: it is nested too deeply"),
        ("[" * 100_000, r": not JSON that can be read: it is nested too deeply"),
        (b'{"question": "?"}\n\xff', r":2: not UTF-8: invalid start byte, 0xff; save it as UTF-8$"),
        (b"[\n\n\xe9]", r":3: not UTF-8: .*, 0xe9; save it as UTF-8$"),
    ],
)
def test_broken_files_are_told_with_their_line(tmp_path, content, words):
    path = tmp_path / "data.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=rf"data\.json{words}"):
        load_questions(path)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(PROBLEM) + "\n" + json.dumps(CHOICE),
        json.dumps([PROBLEM], indent=1),
        json.dumps(PROBLEM, indent=1),
        json.dumps({"data": [PROBLEM]}),
        "\ufeff\n" + json.dumps(PROBLEM),
    ],
)
def test_the_fields_of_the_first_item_are_told_in_every_layout(tmp_path, text):
    path = tmp_path / "data.json"
    path.write_text(text, encoding="utf-8")
    assert first_fields(path) == {"problem", "answer", "subject", "level"}
    path.write_text("")
    with pytest.raises(ValueError, match="holds no items"):
        first_fields(path)


def test_a_path_never_asks_the_hub(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    assert load_questions(write(tmp_path, [hotpot(paragraphs=PARAGRAPHS)]))
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        load_questions(tmp_path / "absent.jsonl")
    with pytest.raises(ImportError, match="pip install datasets"):
        load_questions("hotpotqa/hotpot_qa")
