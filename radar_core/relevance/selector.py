"""What every selector is given and what it returns: similarities, before any decay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from radar_core.anchors import Anchor
from radar_core.relevance.score import ScoredSentence

__all__ = ["Reading", "Selector", "compared", "first_cache"]


@dataclass(frozen=True)
class Reading:
    """What a receiver reads: its whole prompt, and where the sentences and the query lie in it.

    Args:
        sentences: the sentences that may be chosen, in the transcript's order; only their text,
            sender, round and place are set.
        query: what the receiver has to do.
        messages: the chat messages of the receiver's prompt, nothing cut.
        places: for each sentence its span in `messages`.
        query_place: the query's span in `messages`.
        titles: a title for each sentence's message, such as its sender's name.
    """

    sentences: Sequence[ScoredSentence]
    query: str
    messages: Sequence[Mapping[str, str]]
    places: Sequence[Anchor]
    query_place: Anchor
    titles: Sequence[str]

    def texts(self, title: bool = False) -> list[str]:
        """Return the sentences as texts, if asked with their titles in front, "title: sentence"."""
        if not title:
            return [sentence.text for sentence in self.sentences]
        pairs = zip(self.titles, self.sentences, strict=True)
        return [f"{name}: {sentence.text}" for name, sentence in pairs]


@runtime_checkable
class Selector(Protocol):
    """Tells how much each sentence has to do with the query; decays and limits come after it.

    A selector may have an attribute `language`, an ISO 639-1 code: messages are then cut into
    sentences by its rules instead of English ones.
    """

    def similarities(self, reading: Reading) -> np.ndarray:
        """Compare every sentence with the query.

        Args:
            reading: the prompt with its sentences and its query.

        Returns:
            float32 [number of sentences], finite, at most 1 in size: 1 for the closest there can
            be, 0 for nothing in common.
        """
        ...


def compared(selector: Selector, reading: Reading) -> np.ndarray:
    """Ask a selector that another one is made of.

    Args:
        selector: the selector.
        reading: what it is to compare.

    Returns:
        float64 [number of sentences], its similarities.

    Raises:
        ValueError: it returns anything else than a finite number a sentence.
    """
    found = np.asarray(selector.similarities(reading), np.float64)
    count = len(reading.sentences)
    if found.shape != (count,) or not np.isfinite(found).all():
        raise ValueError(
            f"{selector!r} must return {count} finite similarities, one a sentence, got shape "
            f"{found.shape}"
        )
    return found


def first_cache(
    selectors: Iterable[Any], input_ids: Sequence[int], model: Any = None, most: int | None = None
) -> Any:
    """Return the cache of the first selector that has read a prompt; see `Attention.cache_for`.

    Args:
        selectors: selectors, of which most read nothing.
        input_ids: the tokens of the prompt.
        model: the model that will go on from it; None is the one that has read.
        most: the most tokens that it may hold.

    Returns:
        The cache, or None if no selector has one.
    """
    for selector in selectors:
        if hasattr(selector, "cache_for"):
            cache = selector.cache_for(input_ids, model=model, most=most)
            if cache is not None:
                return cache
    return None
