"""What every implementation of ``edit_keys`` is called with, after validation."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class KeyEditArguments:
    """One validated call of ``edit_keys``.

    Args:
        key: ``[B, Hkv, k, D]``, floating.
        anchors: bool ``[B, k]``.
        left: float32 ``[Hkv, D, r]``; the projection itself, with ``r = D``, where ``right`` is
            None.
        right: None or float32 ``[Hkv, r, D]``; the projection is ``left @ right``.
        gain: float32 ``[Hkv]``.
    """

    key: Tensor
    anchors: Tensor
    left: Tensor
    right: Tensor | None
    gain: Tensor

    @property
    def device(self) -> torch.device:
        """Where every tensor of the call lies."""
        return self.key.device
