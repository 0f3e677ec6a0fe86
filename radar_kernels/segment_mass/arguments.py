"""What every implementation of ``segment_mass`` is called with, after validation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from radar_kernels.anchor_attention.arguments import AnchorAttentionArguments


@dataclass(frozen=True, slots=True, eq=False)
class SegmentMassArguments:
    """One validated call of ``segment_mass``.

    Args:
        attention: the attention; its value is its key, and is not used.
        segments: int64 ``[B, k]``, in 0..num_segments - 1, or -1 for none.
        num_segments: number of segments.
    """

    attention: AnchorAttentionArguments
    segments: Tensor
    num_segments: int

    @property
    def device(self) -> torch.device:
        """Where every tensor of the call lies."""
        return self.attention.device
