"""Selective prompt anchoring: two branches, one of which cannot see the anchors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from radar_core.methods.method import LARGEST, LayerPlan, Method


@dataclass(frozen=True)
class SPA(Method):
    """Move the logits away from what the model would say without seeing the anchors.

    Args:
        strength: number from -1000 to 1000, or one for each prompt (a sequence, or a tensor or
            array of them). 1 is off (no second branch runs), above 1 emphasises the anchors, 0
            ignores them, below 0 reverses them. All anchors of a prompt share it: a token is
            hidden from the second branch or not.

    Raises:
        ValueError: `strength` is no such number, or empty.

    Formula: `strength * logits(full) + (1 - strength) * logits(anchors hidden)`; positions of
    hidden tokens are kept. Source: Tian and Zhang, ICML 2025 (arXiv 2408.09121). Equal to
    classifier-free guidance with `guidance_scale = strength` and the masked prompt as the
    unconditional one.
    """

    strength: float | Sequence[float] = 1.4

    def __post_init__(self) -> None:
        value = self.strength
        if hasattr(value, "tolist"):  # a tensor or an array
            value = value.tolist()
            object.__setattr__(self, "strength", value)
        values = value if isinstance(value, Sequence) else [value]
        if not values or not all(isinstance(v, int | float) and abs(v) <= LARGEST for v in values):
            raise ValueError(
                f"strength is {self.strength!r}; expected a number from -{LARGEST:g} to "
                f"{LARGEST:g}, such as 1.4, or one for each prompt"
            )

    def strengths(self) -> list[float]:
        """Return the strength of every row, or a single one for all rows."""
        if isinstance(self.strength, int | float):
            return [self.strength]
        return list(self.strength)

    @property
    def is_identity(self) -> bool:
        return all(value == 1 for value in self.strengths())

    def layer_plan(self, layer: int, num_layers: int, num_heads: int) -> LayerPlan | None:
        # Every layer of both branches runs Radar's attention; hiding is the mask's work.
        return LayerPlan()


def blend_rows(rows: Tensor, strength: Tensor) -> Tensor:
    """Blend the two halves of a batch: `strength * rows[:B] + (1 - strength) * rows[B:]`.

    Args:
        rows: [2B, ...], the full branch first; computed in float32, returned in its dtype.
        strength: float32 [B].

    Returns:
        [B, ...] in the dtype of `rows`.
    """
    full, hidden = rows.float().chunk(2)
    weight = strength.view(-1, *[1] * (rows.dim() - 1))
    return torch.lerp(hidden, full, weight.to(full.dtype)).to(rows.dtype)
