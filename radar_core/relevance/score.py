"""Similarity times decay, and what of it is enough: shared by all selectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from radar_core.checks import is_number

__all__ = ["Decay", "ScoredSentence", "SelfPolicy", "choose", "decayed_cosines"]

SelfPolicy = Literal["clamp", "literal", "exclude"]
_POLICIES = ("clamp", "literal", "exclude")


class ScoredSentence(NamedTuple):
    """A sentence of the transcript and how much it matters for a query.

    A tuple, since thousands are made for every selection and nothing else is made as fast.

    Args:
        text: the sentence.
        sender: name of the agent that wrote it.
        round: the round it was written in.
        message_index: index of its message in the transcript.
        start: first character in that message's text.
        end: one past its last character there.
        similarity: to the query, as the selector compares them, -1 to 1.
        spatial: decay factor for the hops from sender to receiver.
        temporal: decay factor for the rounds that have passed.
        score: similarity * spatial * temporal.
        selected: whether it was chosen.
        lacked: how much score it lacked to be chosen; 0 if it was chosen.
    """

    text: str
    sender: str
    round: int
    message_index: int
    start: int
    end: int
    similarity: float = 0.0
    spatial: float = 1.0
    temporal: float = 1.0
    score: float = 0.0
    selected: bool = False
    lacked: float = 0.0

    @property
    def cosine(self) -> float:
        """The similarity under the name that it has with a dense selector, where it is a cosine."""
        return self.similarity


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
            if not is_number(value) or not 0 < value <= 1:
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


def decayed_cosines(
    sentences: Sequence[ScoredSentence],
    embeddings: np.ndarray,
    query: np.ndarray,
    hops: Mapping[str, int],
    now: int,
    decay: Decay,
) -> np.ndarray:
    """Compute cosine times decays in one pass over the embeddings, by `relevance_scores`.

    Args:
        sentences: whose sender and round count.
        embeddings: float32 [number of sentences, d], C-contiguous, rows of length 1.
        query: float32 [d], of length 1.
        hops: from every sender to the receiver, -1 if unreachable.
        now: round of the receiver.
        decay: how relevance falls.

    Returns:
        float32 [number of sentences]; -inf where `Decay.factors` is None.
    """
    import torch

    from radar_kernels import relevance_scores

    column = {sender: place for place, sender in enumerate(hops)}
    return relevance_scores(
        torch.from_numpy(embeddings),
        torch.from_numpy(query[None]),
        torch.tensor([column[sentence.sender] for sentence in sentences], dtype=torch.int64),
        torch.tensor([sentence.round for sentence in sentences], dtype=torch.int64),
        torch.tensor([list(hops.values())]),
        torch.tensor([now]),
        spatial_decay=decay.spatial_decay,
        temporal_decay=decay.temporal_decay,
        self_policy=decay.self_policy,
    )[0].numpy()


def choose(
    scores: np.ndarray, threshold: float | None, top_k: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Choose what scores enough.

    Args:
        scores: [n], finite.
        threshold: least score to be chosen; None for no limit.
        top_k: the most to choose, best first (the earlier of equals); None for all.

    Returns:
        bool [n], what is chosen, and float64 [n], how much score the others lacked; 0 for chosen.
    """
    scores = scores.astype(np.float64)  # a threshold is compared as it was given
    limit = -float("inf") if threshold is None else threshold
    best = np.argsort(-scores, kind="stable")
    enough = best[scores[best] >= limit][:top_k]
    if len(enough) == top_k:
        limit = scores[enough[-1]]  # the one to beat
    selected = np.zeros(len(scores), bool)
    selected[enough] = True
    return selected, np.where(selected, 0.0, limit - scores)
