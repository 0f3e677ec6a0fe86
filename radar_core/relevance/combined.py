"""Combined selection: several selectors' similarities as one, whatever their scales."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from radar_core.checks import check_has, is_number
from radar_core.relevance.selector import Reading, Selector, compared, first_cache

__all__ = ["By", "Combined"]

By = Literal["rank", "value"]
_RANK_OFFSET = 60.0
_FAR = 3.0  # standard deviations


class Combined:
    """Compares a sentence with the query by the weighted mean of several selectors.

    The selectors' scales differ, so each one's similarities are first made comparable over the
    sentences of the reading:

    - "value": `tanh(z / 3)`, where z is how many standard deviations a similarity lies above the
      mean; 0 where all are equal. Keeps how far the best stand out.
    - "rank": `61 / (60 + rank)`, rank 1 for the best, equals sharing their mean rank: reciprocal
      rank fusion (Cormack, Clarke and Buettcher, SIGIR 2009) with the best at 1. Keeps the order
      alone.

    Either way the result says how a sentence stands among the others and not how close it is to the
    query, so `top_k` suits it better than a threshold.

    Args:
        selectors: selectors that count alike, pairs (selector, weight), or weights by selector;
            weights are above 0, and only their proportions count.
        by: "value" or "rank".

    Raises:
        ValueError: if there is no selector, or a value is unusable.
    """

    def __init__(
        self,
        selectors: Mapping[Selector, float] | Iterable[Selector | tuple[Selector, float]],
        by: By = "value",
    ) -> None:
        pairs = selectors.items() if isinstance(selectors, Mapping) else selectors
        self.selectors = tuple(_checked_pair(pair) for pair in pairs)
        if not self.selectors:
            raise ValueError("a combination needs at least one selector, got none")
        if by not in _SCALES:
            raise ValueError(f"by must be one of {', '.join(_SCALES)}, got {by!r}")
        self.by: By = by

    def __repr__(self) -> str:
        parts = ", ".join(f"({selector!r}, {weight:g})" for selector, weight in self.selectors)
        return f"Combined([{parts}], by={self.by!r})"

    @property
    def language(self) -> str:
        """The language of the first selector that has one, "en" if none has."""
        languages = (getattr(selector, "language", None) for selector, _ in self.selectors)
        return next((language for language in languages if language is not None), "en")

    def cache_for(
        self, input_ids: Sequence[int], *, model: Any = None, most: int | None = None
    ) -> Any:
        """Return the cache of the first selector that has read this prompt; see `Attention`."""
        return first_cache((one for one, _ in self.selectors), input_ids, model, most)

    def similarities(self, reading: Reading) -> np.ndarray:
        """Compute the weighted mean of the comparable similarities; see `Selector.similarities`."""
        total = sum(weight for _, weight in self.selectors)
        mean = np.zeros(len(reading.sentences))
        for selector, weight in self.selectors:
            mean += weight / total * _SCALES[self.by](compared(selector, reading))
        return mean.astype(np.float32)


def _standard(similarities: np.ndarray) -> np.ndarray:
    deviation = similarities.std() if similarities.size else 0.0
    # Equal numbers have a deviation of rounding's size, not always 0.
    if deviation <= 1e-7 * np.abs(similarities).max(initial=0.0):
        return np.zeros_like(similarities)
    return np.tanh((similarities - similarities.mean()) / deviation / _FAR)


def _reciprocal_rank(similarities: np.ndarray) -> np.ndarray:
    _, place, count = np.unique(-similarities, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    mean_rank = last - (count - 1) / 2
    return (1 + _RANK_OFFSET) / (mean_rank[place] + _RANK_OFFSET)


_SCALES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "value": _standard,
    "rank": _reciprocal_rank,
}


def _checked_pair(given: Selector | tuple[Selector, float]) -> tuple[Selector, float]:
    """Return a selector and its weight, 1 where there is none."""
    pair = given if isinstance(given, tuple | list) else (given, 1.0)
    if len(pair) != 2:
        raise ValueError(f"expected a selector or a pair (selector, weight), got {given!r}")
    selector, weight = pair
    check_has("a selector", selector, "similarities", "Dense(encoder) or Lexical()")
    if not is_number(weight) or not 0 < weight < float("inf"):
        raise ValueError(f"a selector's weight must be a finite number above 0, got {weight!r}")
    return selector, float(weight)
