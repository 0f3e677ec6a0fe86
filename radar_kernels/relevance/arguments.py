"""What every implementation of the relevance operators is called with, after validation."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RelevanceArguments:
    """One validated call of ``relevance_scores`` or ``select_relevant``.

    Args:
        sentences: ``[S, d]``, floating or int8.
        queries: ``[Q, d]``, dtype of ``sentences``; float32 for int8 sentences.
        sender: int64 ``[S]``, in 0..A - 1.
        round: int64 ``[S]``.
        hops: int64 ``[Q, A]``, -1 = unreachable.
        now: int64 ``[Q]``.
        spatial_decay: in (0, 1].
        temporal_decay: in (0, 1].
        self_policy: "clamp", "literal" or "exclude".
        threshold: None or the least score selected; not used by ``relevance_scores``.
        top_k: None or how many are selected at most per query, at least 1.
        scales: float32 ``[S]`` for int8 sentences, otherwise None.
    """

    sentences: Tensor
    queries: Tensor
    sender: Tensor
    round: Tensor
    hops: Tensor
    now: Tensor
    spatial_decay: float
    temporal_decay: float
    self_policy: str
    threshold: float | None = None
    top_k: int | None = None
    scales: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where every tensor of the call lies."""
        return self.sentences.device
