"""Counting tokens and cutting texts by them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radar_core.policies.dacs.tokens import EstimatedTokenizer, TokenCounter, largest
from tests.policies.dacs.support import Characters, Parity, Words

TOKENIZERS = [Words(), Characters(), Parity(), EstimatedTokenizer(3)]


@settings(deadline=None)
@given(st.text(max_size=60), st.integers(0, 30), st.sampled_from(TOKENIZERS))
def test_a_beginning_fits_and_is_a_beginning(text, tokens, tokenizer):
    counter = TokenCounter(tokenizer)
    cut = counter.beginning(text, tokens)
    assert text.startswith(cut)
    assert counter.count(cut) <= tokens
    if counter.count(text) <= tokens:
        assert cut == text


@given(st.text(max_size=60), st.integers(0, 60))
def test_a_beginning_is_the_longest_there_is(text, tokens):
    assert TokenCounter(Characters()).beginning(text, tokens) == text[:tokens]


@given(st.integers(0, 200), st.integers(-1, 250))
def test_largest_bisects(most, limit):
    found = largest(most, lambda number: number <= limit)
    assert found == (None if limit < 0 else min(most, limit))


def test_special_tokens_are_not_counted(smollm2):
    counter = TokenCounter(smollm2.tokenizer)
    assert counter.count("") == 0
    assert counter.count("Hello there") == len(smollm2.tokenizer.tokenize("Hello there")) == 2


class AddsSpecial:
    def encode(self, text, add_special_tokens=True):
        return [0] * add_special_tokens + text.split()


def test_a_tokenizer_that_adds_special_tokens_is_told_not_to():
    assert TokenCounter(AddsSpecial()).count("one two") == 2


def test_an_estimate_counts_started_groups_of_characters():
    counter = TokenCounter(EstimatedTokenizer())
    assert [counter.count("x" * length) for length in (0, 1, 4, 5)] == [0, 1, 1, 2]
    with pytest.raises(ValueError, match="at least 1"):
        EstimatedTokenizer(0)


def test_something_without_encode_is_refused():
    with pytest.raises(ValueError, match="EstimatedTokenizer"):
        TokenCounter("gpt2")
