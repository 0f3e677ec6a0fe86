"""Give the anchors a chosen share of the attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from radar_core.checks import is_number
from radar_core.methods.method import (
    Heads,
    LayerPlan,
    Layers,
    Method,
    Queries,
    check_heads,
    check_indices,
    check_queries,
    chosen_heads,
)

# The smallest normal number of float32, and from where on it rounds to 1.
LEAST, BELOW_ONE = 2.0**-126, 1 - 2.0**-25


@dataclass(frozen=True, repr=False)
class TargetMass(Method):
    """Bias anchored keys so that they receive the share `mass` of each query's attention.

    Args:
        mass: share in (0, 1), both excluded in float32 too.
        mode: "at_least" raises the share where it is lower and leaves the rest alone; "exact" also
            lowers it. Queries that see no anchor, or only anchors, are left alone.
        heads: as in `AttentionBias`.
        layers: as in `AttentionBias`.
        queries: as in `AttentionBias`.

    Raises:
        ValueError: `mass` lies outside (0, 1), or another argument is malformed.

    Formula: `b = logit(mass) - logit(m)` on anchored keys, m the share before steering, for each
    query and head. Source: SpotLight (arXiv 2505.12025), whose `log(tau / m)` never reaches tau.
    """

    mass: float = 0.2
    mode: Literal["at_least", "exact"] = "at_least"
    heads: Heads = None
    layers: Layers = None
    queries: Queries = "all"

    def __post_init__(self) -> None:
        if not is_number(self.mass) or not LEAST <= self.mass < BELOW_ONE:
            raise ValueError(f"mass is {self.mass!r}; expected a share in (0, 1), such as 0.2")
        if self.mode not in ("at_least", "exact"):
            raise ValueError(f'mode is {self.mode!r}; expected "at_least" or "exact"')
        check_heads(self.heads)
        check_indices("layers", self.layers)
        check_queries(self.queries)

    def layer_plan(self, layer: int, num_layers: int, num_heads: int) -> LayerPlan | None:
        chosen = chosen_heads(self.heads, self.layers, layer, num_layers, num_heads)
        if chosen is None:
            return None
        if self.mode == "exact":
            target = torch.full((num_heads,), self.mass)
            left_alone = None if bool(chosen.all()) else ~chosen
            return LayerPlan(
                target_mass=target, exact=True, left_alone=left_alone, queries=self.queries
            )
        # A share is never below the smallest float, so such a target raises nothing.
        return LayerPlan(target_mass=torch.where(chosen, self.mass, LEAST), queries=self.queries)
