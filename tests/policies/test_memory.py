"""What messages become in RCR-Router's shared memory."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radar_core.policies.memory import STRUCTURED_OUTPUT, cut, remember
from radar_core.policies.tokens import token_counter
from radar_core.relevance import sentence_spans
from radar_core.transcript import Message

COUNT = token_counter()


def pieces(text, item_tokens=64):
    return cut(text, COUNT, sentence_spans, item_tokens)


def texts(text, item_tokens=64):
    return [text[piece.start : piece.end] for piece in pieces(text, item_tokens)]


def kinds(text):
    return [piece.kind for piece in pieces(text)]


def memory(*said, roles=None):
    messages = [Message(sender, round, text) for sender, round, text in said]
    return remember(enumerate(messages), roles or {}, pieces, COUNT)


def test_sentences_go_together_up_to_the_limit_and_never_across_a_blank_line():
    text = "One two. Three four. Five six.\n\nSeven."
    assert texts(text) == ["One two. Three four. Five six.", "Seven."]
    assert texts(text, item_tokens=5) == ["One two. Three four.", "Five six.", "Seven."]
    long = "A sentence that alone is longer than the limit of five tokens."
    assert texts(f"One. {long} Two.", item_tokens=5) == ["One.", long, "Two."]


def test_labels_give_kind_name_and_confidence():
    text = (
        "Plan: look it up.\nThen compare.\n**Fact [Population of  LYON] (0.9)**: 520,000.\n"
        "- evidence: a census says so.\nANSWER:\n\n520,000\n\nThe rest has no label."
    )
    found = [(piece.kind, piece.name, piece.confidence) for piece in pieces(text)]
    assert found == [
        ("plan", None, 0.7),
        ("fact", "population of lyon", 0.9),
        ("evidence", None, 0.7),
        ("answer", None, 0.7),
        ("fact", None, 0.7),
    ]
    assert texts(text)[0] == "Plan: look it up.\nThen compare."
    assert texts(text)[3].endswith("520,000")


def test_a_number_in_brackets_is_a_citation_and_no_name():
    (piece,) = pieces("Evidence [2]: the census.")
    assert (piece.kind, piece.name) == ("evidence", None)


def test_a_label_in_the_middle_of_a_line_is_text():
    assert kinds("The old fact: it rains.") == ["fact"]
    assert kinds("My answer sheet is here.") == ["fact"]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Thus the answer is 42.", "answer"),
        ("We get \\boxed{42}.", "answer"),
        ("First, find the river.", "plan"),
        ("Step 2 is to add them.", "plan"),
        ("We should check both rivers.", "plan"),
        ("According to the census it is larger.", "evidence"),
        ('It says "the river Ohio flows there".', "evidence"),
        ("The passage names Oxford.", "evidence"),
        ("Oxford lies on the Thames.", "fact"),
    ],
)
def test_kinds_without_labels_are_told_by_signs(text, kind):
    assert kinds(text) == [kind]


def test_the_output_that_role_prompts_may_ask_for_is_understood():
    example = STRUCTURED_OUTPUT[STRUCTURED_OUTPUT.index("'Fact [") + 1 :].split("...'")[0]
    (piece,) = pieces(f"{example} about 520,000.")
    assert (piece.kind, piece.name, piece.confidence) == ("fact", "population of lyon", 0.8)


def test_a_newer_answer_of_the_same_agent_replaces_its_older_one_alone():
    items = memory(
        ("a", 0, "The answer is 4."), ("b", 0, "The answer is 5."), ("a", 1, "The answer is 5.")
    )
    assert [(item.sender, item.round, item.text) for item in items] == [
        ("b", 0, "The answer is 5."),
        ("a", 1, "The answer is 5."),
    ]


def test_a_new_plan_replaces_all_parts_of_the_old_one_if_it_says_that_it_is_a_plan():
    old = "Plan: " + " ".join(f"Do the thing number {place} with care." for place in range(20))
    assert len(memory(("a", 0, old))) > 1
    items = memory(("a", 0, old), ("b", 0, "Plan: rest."), ("a", 1, "Plan: stop."))
    assert [item.text for item in items] == ["Plan: rest.", "Plan: stop."]
    guessed = memory(("a", 0, "First, go."), ("a", 1, "First, stop."))
    assert len(guessed) == 2


def test_of_two_about_the_same_the_newer_stays_unless_the_older_is_surer():
    old = ("a", 0, "Fact [x] (0.8): one.")
    for sure, kept in ((0.9, "two."), (0.7, "two."), (0.69, "one.")):
        items = memory(old, ("b", 1, f"Fact [X] ({sure}): two."))
        assert [item.text.split()[-1] for item in items] == [kept]
    assert len(memory(old, ("b", 1, "Evidence [x]: two."))) == 2  # another kind, another key
    assert len(memory(old, ("b", 1, "Fact [y]: two."))) == 2


def test_a_name_in_brackets_is_never_taken_for_an_agent():
    items = memory(("a", 0, "Answer: one."), ("b", 1, "Answer [a]: two."))
    assert len(items) == 2


def test_items_know_where_they_are_from():
    text = "  Oxford lies on the Thames.\n\nPlan: check."
    (fact, plan) = memory(("a", 3, text), roles={"a": "Searcher"})
    assert (fact.sender, fact.role, fact.round, fact.stage) == ("a", "Searcher", 3, "search")
    assert fact.source == (0, 2, 28) and text[2:28] == fact.text
    assert fact.tokens == COUNT(fact.text) == 7
    assert (plan.kind, plan.stage, plan.key) == ("plan", "plan", ("plan", "a", ""))


@settings(deadline=None, max_examples=200)
@given(
    st.text(st.characters(codec="utf-8"), max_size=80)
    | st.text("aP:lan Fact[]().\n*é√", max_size=80)
)
def test_pieces_lie_in_order_without_blanks_around_and_are_there_unless_the_text_is_blank(text):
    found = pieces(text, item_tokens=4)
    assert bool(found) == bool(text.strip())
    last = 0
    for piece in found:
        assert last <= piece.start < piece.end <= len(text)
        assert text[piece.start : piece.end].strip() == text[piece.start : piece.end]
        last = piece.end


@pytest.mark.parametrize(
    "text",
    [" " * 100_000 + "x", "plan" + " " * 100_000 + "x", "*" * 100_000, '"' * 100_000, "“" * 10_000,
     "\n" * 100_000 + "x", "plan[" * 20_000, "plan [a](" * 10_000],
)  # fmt: skip
def test_odd_messages_take_no_time(text):
    begun = time.perf_counter()
    pieces(text)
    assert time.perf_counter() - begun < 2
