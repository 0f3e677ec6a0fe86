"""Statistics against brute force, scipy and known cases."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from radar_core.evaluation.statistics import (
    area_under_curve,
    cohen_kappa,
    mean_interval,
    paired,
    precision_at,
    recall_at,
    welch,
)

NUMBERS = st.lists(st.floats(-100, 100), min_size=1, max_size=30)
SCORED = st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=12)


@settings(max_examples=30, deadline=None)
@given(NUMBERS)
def test_an_interval_holds_its_mean(values):
    found = mean_interval(values)
    assert found.low <= found.mean <= found.high
    assert found.n == len(values) and found == mean_interval(values)
    assert min(values) - 1e-9 <= found.low and found.high <= max(values) + 1e-9


def test_an_interval_is_that_of_scipy():
    values = np.random.default_rng(1).normal(size=40)
    found = mean_interval(values.tolist(), seed=3)
    other = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=20_000, rng=5)
    assert found.low == pytest.approx(other.confidence_interval.low, abs=0.02)
    assert found.high == pytest.approx(other.confidence_interval.high, abs=0.02)
    assert found.error == pytest.approx(stats.sem(values))


def test_intervals_hold_the_truth_as_often_as_they_say():
    draw = np.random.default_rng(0)
    samples = draw.exponential(size=(200, 40))
    inside = [(i := mean_interval(sample.tolist())).low <= 1 <= i.high for sample in samples]
    assert 0.87 <= np.mean(inside) <= 0.98


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-5, 5), min_size=1, max_size=8))
def test_all_signs_are_tried_where_they_are_few(differences):
    observed = abs(sum(differences))
    flips = itertools.product((1, -1), repeat=len(differences))
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in flips]
    expected = sum(value >= observed for value in sums) / len(sums)
    assert paired(differences, [0] * len(differences)).p_value == pytest.approx(expected)


def test_a_clear_difference_is_found_and_none_where_there_is_none():
    draw = np.random.default_rng(2)
    base, noise = draw.normal(size=50), draw.normal(size=50) * 0.1
    found = paired((base + 0.2 + noise).tolist(), base.tolist())
    assert found.p_value < 0.001 and found.difference.low > 0.1
    none = [paired(draw.normal(size=20).tolist(), [0.0] * 20, seed=i).p_value for i in range(40)]
    assert 0.2 < np.mean(none) < 0.8


def test_welch_is_that_of_scipy():
    one, other = [1.0, 2.0, 4.0, 4.5], [2.0, 2.5, 9.0]
    expected = stats.ttest_ind(one, other, equal_var=False)
    found = welch(one, other)
    assert (found.statistic, found.p_value) == pytest.approx((expected.statistic, expected.pvalue))
    assert welch([1, 1], [1, 1]).p_value == 1
    assert welch([2, 2], [1, 1]).p_value == 0 and welch([2, 2], [1, 1]).statistic == math.inf


def test_kappa():
    assert cohen_kappa("aabb", "aabb") == 1 and cohen_kappa("aa", "aa") == 1
    assert cohen_kappa("abab", "aabb") == 0
    # 20 yes-yes, 5 yes-no, 10 no-yes, 15 no-no: the worked example of the literature.
    first = "y" * 25 + "n" * 25
    second = "y" * 20 + "n" * 5 + "y" * 10 + "n" * 15
    assert cohen_kappa(first, second) == pytest.approx(0.4)


@settings(max_examples=200, deadline=None)
@given(SCORED)
def test_ranking_measures_are_those_counted_by_hand(scored):
    scores, labels = [score for score, _ in scored], [label for _, label in scored]
    wanted = [score for score, label in scored if label]
    rest = [score for score, label in scored if not label]
    if wanted and rest:
        pairs = [1.0 if a > b else 0.5 if a == b else 0.0 for a in wanted for b in rest]
        assert area_under_curve(scores, labels) == pytest.approx(sum(pairs) / len(pairs))
    else:
        with pytest.raises(ValueError, match="both kinds"):
            area_under_curve(scores, labels)
    best = sorted(range(len(scored)), key=lambda i: (-scores[i], i))
    for k in (1, 3, 50):
        hits = sum(labels[i] for i in best[:k])
        assert precision_at(scores, labels, k) == pytest.approx(hits / min(k, len(scored)))
        if wanted:
            assert recall_at(scores, labels, k) == pytest.approx(hits / len(wanted))


@pytest.mark.parametrize("values", [[], [math.nan], [1.0, math.inf], [None], ["x"], [[1.0]]])
def test_what_is_no_number_is_refused(values):
    with pytest.raises(ValueError, match="values"):
        mean_interval(values)


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="first has 2 values and second 1"):
        paired([1, 2], [1])
    with pytest.raises(ValueError, match="2 scores, but 1 labels"):
        recall_at([1, 2], [True], 1)
    with pytest.raises(ValueError, match="marks nothing"):
        recall_at([1, 2], [False, False], 1)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        precision_at([1], [True], 0)
