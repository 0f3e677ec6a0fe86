"""Similarity times decay, and what of it is enough: shared by all selectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

__all__ = ["Decay", "ScoredSentence", "SelfPolicy", "score_sentences", "select_sentences"]

SelfPolicy = Literal["clamp", "literal", "exclude"]
_POLICIES = ("clamp", "literal", "exclude")


@dataclass(frozen=True)
class ScoredSentence:
    """A sentence of the transcript and how much it matters for a query.

    Args:
        text: the sentence.
        sender: name of the agent that wrote it.
        round: the round it was written in.
        message_index: index of its message in the transcript.
        start: first character in that message's text.
        end: one past its last character there.
        cosine: similarity to the query, -1 to 1.
        spatial: decay factor for the hops from sender to receiver.
        temporal: decay factor for the rounds that have passed.
        score: cosine * spatial * temporal.
        selected: whether it was chosen.
        lacked: how much score it lacked to be chosen; 0 if it was chosen.
    """

    text: str
    sender: str
    round: int
    message_index: int
    start: int
    end: int
    cosine: float = 0.0
    spatial: float = 1.0
    temporal: float = 1.0
    score: float = 0.0
    selected: bool = False
    lacked: float = 0.0


@dataclass(frozen=True)
class Decay:
    """How relevance falls with distance and age.

    A sentence of agent j, written in round tau and read by agent i in round t, counts
    `spatial_decay ** (hops(j, i) - 1) * temporal_decay ** (t - tau - 1)` times its cosine
    (Agent-Radar, arXiv 2605.30136, section 3.1).

    Args:
        spatial_decay: factor per hop beyond the first, in (0, 1]; 1 switches it off.
        temporal_decay: factor per round beyond the last one, in (0, 1]; 1 switches it off.
        self_policy: what a negative exponent means (own sentences, 0 hops; sentences of the same
            round): "clamp" counts it as 0, "literal" follows the formula, which raises the score,
            "exclude" leaves such sentences out.

    Raises:
        ValueError: if a value is out of range.
    """

    spatial_decay: float = 0.92
    temporal_decay: float = 0.92
    self_policy: SelfPolicy = "clamp"

    def __post_init__(self) -> None:
        for name in ("spatial_decay", "temporal_decay"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value <= 1:
                raise ValueError(f"{name} must lie in (0, 1], got {value!r}")
        if self.self_policy not in _POLICIES:
            raise ValueError(
                f"self_policy must be one of {', '.join(_POLICIES)}, got {self.self_policy!r}"
            )

    def factors(self, hops: int, round: int, now: int) -> tuple[float, float] | None:
        """Compute the two decay factors.

        Args:
            hops: from sender to receiver, -1 if unreachable.
            round: in which the sentence was written.
            now: round of the receiver.

        Returns:
            (spatial, temporal), or None if the sentence must not be scored.
        """
        exponents = hops - 1, now - round - 1
        if hops < 0 or (self.self_policy == "exclude" and min(exponents) < 0):
            return None
        if self.self_policy != "literal":
            exponents = max(0, exponents[0]), max(0, exponents[1])
        return self.spatial_decay ** exponents[0], self.temporal_decay ** exponents[1]


def score_sentences(
    sentences: Sequence[ScoredSentence],
    embeddings: np.ndarray,
    query: np.ndarray,
    hops: Mapping[str, int],
    now: int,
    decay: Decay,
) -> list[ScoredSentence]:
    """Score sentences for one query.

    Args:
        sentences: what to score; only text and place are read.
        embeddings: float32 [number of sentences, d], rows of length 1.
        query: float32 [d], of length 1.
        hops: from every sender to the receiver, -1 if unreachable.
        now: round of the receiver.
        decay: how relevance falls.

    Returns:
        The sentences with their scores, in order; without those that must not be scored.
    """
    import torch

    from radar_kernels import relevance_scores

    factors = [decay.factors(hops[item.sender], item.round, now) for item in sentences]
    kept = [place for place, pair in enumerate(factors) if pair is not None]
    if not kept:
        return []
    column = {sender: place for place, sender in enumerate(hops)}
    embeddings = np.ascontiguousarray(embeddings[kept])
    scores = relevance_scores(
        torch.from_numpy(embeddings),
        torch.from_numpy(query[None]),
        torch.tensor([column[sentences[place].sender] for place in kept]),
        torch.tensor([sentences[place].round for place in kept]),
        torch.tensor([list(hops.values())]),
        torch.tensor([now]),
        spatial_decay=decay.spatial_decay,
        temporal_decay=decay.temporal_decay,
        self_policy=decay.self_policy,
    )[0].tolist()
    cosines = (embeddings @ query).tolist()
    scored = []
    for place, cosine, score in zip(kept, cosines, scores, strict=True):
        pair = factors[place]
        assert pair is not None
        scored.append(
            replace(sentences[place], cosine=cosine, spatial=pair[0], temporal=pair[1], score=score)
        )
    return scored


def select_sentences(
    scored: Sequence[ScoredSentence], threshold: float | None, top_k: int | None
) -> list[ScoredSentence]:
    """Mark the sentences that score enough.

    Args:
        scored: scored sentences.
        threshold: least score to be chosen; None for no limit.
        top_k: the most sentences to choose, best first (the earlier of equals); None for all.

    Returns:
        The sentences in order, with `selected` and `lacked` set.
    """
    limit = -float("inf") if threshold is None else threshold
    best = sorted(range(len(scored)), key=lambda place: -scored[place].score)
    enough = [place for place in best if scored[place].score >= limit][:top_k]
    if len(enough) == top_k:
        limit = scored[enough[-1]].score  # the one to beat
    chosen = set(enough)
    return [
        replace(
            item,
            selected=place in chosen,
            lacked=0.0 if place in chosen else limit - item.score,
        )
        for place, item in enumerate(scored)
    ]
