"""How sure a difference is: intervals by the bootstrap, paired tests, ranking measures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = [
    "Interval",
    "Paired",
    "Welch",
    "area_under_curve",
    "cohen_kappa",
    "mean_interval",
    "paired",
    "precision_at",
    "recall_at",
    "welch",
]

RESAMPLES = 10_000
Numbers = Sequence[float] | np.ndarray
Labels = Sequence[bool] | np.ndarray
_BLOCK = 2_000_000  # numbers drawn at a time


@dataclass(frozen=True)
class Interval:
    """A mean and how sure it is.

    Args:
        mean: of the values.
        low: lower end of the 95 % interval.
        high: its upper end.
        error: standard error of the mean; 0 for a single value.
        n: how many values.
    """

    mean: float
    low: float
    high: float
    error: float
    n: int


@dataclass(frozen=True)
class Paired:
    """A difference between two ways of doing the same items.

    Args:
        difference: of the first minus the second, item by item.
        p_value: chance of a mean difference as large if the signs were random.
        n: how many items.
    """

    difference: Interval
    p_value: float
    n: int


@dataclass(frozen=True)
class Welch:
    """A comparison of two independent samples of unequal variance.

    Args:
        statistic: Welch's t.
        p_value: two-sided.
    """

    statistic: float
    p_value: float


def mean_interval(values: Numbers, seed: int = 0) -> Interval:
    """Give a mean its 95 % interval: the percentiles of the means of 10,000 resamples.

    Args:
        values: at least one number.
        seed: of the resamples.

    Returns:
        The mean with its interval.

    Raises:
        ValueError: there is no value, or one is no finite number.
    """
    numbers = _finite("values", values)
    n = len(numbers)
    draw = np.random.default_rng(seed)
    rows = max(1, _BLOCK // n)
    means = np.concatenate(
        [
            numbers[draw.integers(0, n, (min(rows, RESAMPLES - done), n))].mean(axis=1)
            for done in range(0, RESAMPLES, rows)
        ]
    )
    mean = float(numbers.mean())
    low, high = np.percentile(means, [2.5, 97.5])
    error = float(numbers.std(ddof=1) / math.sqrt(n)) if n > 1 else 0.0
    # Rounding of the resampled means must not put the mean itself outside.
    return Interval(mean, min(float(low), mean), max(float(high), mean), error, n)


def paired(first: Numbers, second: Numbers, seed: int = 0) -> Paired:
    """Compare two ways of doing the same items by a sign-flip permutation test.

    Args:
        first: one number an item.
        second: one number an item, in the same order.
        seed: of the draws; up to 13 items all signs are tried instead.

    Returns:
        The mean of first - second with its interval, and the two-sided p value.

    Raises:
        ValueError: the two differ in length, or as in `mean_interval`.
    """
    one, other = _finite("first", first), _finite("second", second)
    if len(one) != len(other):
        raise ValueError(
            f"first has {len(one)} values and second {len(other)}; pairs need as many of both"
        )
    differences = one - other
    n = len(differences)
    if 2**n <= RESAMPLES:
        signs = 1 - 2 * (np.arange(2**n)[:, None] >> np.arange(n) & 1)
        as_far = _as_far(signs, differences)
        p_value = as_far / 2**n
    else:
        draw = np.random.default_rng(seed)
        rows = max(1, _BLOCK // n)
        as_far = 0
        for done in range(0, RESAMPLES, rows):
            size = (min(rows, RESAMPLES - done), n)
            as_far += _as_far(1 - 2 * draw.integers(0, 2, size, dtype=np.int8), differences)
        p_value = (as_far + 1) / (RESAMPLES + 1)  # the observed signs are one of them
    return Paired(mean_interval(differences.tolist(), seed), p_value, n)


def _as_far(signs: Any, differences: Any) -> int:
    """How many rows of signs give a sum at least as far from 0 as the one observed."""
    observed = abs(float(differences.sum()))
    slack = 1e-9 * float(np.abs(differences).sum())
    return int((np.abs(signs @ differences) >= observed - slack).sum())


def welch(first: Numbers, second: Numbers) -> Welch:
    """Compare the means of two independent samples by Welch's t.

    Args:
        first: at least two numbers.
        second: at least two numbers.

    Returns:
        The statistic and its p value; two samples without any spread give p 1 if they are equal
        and 0 if not.

    Raises:
        ValueError: a sample is too small, or a value is no finite number.
        ImportError: if scipy is not installed.
    """
    one, other = _finite("first", first), _finite("second", second)
    if min(len(one), len(other)) < 2:
        raise ValueError("Welch's t needs at least two values in each sample")
    if one.std() == 0 and other.std() == 0:
        difference = float(one[0] - other[0])
        return Welch(
            math.copysign(math.inf, difference) if difference else 0.0, float(not difference)
        )
    from scipy.stats import ttest_ind

    found = ttest_ind(one, other, equal_var=False)
    return Welch(float(found.statistic), float(found.pvalue))


def cohen_kappa(first: Sequence[Any], second: Sequence[Any]) -> float:
    """Measure how far two judges agree beyond chance: (p_o - p_e) / (1 - p_e).

    Args:
        first: one label an item.
        second: one label an item, in the same order.

    Returns:
        1 for full agreement, 0 for chance; 1 if both give one and the same label throughout.

    Raises:
        ValueError: there is no item, or the two differ in length.
    """
    if len(first) != len(second) or not len(first):
        raise ValueError(f"expected as many labels of both, got {len(first)} and {len(second)}")
    n = len(first)
    agreed = sum(a == b for a, b in zip(first, second, strict=True)) / n
    labels = {*first, *second}
    chance = sum(list(first).count(x) * list(second).count(x) for x in labels) / n**2
    return 1.0 if chance == 1 else (agreed - chance) / (1 - chance)


def area_under_curve(scores: Numbers, labels: Labels) -> float:
    """Measure how well scores tell two kinds apart: the share of pairs in the right order.

    Args:
        scores: one number an item.
        labels: which items are of the kind that should score more.

    Returns:
        0 to 1; equal scores count half.

    Raises:
        ValueError: there is only one kind, the two differ in length, or a score is not finite.
    """
    numbers, positive = _labelled(scores, labels)
    if positive.all() or not positive.any():
        raise ValueError("labels must hold both kinds")
    order = np.sort(numbers[~positive])
    below = np.searchsorted(order, numbers[positive], side="left")
    upto = np.searchsorted(order, numbers[positive], side="right")
    return float((below + upto).sum() / (2 * len(order) * positive.sum()))


def recall_at(scores: Numbers, labels: Labels, k: int) -> float:
    """Measure how many of the wanted items are among the k best; equals in their order.

    Args:
        scores: one number an item.
        labels: which items are wanted; at least one.
        k: how many are taken, at least 1.

    Returns:
        0 to 1.

    Raises:
        ValueError: nothing is wanted, or as in `area_under_curve`.
    """
    hits, positive = _hits(scores, labels, k)
    if not positive.any():
        raise ValueError("labels marks nothing as wanted")
    return hits / int(positive.sum())


def precision_at(scores: Numbers, labels: Labels, k: int) -> float:
    """Measure how many of the k best items are wanted; equals in their order.

    Args:
        scores: one number an item.
        labels: which items are wanted.
        k: how many are taken, at least 1; no more than there are.

    Returns:
        0 to 1.

    Raises:
        ValueError: as in `area_under_curve`.
    """
    hits, positive = _hits(scores, labels, k)
    return hits / min(k, len(positive))


def _hits(scores: Numbers, labels: Labels, k: int) -> tuple[int, Any]:
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    numbers, positive = _labelled(scores, labels)
    best = np.argsort(-numbers, kind="stable")[:k]
    return int(positive[best].sum()), positive


def _labelled(scores: Numbers, labels: Labels) -> tuple[Any, Any]:
    numbers = _finite("scores", scores)
    positive = np.asarray(labels, dtype=bool)
    if positive.shape != numbers.shape:
        raise ValueError(
            f"{len(numbers)} scores, but {positive.size} labels; expected one for each"
        )
    return numbers, positive


def _finite(name: str, values: Numbers) -> Any:
    try:
        numbers = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be numbers, got {values!r:.80}") from None
    if numbers.ndim != 1 or not len(numbers):
        raise ValueError(f"{name} must be a list of at least one number")
    if not np.isfinite(numbers).all():
        place = int(np.flatnonzero(~np.isfinite(numbers))[0])
        raise ValueError(f"{name}[{place}] is {values[place]!r}; leave out what was not measured")
    return numbers
