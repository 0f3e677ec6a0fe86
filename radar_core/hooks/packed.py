"""Both branches of a prompt in one row: the whole prompt, then what the second branch sees anew.

Before the first anchor the branches are equal, so the second needs only the tokens from there on.
Running them behind the whole prompt, in the same row and at their own positions, costs one pass
over the weights where two passes, the shared part and then the rest twice, would read them twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from radar_core.hooks.cache import GrowingLayer, room
from radar_core.hooks.provenance import original_class


@dataclass(frozen=True)
class Packed:
    """How a packed prompt is laid out.

    Args:
        prompt: tokens of the prompt; the second branch's own tokens follow.
        shared: tokens that the second branch shares, those before the first anchor.
        seen: bool [B, prompt], False where padded; None if nothing is padded.
        visible: bool [B, prompt], what the second branch may see; None for everything.
    """

    prompt: int
    shared: int
    seen: Tensor | None
    visible: Tensor | None

    def inputs(self, keywords: dict[str, Any], other: dict[str, Tensor]) -> dict[str, Any]:
        """Return a forward pass's inputs with the second branch's tokens behind the prompt.

        Args:
            keywords: the inputs of the forward pass.
            other: those of them that are not the same in the second branch.
        """
        packed = dict(keywords)
        first = keywords.get("input_ids")
        first = keywords["inputs_embeds"] if first is None else first
        if packed.get("position_ids") is None:
            packed["position_ids"] = torch.arange(self.prompt, device=first.device)[None]
        for name in ("input_ids", "inputs_embeds", "position_ids"):
            if (value := packed.get(name)) is not None:
                rest = tokens(name, other.get(name, value), self.shared, self.prompt)
                packed[name] = torch.cat([value, rest], dim=-1 if name == "position_ids" else 1)
        ends = [self.prompt - 1, 2 * self.prompt - self.shared - 1]
        packed["logits_to_keep"] = torch.tensor(ends, device=first.device)
        packed["attention_mask"] = None
        return packed

    def whole(self, states: Tensor) -> Tensor:
        """Return the first branch's part of queries, keys or values [B, heads, tokens, D]."""
        return states[:, :, : self.prompt]

    def anew(self, states: Tensor) -> Tensor:
        """Return the second branch's own part of queries."""
        return states[:, :, self.prompt :]

    def second(self, states: Tensor) -> Tensor:
        """Return all keys or values of the second branch, shared ones first."""
        return torch.cat([states[:, :, : self.shared], self.anew(states)], dim=2)

    def unpack(self, cache: DynamicCache) -> None:
        """Turn a packed cache of B rows into one of both branches' 2B rows, with room to grow."""
        for layer in cache.layers:
            assert isinstance(layer, GrowingLayer)
            assert layer.keys is not None and layer.values is not None
            layer._key_buffer = self._rows(layer.keys)
            layer._value_buffer = self._rows(layer.values)
            layer.keys = layer._key_buffer[..., : self.prompt, :]
            layer.values = layer._value_buffer[..., : self.prompt, :]

    def _rows(self, states: Tensor) -> Tensor:
        batch, heads, _, size = states.shape
        rows = states.new_empty(2 * batch, heads, self.prompt + room(self.prompt), size)
        rows[:batch, :, : self.prompt] = self.whole(states)
        rows[batch:, :, : self.shared] = states[:, :, : self.shared]
        rows[batch:, :, self.shared : self.prompt] = self.anew(states)
        return rows


def tokens(name: str, value: Tensor, start: int, stop: int) -> Tensor:
    """Return some tokens of an input of a forward pass.

    Inputs are [B, tokens, ...], but positions may also be [axes, B, tokens].
    """
    return value[..., start:stop] if name == "position_ids" else value[:, start:stop]


def can_pack(model: Any, cache: Any, keywords: dict[str, Any]) -> bool:
    """Whether a prompt's branches can share a row: plain causal attention at given positions."""
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None)
    plain = (
        getattr(config, "sliding_window", None) is None
        and getattr(config, "attention_chunk_size", None) is None
        if kinds is None
        else all(kind == "full_attention" for kind in kinds)
    )
    return (
        plain
        and original_class(cache) is DynamicCache
        and not cache.offloading
        and all(isinstance(layer, GrowingLayer) for layer in cache.layers)
        and keywords.get("logits_to_keep") == 1
        and keywords.get("token_type_ids") is None
        and keywords.get("mm_token_type_ids") is None
        and keywords.get("labels") is None
        and "position_ids" in keywords
    )
