"""Selection that follows what the best sentences mention."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from radar_core.checks import check_has, check_whole, is_number
from radar_core.relevance.selector import Reading, Selector, compared, first_cache

__all__ = ["Mentions"]

# What an encyclopedia adds to a title to tell namesakes apart.
_APPENDED = re.compile(r"\s*\([^()]*\)\s*$")


class Mentions:
    """Raises the sentences of those whom the best sentences mention.

    What answers a query is often two steps away from it: the sentence that is closest to it names
    somebody or something, and what is said there has little to do with the query's own words. So a
    sentence counts `(s + weight) / (1 + weight)` if one of the sentences with the largest
    similarities, under another title, holds its own title as whole words, and `s / (1 + weight)`
    otherwise, with s as the selector says. A title is the sender's name; upper and lower case do
    not matter, nor what stands in parentheses at a title's end.

    Args:
        selector: compares sentences with the query.
        best: how many sentences' mentions count.
        weight: what a mention is worth, above 0.

    Raises:
        ValueError: if a value is unusable.
    """

    def __init__(self, selector: Selector, best: int = 4, weight: float = 0.25) -> None:
        check_has("selector", selector, "similarities", "Dense(encoder) or Lexical()")
        check_whole("best", best, 1)
        if not is_number(weight) or not 0 < weight < float("inf"):
            raise ValueError(f"weight must be a finite number above 0, got {weight!r}")
        self.selector = selector
        self.best = best
        self.weight = float(weight)

    def __repr__(self) -> str:
        return f"Mentions({self.selector!r}, best={self.best}, weight={self.weight:g})"

    @property
    def language(self) -> str:
        """The selector's language, "en" if it has none."""
        return getattr(self.selector, "language", "en")

    def cache_for(
        self, input_ids: Sequence[int], *, model: Any = None, most: int | None = None
    ) -> Any:
        """Return the cache of the selector, if it has read this prompt; see `Attention`."""
        return first_cache([self.selector], input_ids, model, most)

    def similarities(self, reading: Reading) -> np.ndarray:
        """Compare every sentence with the query; see `Selector.similarities`."""
        found = compared(self.selector, reading)
        best = np.argsort(-found, kind="stable")[: self.best]
        sources = [(reading.titles[place], reading.sentences[place].text) for place in best]
        mentioned = {
            title: any(title != source and _names(title, text) for source, text in sources)
            for title in dict.fromkeys(reading.titles)
        }
        raised = np.array([mentioned[title] for title in reading.titles], dtype=np.float64)
        return ((found + self.weight * raised) / (1 + self.weight)).astype(np.float32)


def _names(title: str, text: str) -> bool:
    """Whether a text holds a title as whole words."""
    name = _APPENDED.sub("", title).strip()
    return bool(name) and bool(
        re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text, flags=re.IGNORECASE)
    )
