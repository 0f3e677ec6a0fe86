"""How a discussion ends."""

from __future__ import annotations

import asyncio
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radar_core.discussion import Answer, ByLast, ByMajority, ByReference, Spoken


def decide(decision, *texts):
    last = [Spoken(f"agent{n}", 0, Answer(text)) for n, text in enumerate(texts)]

    async def nobody(agent, heard):
        raise AssertionError("nobody is to be asked")

    return asyncio.run(decision.decide(last, nobody))


def parse(text):
    found = re.search(r"answer (\w)", text)
    return found and found[1]


def test_the_majority_wins_and_what_cannot_be_parsed_is_counted():
    verdict = decide(ByMajority(parse), "hm", "answer A", "what", "so: answer B", "answer B", "eh")
    assert (verdict.answer, verdict.text) == ("B", "answer B")
    assert verdict.votes == {"B": 2, "A": 1} and verdict.unparsed == 3


def test_of_equally_frequent_answers_the_first_to_get_there_wins():
    votes = [f"answer {letter}" for letter in "ABBA"]
    assert decide(ByMajority(parse), *votes).answer == "B"
    assert decide(ByMajority(parse), *votes[:2]).answer == "A"


def test_what_cannot_be_parsed_never_wins():
    verdict = decide(ByMajority(parse), "hm", "hm", "hm")
    assert (verdict.answer, verdict.text, verdict.unparsed) == (None, None, 3)
    assert decide(ByMajority(parse), "hm", "hm", "answer C").answer == "C"


@pytest.mark.parametrize("parsed", [3, 1.5, float("nan"), True, ["a"], {"a": 1}, b"x"])
def test_what_parse_must_not_return_is_named_at_the_first_reply(parsed):
    seen = []

    def parse(text):
        seen.append(text)
        return parsed if text == "second" else None

    kind = type(parsed).__name__
    with pytest.raises(TypeError, match=rf"\({kind}\) for what agent1 said \('second'\)") as caught:
        decide(ByMajority(parse), "first", "second", "third")
    assert f"parse returned {parsed!r}" in str(caught.value) and seen == ["first", "second"]


def test_decisions_are_refused_for_what_they_cannot_use():
    with pytest.raises(ValueError, match=r"parse is 'answer'; expected a function"):
        ByMajority("answer")
    with pytest.raises(ValueError, match="must hold Agent objects"):
        ByReference("decider")


@settings(deadline=None)
@given(st.text("ABC?", min_size=1, max_size=12))
def test_the_winner_has_the_most_votes_and_had_them_first(votes):
    verdict = decide(ByMajority(lambda text: None if text == "?" else text), *votes)
    counts = {letter: votes.count(letter) for letter in votes if letter != "?"}
    assert verdict.votes == counts and verdict.unparsed == votes.count("?")
    if not counts:
        assert verdict.answer is None
        return
    most = max(counts.values())
    reached = {
        letter: [place for place, vote in enumerate(votes) if vote == letter][most - 1]
        for letter, count in counts.items()
        if count == most
    }
    assert verdict.answer == min(reached, key=reached.get)


def test_the_last_word_counts():
    verdict = decide(ByLast(), "first", "second")
    assert (verdict.answer, verdict.text, verdict.spoken) == ("second", "second", None)
