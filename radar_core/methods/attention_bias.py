"""Additive attention bias on anchored keys, and the published methods that are instances of it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch

from radar_core.checks import is_number
from radar_core.methods.head_files import read_heads
from radar_core.methods.method import (
    LARGEST,
    Heads,
    LayerPlan,
    Layers,
    Method,
    Queries,
    check_flag,
    check_heads,
    check_indices,
    check_queries,
    chosen_heads,
    printed_as_called,
)


@dataclass(frozen=True, repr=False)
class AttentionBias(Method):
    """Add a bias to the attention logits of anchored keys: `s_ij + bias * anchor_j`.

    One operator for PASTA, InstABoost and GUIDE; costs nothing but one addition per anchored key.

    Args:
        bias: float in nats, -1000 to 1000; `bias = log(M)` multiplies the odds of an anchored key
            by M. 0 switches the method off. Several groups of anchors, or prompts, have biases of
            their own where the anchors hold factors instead of True: `bias * factor` each.
        heads: query heads to steer: None (all), a sequence, or a mapping from layer to heads.
        layers: layers to steer: None (all) or a sequence; negative indices count from the top.
        queries: "all" steers every token, "generated" only those that predict generated tokens
            (positions >= prompt length - 1), which leaves the prompt's own cache untouched.
        keep_generated: bias the keys of generated tokens too, so that only the rest of the prompt
            loses weight.

    Raises:
        ValueError: `bias` is no such number, or another argument is malformed.

    Source: Zhang et al., PASTA (arXiv 2311.02262), written as a bias.
    """

    bias: float = 2.0
    heads: Heads = None
    layers: Layers = None
    queries: Queries = "all"
    keep_generated: bool = False

    def __post_init__(self) -> None:
        if not is_number(self.bias) or not abs(self.bias) <= LARGEST:
            raise ValueError(
                f"bias is {self.bias!r}; expected a number from -{LARGEST:g} to {LARGEST:g}, such "
                "as 2.0. A bias for every prompt or group of anchors is given by float anchors, "
                "anchors * factor"
            )
        check_heads(self.heads)
        check_indices("layers", self.layers)
        check_queries(self.queries)
        check_flag("keep_generated", self.keep_generated)

    @property
    def is_identity(self) -> bool:
        return self.bias == 0

    def layer_plan(self, layer: int, num_layers: int, num_heads: int) -> LayerPlan | None:
        chosen = chosen_heads(self.heads, self.layers, layer, num_layers, num_heads)
        if chosen is None:
            return None
        return LayerPlan(bias=chosen.to(torch.float32) * self.bias, queries=self.queries)


@printed_as_called
def PASTA(
    alpha: float = 0.01,
    heads: Heads | str | os.PathLike[str] = None,
    layers: Layers = None,
    queries: Queries = "all",
    keep_generated: bool = False,
) -> AttentionBias:
    """Down-weight every key that is not anchored by `alpha`: a bias of `-log(alpha)`.

    Args:
        alpha: factor on the attention of keys that are not anchored, in (0, 1]; 1 is off. The
            paper's 0.01 (a bias of 4.6) is meant for few, profiled heads: on all heads it breaks
            small models, so begin with 0.3 there.
        heads: the profiled heads, usually a mapping from layer to heads, or the path of a published
            file of them: JSON such as `{"18": [23], "10": [12, 7]}`, or a list of layers.
        layers: as in `AttentionBias`.
        queries: as in `AttentionBias`.
        keep_generated: as in `AttentionBias`. True is what the released package does: generated
            tokens are not weighed down, only the prompt's.

    Returns:
        The equivalent `AttentionBias`, which prints as this call.

    Raises:
        ValueError: `alpha` lies outside (0, 1], or `heads` is no such file.

    Formula: `A'_j = A_j * alpha^[j not anchored] / C = softmax(s_j - log(alpha) * [j anchored])`.
    Several anchored spans count once each. In the released package they accumulate, so that with
    two every anchored token loses weight too, by `alpha`, against what is generated.
    Source: Zhang et al., ICLR 2024 (arXiv 2311.02262).
    """
    if not is_number(alpha) or not 0 < alpha <= 1:
        raise ValueError(f"alpha is {alpha!r}; expected a number in (0, 1], such as 0.01")
    if isinstance(heads, str | os.PathLike):
        path, (heads, listed) = heads, read_heads(heads)
        if listed is not None and layers is not None:
            raise ValueError(
                f"layers is {list(layers)}, but heads is {str(path)!r}, which lists layers itself: "
                f"{list(listed)}; leave one of them out"
            )
        layers = layers if listed is None else listed
    return AttentionBias(-math.log(alpha), heads, layers, queries, keep_generated)


@printed_as_called
def InstABoost(
    multiplier: float = 3.0,
    heads: Heads = None,
    layers: Layers = None,
    queries: Queries = "all",
) -> AttentionBias:
    """Multiply the attention on anchored keys by `multiplier` and renormalise: a bias of its log.

    Args:
        multiplier: factor > 0 on the anchored keys' attention weights; 1 is off.
        heads: as in `AttentionBias`.
        layers: as in `AttentionBias`.
        queries: as in `AttentionBias`.

    Returns:
        The equivalent `AttentionBias`, which prints as this call.

    Raises:
        ValueError: `multiplier` is not a positive number.

    Source: InstABoost (arXiv 2506.13734); there the anchors are the instruction.
    """
    if not is_number(multiplier) or not 0 < multiplier < math.inf:
        raise ValueError(f"multiplier is {multiplier!r}; expected a number above 0, such as 3.0")
    return AttentionBias(math.log(multiplier), heads, layers, queries)


@printed_as_called
def GUIDE(
    delta: float = 2.0,
    heads: Heads = None,
    layers: Layers = None,
    queries: Queries = "all",
) -> AttentionBias:
    """Add `delta` to the attention logits of anchored keys on all layers.

    Args:
        delta: bias in nats; the paper uses 1 to 3, above 5 it breaks.
        heads: as in `AttentionBias`.
        layers: as in `AttentionBias`.
        queries: as in `AttentionBias`.

    Returns:
        The equivalent `AttentionBias`, which prints as this call.

    Raises:
        ValueError: `delta` is no number from -1000 to 1000.

    Source: GUIDE (arXiv 2409.19001).
    """
    return AttentionBias(delta, heads, layers, queries)
