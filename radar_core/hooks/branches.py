"""Two-branch decoding: full and anchors-hidden rows in one batch, blended before the logits."""

from __future__ import annotations

import logging
import threading
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from radar_core.hooks.attention import AttentionHook
from radar_core.hooks.cache import (
    BranchedCache,
    cached_rows,
    can_be_written,
    can_branch_later,
    given_cache,
)
from radar_core.hooks.packed import Packed, can_pack, tokens
from radar_core.hooks.prompts import call_arguments, given_tokens
from radar_core.hooks.undo import Undo
from radar_core.hooks.untraced import placed, untraced
from radar_core.methods.spa import blend_rows
from radar_kernels import blend_logits

logger = logging.getLogger("radar_core")

# Inputs of a forward pass with one row for each sequence, besides the mask and the cache.
ROW_INPUTS = (
    "input_ids",
    "inputs_embeds",
    "position_ids",
    "token_type_ids",
    "mm_token_type_ids",
)
# How inputs that are no text begin.
MEDIA_INPUTS = (
    "pixel_values",
    "image_",
    "video_",
    "audio_",
    "input_features",
    "mm_encoder_outputs",
)


class TwoBranches:
    """Runs a model on [full; hidden] rows and gives back blended rows.

    Args:
        model: the causal language model.
        attention: its attention hook, which hides the anchors from the second half.
        strength: the strengths of SPA, one for all rows or one a row.
    """

    def __init__(self, model: Any, attention: AttentionHook, strength: list[float]) -> None:
        assert attention.anchors is not None
        self.model = model
        self.attention = attention
        rows = attention.anchors.shape[0]
        # One for every prompt, so that a compiled pass need not know how many were given.
        strengths = torch.tensor(strength, dtype=torch.float32).repeat(rows // len(strength))
        self.strength = placed(strengths, model)
        anchored = attention.anchors.bool().any(dim=0)
        self.first_anchor = int(anchored.float().argmax())
        self.blends_logits = blends_logits(model)
        self._weights: Tensor | None = None
        self._warned = False

    def install(self, undo: Undo) -> None:
        """Hook the model and its output layer."""
        model = self.model
        before = model.register_forward_pre_hook(self._before, with_kwargs=True)
        undo.add(before.remove)
        after = model.register_forward_hook(self._after, with_kwargs=True, always_call=True)
        undo.add(after.remove)
        if not self.blends_logits:
            output = self.model.get_output_embeddings()
            undo.add(output.register_forward_pre_hook(self._blend_hidden).remove)

    # -- hooks -------------------------------------------------------------------------------------

    @untraced
    def _before(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Double the inputs, running what both branches share only once."""
        self.attention.doubled = False
        self.attention.packed = None
        kwargs = dict(call_arguments(model.forward, args, kwargs))
        for name, value in kwargs.items():
            if name.startswith(MEDIA_INPUTS) and (isinstance(value, Tensor) or value):
                raise ValueError(
                    f"SPA runs two branches of a prompt's text, but {name} was given; steer "
                    "prompts with images or sound by AttentionBias or TargetMass"
                )
        batch, length = given_tokens(kwargs).shape[:2]
        cache_name, cache = given_cache(kwargs)
        past = cache.get_seq_length() if cache is not None else 0
        rows = cached_rows(cache) if isinstance(past, int) and past else None
        if can_branch_later(cache):
            cache.__class__ = BranchedCache
            if rows in (None, batch) and past + length <= self.first_anchor:
                return (), kwargs  # nothing to hide yet: both branches are still one
            if rows == batch:
                kwargs = self._branch(kwargs, cache, cache_name, batch, past)
            elif rows is None and self._shares_prefix(kwargs, length):
                if can_pack(model, cache, kwargs):
                    return (), self._pack(kwargs, cache, batch, length)
                kwargs = self._run_prefix(kwargs, cache, cache_name, batch, length)
        elif cache is not None and not self._warned:
            self._warned = True
            logger.info(
                "%s cannot be branched after the prompt's shared part; both branches prefill all "
                "of it",
                type(cache).__name__,
            )
        if rows is not None and rows not in (batch, 2 * batch):
            raise ValueError(
                f"the cache holds {rows} rows, but the inputs have {batch}; expected a cache that "
                "this steering made, or none"
            )
        return (), self._double(kwargs, batch)

    @untraced
    def _after(self, model: Any, args: Any, kwargs: Any, output: Any) -> Any:
        """Blend the logits where the output layer could not be fed blended rows."""
        if self.attention.thread != threading.get_ident():
            return None  # this thread was refused, another one's pass is at work
        doubled, self.attention.doubled = self.attention.doubled, False
        packed, self.attention.packed = self.attention.packed, None
        if output is None:
            return None
        if packed is not None:
            packed.unpack(given_cache(kwargs)[1])
        if not (doubled or packed) or not self.blends_logits:
            return output
        full, hidden = output.logits.chunk(2, dim=1 if packed else 0)
        shape = full.shape
        weights = self._row_weights(shape[0], full.device).repeat_interleave(shape[1])
        blended = blend_logits(
            full.reshape(-1, shape[-1]), hidden.reshape(-1, shape[-1]), strength=weights
        )
        output.logits = blended.view(shape).to(full.dtype)
        return output

    def _blend_hidden(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        rows = args[0]
        if self.attention.packed is not None:
            rows = torch.cat(rows.chunk(2, dim=1))
        elif not self.attention.doubled:
            return None
        weights = self._row_weights(rows.shape[0] // 2, rows.device)
        return (blend_rows(rows, weights), *args[1:])

    # -- steps -------------------------------------------------------------------------------------

    def _shares_prefix(self, kwargs: dict[str, Any], length: int) -> bool:
        """Whether the tokens before the first anchor may run once: nobody asks for their logits."""
        keep = kwargs.get("logits_to_keep", 0)
        return (
            0 < self.first_anchor < length
            # Where the first anchor is would become a part of what is compiled.
            and getattr(self.model, "_compiled_call_impl", None) is None
            and isinstance(keep, int)
            and 0 < keep <= length - self.first_anchor
            and not kwargs.get("output_hidden_states")
            and ready_masks(kwargs.get("attention_mask")) is None
        )

    def _pack(
        self, kwargs: dict[str, Any], cache: DynamicCache, batch: int, length: int
    ) -> dict[str, Any]:
        """Run the prompt and the second branch's own tokens as one row."""
        given = kwargs.get("attention_mask")
        seen = None if given is None else given[:, :length].bool()
        device = given_tokens(kwargs).device
        anchored = self.attention.anchored_rows(batch, length, device)
        assert anchored is not None
        visible = ~anchored.bool() if seen is None else seen & ~anchored.bool()
        packed = Packed(length, self.first_anchor, seen, visible)
        self.attention.packed = packed
        return packed.inputs(kwargs)

    def _run_prefix(
        self, kwargs: dict[str, Any], cache: DynamicCache, cache_name: str, batch: int, length: int
    ) -> dict[str, Any]:
        """Prefill the tokens before the first anchor once, then give each branch a copy."""
        cut = self.first_anchor
        rows = {name: v for name in ROW_INPUTS if (v := kwargs.get(name)) is not None}
        prefix = {name: tokens(name, value, 0, cut) for name, value in rows.items()}
        mask = kwargs.get("attention_mask")
        if mask is not None:
            prefix["attention_mask"] = mask[:, :cut]
        self.model.base_model(**prefix, **{cache_name: cache}, use_cache=True)
        rest = {name: tokens(name, value, cut, length) for name, value in rows.items()}
        return self._branch({**kwargs, **rest}, cache, cache_name, batch, cut)

    def _branch(
        self, kwargs: dict[str, Any], cache: DynamicCache, cache_name: str, batch: int, past: int
    ) -> dict[str, Any]:
        """Give the second branch its own copy of a cache that both have shared so far."""
        if past > self.first_anchor:
            raise ValueError(
                f"the cache already holds {past} tokens with the anchors visible, the first at "
                f"position {self.first_anchor}; SPA needs a cache that it made itself, or none"
            )
        cache.batch_select_indices(torch.arange(batch).repeat(2))
        return kwargs

    def _double(self, kwargs: dict[str, Any], batch: int) -> dict[str, Any]:
        """Return the inputs of a forward pass over both branches."""
        doubled = dict(kwargs)
        for name in ROW_INPUTS:
            value = kwargs.get(name)
            rows = -2 if name == "position_ids" else 0
            # Positions given once for all rows broadcast by themselves.
            if value is not None and value.shape[rows] == batch:
                doubled[name] = torch.cat([value, value], dim=rows)
        mask = kwargs.get("attention_mask")
        masks = ready_masks(mask)
        if masks is not None:
            both = {name: self.attention.hide_in_ready_mask(m) for name, m in masks.items()}
            doubled["attention_mask"] = both if isinstance(mask, dict) else both[""]
        elif mask is not None:
            doubled["attention_mask"] = torch.cat([mask, mask])
        self.attention.doubled = True
        return doubled

    def _row_weights(self, batch: int, device: torch.device) -> Tensor:
        if torch.compiler.is_compiling():
            strength = self.strength.to(device)
            return strength.repeat_interleave(batch // strength.shape[0])
        weights = self._weights
        if (
            weights is None
            or weights.shape[0] != batch
            or weights.device != device
            or not can_be_written(weights)
        ):
            count = self.strength.shape[0]
            if batch % count:
                raise ValueError(
                    f"strength has {count} values, but the model runs on a batch of {batch}; "
                    "expected one number, or one for every prompt"
                )
            weights = self.strength.to(device).repeat_interleave(batch // count)
            self._weights = weights
        return weights


def blends_logits(model: Any) -> bool:
    """Whether something that is not linear follows the output layer, so that logits blend."""
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "final_logit_softcapping", None) is not None


def ready_masks(mask: Any) -> dict[str, Tensor] | None:
    """Return the 4-D masks that were made before the forward pass, by layer type; None if 2-D."""
    if isinstance(mask, dict):
        return {name: value for name, value in mask.items() if value is not None}
    if isinstance(mask, Tensor) and mask.dim() == 4:
        return {"": mask}
    return None
