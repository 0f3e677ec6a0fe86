"""What a steered model must say, computed without a cache, hooks or Radar's own attention."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from radar_core import SPA, AttentionBias, Method, TargetMass
from tests.models.tiny import biased_logits, eager_twin, extended, full_logits, hidden_logits

_names = itertools.count()


class Oracle:
    """Next-token logits of a steered model, from uncached passes over whole sequences.

    SPA blends two passes, a bias is added to eager attention's float mask, and a target mass is
    reached in an attention of a few lines.

    Args:
        model: the unsteered model.
        method: the steering.
        anchors: [rows, prompt] bool, or factors of a bias.
        attention_mask: [rows, prompt]; None if nothing is padded.
    """

    def __init__(
        self, model: Any, method: Method, anchors: Tensor, attention_mask: Tensor | None = None
    ) -> None:
        self.method = method
        self.anchors = anchors
        self.mask = torch.ones_like(anchors).long() if attention_mask is None else attention_mask
        self.twin = eager_twin(model)

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the logits [rows * n, vocabulary] after sequences [rows * n, tokens]."""
        times = ids.shape[0] // self.anchors.shape[0]
        anchors = self.anchors.repeat_interleave(times, dim=0)
        mask = self.mask.repeat_interleave(times, dim=0)
        method = self.method
        if isinstance(method, SPA):
            full = full_logits(self.twin, ids, mask)
            hidden = hidden_logits(self.twin, ids, mask, anchors)
            strength = torch.tensor(method.strengths()).view(-1, 1)
            strength = strength.repeat_interleave(ids.shape[0] // len(strength), dim=0)
            return strength * full + (1 - strength) * hidden
        assert isinstance(method, AttentionBias | TargetMass)
        first_query = anchors.shape[1] - 1 if method.queries == "generated" else 0
        if isinstance(method, AttentionBias):
            config = self.twin.config.get_text_config()
            plans = {
                layer: method.layer_plan(
                    layer, config.num_hidden_layers, config.num_attention_heads
                )
                for layer in range(config.num_hidden_layers)
            }
            bias = {layer: plan.bias for layer, plan in plans.items() if plan is not None}
            return biased_logits(self.twin, ids, mask, anchors, bias, first_query)
        return mass_logits(self.twin, ids, mask, anchors, method.mass, first_query)


@torch.no_grad()
def mass_logits(
    twin: Any, ids: Tensor, mask: Tensor, anchors: Tensor, target: float, first_query: int
) -> Tensor:
    """Return the last position's logits with at least a target share of attention on anchors."""
    seen = extended(mask, ids.shape[1], 1)
    keys = extended(anchors, ids.shape[1], False)[:, None, None, :].float()
    steered = (torch.arange(ids.shape[1]) >= first_query)[:, None]

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        scaling: float,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
        scores = query @ key.transpose(2, 3) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores + attention_mask
        mass = (scores.softmax(-1) * keys).sum(-1, keepdim=True)
        wanted = torch.logit(torch.tensor(target)) - torch.logit(mass)
        raised = torch.where((mass > 0) & (mass < 1) & (wanted > 0) & steered, wanted, 0.0)
        return ((scores + raised * keys).softmax(-1) @ value).transpose(1, 2), None

    name = f"target_mass_oracle_{next(_names)}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, eager_mask)
    try:
        twin.set_attn_implementation(name)
        positions = (seen.cumsum(1) - 1).clamp(min=0)
        logits = twin(ids, attention_mask=seen, position_ids=positions).logits
    finally:
        twin.set_attn_implementation("eager")
        AttentionInterface._global_mapping.pop(name)
        AttentionMaskInterface._global_mapping.pop(name)
    return logits[:, -1].float()
