"""What every implementation of the logit operators is called with, after validation."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class BlendArguments:
    """One validated call of ``blend_logits``.

    Args:
        full: ``[B, V]``, floating.
        masked: ``[B, V]``, floating.
        strength: float32 ``[B]``.
        modulated: whether the adjustment is weighted by the token's probability.
    """

    full: Tensor
    masked: Tensor
    strength: Tensor
    modulated: bool

    @property
    def device(self) -> torch.device:
        """Where every tensor of the call lies."""
        return self.full.device


@dataclass(frozen=True, slots=True, eq=False)
class SampleArguments:
    """One validated call of ``sample_logits``.

    Args:
        full: ``[B, V]``, floating.
        masked: None or ``[B, V]``, floating.
        strength: float32 ``[B]``.
        temperature: float32 ``[B]``, at least 0; 0 takes the largest.
        top_k: None or int64 ``[B]``, 0 = off.
        top_p: None or float32 ``[B]`` in [0, 1], 1 = off.
        min_p: None or float32 ``[B]`` in [0, 1], 0 = off.
        seed: int64 ``[B]``.
        offset: int64 ``[B]``.
        nan: "ignore" or "raise"; the latter has been seen to already.
    """

    full: Tensor
    masked: Tensor | None
    strength: Tensor
    temperature: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    seed: Tensor
    offset: Tensor
    nan: str = "ignore"

    @property
    def device(self) -> torch.device:
        """Where every tensor of the call lies."""
        return self.full.device
