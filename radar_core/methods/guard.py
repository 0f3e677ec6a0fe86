"""Leaving alone the tokens of which the unsteered model is sure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from radar_core.checks import is_number


@dataclass(frozen=True)
class Guard:
    """Keep the unsteered logits of a token where steering would go against a sure model.

    Decided for each token and row on the device, without a read by the host. It saves no time: the
    second branch has run by then (the next token may need it), and unsteered logits are formed too.

    Args:
        confidence: in (0, 1]; a token is left alone where the unsteered model gives its first
            choice at least this probability. None for no such rule.
        plausibility: in (0, 1]; a token is left alone where the steered first choice has, in the
            unsteered model, less than this share of the probability of its own first choice (the
            rule of Directer, arXiv 2603.06745, with beta 0.5). None for no such rule.

    Raises:
        ValueError: a number lies outside (0, 1], or neither is given.
    """

    confidence: float | None = None
    plausibility: float | None = None

    def __post_init__(self) -> None:
        for name in ("confidence", "plausibility"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and 0 < value <= 1):
                raise ValueError(
                    f"{name} is {value!r}; expected a probability in (0, 1], such as 0.9"
                )
        if self.confidence is None and self.plausibility is None:
            raise ValueError("Guard has no rule; give it confidence= or plausibility=")

    def leaves_alone(self, full: Tensor, steered: Tensor) -> Tensor:
        """Return which rows keep the unsteered logits: bool [B, 1].

        Args:
            full: [B, V], the unsteered logits.
            steered: [B, V], the steered ones.
        """
        full = full.float()
        first = full.amax(-1, keepdim=True)
        alone = torch.zeros_like(first, dtype=torch.bool)
        if self.confidence is not None:
            alone |= first - full.logsumexp(-1, keepdim=True) >= math.log(self.confidence)
        if self.plausibility is not None:
            chosen = full.gather(-1, steered.argmax(-1, keepdim=True))
            alone |= chosen - first < math.log(self.plausibility)
        return alone

    def choose(self, full: Tensor, steered: Tensor) -> Tensor:
        """Return the steered logits, but `full` in the rows that are left alone: [B, V]."""
        return torch.where(self.leaves_alone(full, steered), full.to(steered.dtype), steered)


def as_guard(guard: Guard | float | None) -> Guard | None:
    """Return what was given as `guard=`; a number is a confidence.

    Raises:
        ValueError: it is neither a Guard, nor a number in (0, 1], nor None.
    """
    if guard is None or isinstance(guard, Guard):
        return guard
    if is_number(guard):
        return Guard(confidence=guard)
    raise ValueError(
        f"guard is {guard!r}; expected a confidence such as 0.9, Guard(plausibility=0.5) or None"
    )
