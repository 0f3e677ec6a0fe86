"""What all methods with a second branch share: its strength, its guard and the blend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from radar_core.checks import is_number
from radar_core.methods.guard import Guard, as_guard
from radar_core.methods.method import LARGEST, LayerPlan, Method
from radar_kernels import blend_logits


@dataclass(frozen=True, repr=False)
class TwoBranch(Method):
    """Move the logits away from those of a second branch; `SPA` and `SecondPrompt` derive from it.

    Args:
        strength: number from -1000 to 1000, or one for each prompt (a sequence, or a tensor or
            array of them). 1 is off (no second branch runs), above 1 moves away from the second
            branch, 0 is the second branch, below 0 goes beyond it.
        guard: leave tokens alone of which the unsteered model is sure: a probability such as 0.9,
            or a `Guard`; None for never.

    Raises:
        ValueError: `strength` or `guard` is nothing of the kind.

    Formula: `strength * logits(first) + (1 - strength) * logits(second)`.
    """

    strength: float | Sequence[float] = 1.4
    guard: Guard | float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        value = self.strength
        if hasattr(value, "tolist"):  # a tensor or an array
            value = value.tolist()
            object.__setattr__(self, "strength", value)
        values = value if isinstance(value, Sequence) else [value]
        if not values or not all(is_number(v) and abs(v) <= LARGEST for v in values):
            raise ValueError(
                f"strength is {self.strength!r}; expected a number from -{LARGEST:g} to "
                f"{LARGEST:g}, such as 1.4, or one for each prompt"
            )
        object.__setattr__(self, "guard", as_guard(self.guard))

    def strengths(self) -> list[float]:
        """Return the strength of every row, or a single one for all rows."""
        if isinstance(self.strength, int | float):
            return [self.strength]
        return list(self.strength)

    @property
    def is_identity(self) -> bool:
        return all(value == 1 for value in self.strengths())

    @property
    def needs_anchors(self) -> bool:
        """Whether nothing is steered without anchors."""
        return True

    @property
    def needs_logits(self) -> bool:
        """Whether logits must be blended, where hidden states would not give the same."""
        return self.guard is not None

    def layer_plan(self, layer: int, num_layers: int, num_heads: int) -> LayerPlan | None:
        # Every layer of both branches runs Radar's attention; hiding is the mask's work.
        return LayerPlan()

    def blend(self, first: Tensor, second: Tensor, strength: Tensor) -> Tensor:
        """Blend the logits of both branches.

        Args:
            first: [B, V].
            second: [B, V].
            strength: float32 [B].

        Returns:
            float32 [B, V].
        """
        return self.guarded(first, blend_logits(first, second, strength))

    def guarded(self, first: Tensor, blended: Tensor) -> Tensor:
        """Return blended logits [B, V], or those of the first branch where the guard says so."""
        assert not isinstance(self.guard, int | float)
        return blended if self.guard is None else self.guard.choose(first, blended)


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
