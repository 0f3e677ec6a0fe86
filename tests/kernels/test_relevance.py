"""Relevance scores and selections against the float64 oracle."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radar_kernels import relevance_scores, select_relevant
from radar_kernels.relevance import reference
from radar_kernels.testing import assert_within, relevance_oracle

BUDGET = 2e-6


def inputs(sentences=40, queries=3, agents=5, size=12, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    return (
        torch.randn(sentences, size, generator=generator),
        torch.randn(queries, size, generator=generator),
        integers(0, agents, sentences),
        integers(0, 6, sentences),
        integers(-1, 5, queries, agents),
        integers(0, 8, queries),
    )


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(reference, "_SENTENCES", 7)


@pytest.mark.parametrize("policy", ["clamp", "literal", "exclude"])
@pytest.mark.parametrize("decays", [(0.92, 0.92), (0.5, 1.0), (1.0, 0.3)], ids=str)
def test_scores_equal_the_oracle(policy, decays):
    call = inputs()
    features = {
        "spatial_decay": decays[0],
        "temporal_decay": decays[1],
        "self_policy": policy,
    }
    scores = relevance_scores(*call, **features)
    expected = relevance_oracle(*call, **features)
    assert scores.dtype == torch.float32
    # Literal exponents, down to -1 and -6 here, scale up the rounding of the cosine.
    boost = decays[0] ** -1 * decays[1] ** -6 if policy == "literal" else 1
    assert_within(scores, expected, BUDGET * boost)


def test_what_the_formula_says_about_one_sentence():
    sentence, query = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0]])

    def score(hops, age, policy="clamp"):
        return float(
            relevance_scores(
                sentence,
                query,
                torch.tensor([0]),
                torch.tensor([10 - age]),
                torch.tensor([[hops]]),
                torch.tensor([10]),
                spatial_decay=0.5,
                temporal_decay=0.9,
                self_policy=policy,
            )
        )

    assert score(1, 1) == pytest.approx(0.6)
    assert score(3, 1) == pytest.approx(0.6 * 0.25)
    assert score(1, 4) == pytest.approx(0.6 * 0.9**3)
    assert score(0, 0) == score(0, 1) == score(1, 0) == score(1, -5) == pytest.approx(0.6)
    assert score(0, 1, "literal") == pytest.approx(0.6 / 0.5)
    assert score(1, 0, "literal") == pytest.approx(0.6 / 0.9)
    assert score(0, 1, "exclude") == score(1, 0, "exclude") == -math.inf
    assert score(1, 1, "exclude") == pytest.approx(0.6)
    for policy in ("clamp", "literal", "exclude"):
        assert score(-1, 1, policy) == -math.inf


def test_embeddings_of_any_length_and_none():
    sentences, queries, *others = inputs()
    sentences[4] = 0
    scaled = sentences * torch.linspace(1e-3, 1e3, 40)[:, None]
    scores = relevance_scores(scaled, 7 * queries, *others)
    expected = relevance_oracle(sentences, queries, *others)
    assert_within(scores, expected, 4 * BUDGET)
    scored = scores[:, 4]
    assert (scored[scored.isfinite()] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes_are_taken_as_stored(dtype):
    sentences, queries, *others = inputs()
    sentences, queries = sentences.to(dtype), queries.to(dtype)
    expected = relevance_oracle(sentences, queries, *others)
    assert_within(relevance_scores(sentences, queries, *others), expected, BUDGET)


def selected(call, **features):
    selection = select_relevant(*call, **features)
    bounds = selection.offsets.tolist()
    assert bounds[0] == 0 and bounds[-1] == len(selection.indices) == len(selection.scores)
    return [
        (selection.indices[start:stop].tolist(), selection.scores[start:stop])
        for start, stop in pairwise(bounds)
    ]


@settings(max_examples=50, deadline=None)
@given(
    sentences=st.integers(0, 40),
    queries=st.integers(0, 4),
    seed=st.integers(0, 999),
    threshold=st.one_of(st.none(), st.floats(-0.5, 0.9)),
    top_k=st.one_of(st.none(), st.integers(1, 50)),
    policy=st.sampled_from(["clamp", "literal", "exclude"]),
)
def test_a_selection_is_what_the_scores_say(sentences, queries, seed, threshold, top_k, policy):
    call = inputs(sentences, queries, seed=seed)
    scores = relevance_scores(*call, self_policy=policy)
    chosen = selected(call, self_policy=policy, threshold=threshold, top_k=top_k)
    assert len(chosen) == queries
    for query in range(queries):
        least = -math.inf if threshold is None else threshold
        passing = [
            (-float(scores[query, place]), place)
            for place in range(sentences)
            if scores[query, place] > -math.inf and scores[query, place] >= least
        ]
        expected = sorted(place for _, place in sorted(passing)[:top_k])
        assert chosen[query][0] == expected
        torch.testing.assert_close(chosen[query][1], scores[query, expected])


def test_a_score_at_the_threshold_is_selected():
    sentences = torch.tensor([[1.0, 0.0], [0.5, 1.0], [1.0, 0.0]])
    call = (
        sentences,
        torch.tensor([[2.0, 0.0]]),
        torch.tensor([0, 0, 0]),
        torch.tensor([0, 0, 0]),
        torch.tensor([[1]]),
        torch.tensor([1]),
    )
    assert selected(call, threshold=1.0)[0][0] == [0, 2]
    # Of equals the earlier sentence wins.
    assert selected(call, threshold=None, top_k=1)[0][0] == [0]
    assert selected(call, threshold=1.1)[0][0] == []


def test_equals_in_different_chunks_keep_their_order():
    call = list(inputs(sentences=30, queries=1))
    call[0] = call[0][:1].expand(30, -1)
    call[2], call[3] = torch.zeros(30, dtype=torch.int64), torch.zeros(30, dtype=torch.int64)
    call[4], call[5] = torch.ones(1, 5, dtype=torch.int64), torch.tensor([2])
    assert selected(tuple(call), threshold=None, top_k=9)[0][0] == list(range(9))


def test_nothing_materialises_all_scores(monkeypatch):
    seen = []
    real = reference._scores

    def watched(arguments, query, start, stop):
        seen.append(stop - start)
        return real(arguments, query, start, stop)

    monkeypatch.setattr(reference, "_scores", watched)
    select_relevant(*inputs(), threshold=None, top_k=3, backend="reference")
    assert max(seen) == 7 and sum(seen) == 40


BAD = {
    "sentences": (0, torch.zeros(40), "sentences"),
    "size": (1, torch.zeros(3, 11), "queries"),
    "sender": (2, torch.zeros(39, dtype=torch.int64), "sender"),
    "unknown sender": (2, torch.full((40,), 5), "sender holds 5 to 5"),
    "float round": (3, torch.zeros(40), "round"),
    "hops": (4, torch.zeros(2, 5, dtype=torch.int64), "hops"),
    "now": (5, torch.zeros(4, dtype=torch.int64), "now"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_tensors_raise_naming_the_argument(name):
    place, bad, match = BAD[name]
    call = list(inputs())
    call[place] = bad
    for operator in (relevance_scores, select_relevant):
        with pytest.raises(ValueError, match=match):
            operator(*call)


@pytest.mark.parametrize(
    "features",
    [
        {"spatial_decay": 0.0},
        {"temporal_decay": 1.1},
        {"self_policy": "boost"},
        {"threshold": math.nan},
        {"top_k": 0},
    ],
    ids=str,
)
def test_bad_parameters_raise_naming_the_argument(features):
    with pytest.raises(ValueError, match=next(iter(features))):
        select_relevant(*inputs(), **features)
