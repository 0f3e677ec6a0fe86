"""What every selector is given and what it returns: similarities, before any decay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from radar_core.anchors import Anchor
from radar_core.relevance.score import ScoredSentence

__all__ = ["Reading", "Selector"]


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
