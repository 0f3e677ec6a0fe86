"""Which of a layer's heads this process holds where a model is split over several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from radar_core.methods.method import LayerPlan


class Shards:
    """How tensor parallelism splits heads: every rank holds as many, in their order.

    Args:
        mesh: the one-dimensional device mesh of the ranks.
    """

    def __init__(self, mesh: Any) -> None:
        self.rank: int = mesh.get_local_rank()
        self.size: int = mesh.size()
        self._group = mesh.get_group()

    def own(self, plan: LayerPlan, heads: int) -> LayerPlan:
        """Return a plan of all heads cut to the `heads` of this rank."""

        def cut(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[self.rank * heads :][:heads]

        return replace(
            plan,
            bias=cut(plan.bias),
            target_mass=cut(plan.target_mass),
            left_alone=cut(plan.left_alone),
        )

    def gathered(self, measured: Tensor) -> Tensor:
        """Return what all ranks measured, [..., all heads] of [..., own heads]."""
        parts = [torch.empty_like(measured) for _ in range(self.size)]
        torch.distributed.all_gather(parts, measured.contiguous(), group=self._group)
        return torch.cat(parts, dim=-1)


def shards(model: Any) -> Shards | None:
    """Return how a model's heads are split over processes, None where they are not."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None or (getattr(model, "tp_size", None) or 1) == 1:
        return None
    return Shards(mesh if mesh.ndim == 1 else mesh["tp"])
