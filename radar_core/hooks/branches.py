"""Two-branch decoding: full and anchors-hidden rows in one batch, blended before the logits."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from radar_core.hooks.attention import AttentionHook
from radar_core.hooks.cache import can_be_written, can_branch_later, given_cache
from radar_core.hooks.packed import Packed, can_pack, tokens
from radar_core.hooks.parts import decoder
from radar_core.hooks.prompts import call_arguments, given_tokens
from radar_core.hooks.provenance import (
    SteeredCache,
    cached_rows,
    double_rows,
    is_branched,
    original_class,
)
from radar_core.hooks.undo import Undo
from radar_core.hooks.untraced import placed, untraced
from radar_core.methods.spa import SPA
from radar_core.methods.two_branch import TwoBranch, blend_rows

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


class Branches:
    """What every way of running two branches shares: rows [first; second], blended.

    Args:
        model: the causal language model.
        attention: its attention hook.
        method: the method, which blends.
    """

    def __init__(self, model: Any, attention: AttentionHook, method: TwoBranch) -> None:
        self.model = model
        self.attention = attention
        self.method = method
        strengths = torch.tensor(method.strengths(), dtype=torch.float32)
        if attention.anchors is not None:
            # One for every prompt, so that a compiled pass need not know how many were given.
            strengths = strengths.repeat(attention.anchors.shape[0] // strengths.shape[0])
        self.strength = placed(strengths, model)
        self.blends_logits = method.needs_logits or caps_logits(model)
        self._weights: Tensor | None = None

    def install(self, undo: Undo) -> None:
        """Hook the model and its output layer."""
        before = self.model.register_forward_pre_hook(self._before, with_kwargs=True)
        undo.add(before.remove)
        after = self.model.register_forward_hook(self._after, with_kwargs=True, always_call=True)
        undo.add(after.remove)
        if not self.blends_logits:
            output = self.model.get_output_embeddings()
            undo.add(output.register_forward_pre_hook(self._blend_hidden).remove)

    def _before(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        raise AssertionError("every kind of branches has its own way in")

    def _after(self, model: Any, args: Any, kwargs: Any, output: Any) -> Any:
        raise AssertionError("every kind of branches has its own way out")

    def _blend_hidden(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Feed blended rows to the output layer, which is linear, so that it runs once."""
        rows = args[0]
        if self.attention.packed is not None:
            rows = torch.cat(rows.chunk(2, dim=1))
        elif not self.attention.doubled:
            return None
        weights = self._row_weights(rows.shape[0] // 2, rows.device)
        return (blend_rows(rows, weights), *args[1:])

    def _blend_logits(self, first: Tensor, second: Tensor) -> Tensor:
        """Blend logits [B, q, V] of both branches; in the dtype of the first."""
        batch, queries, vocabulary = first.shape
        weights = self._row_weights(batch, first.device).repeat_interleave(queries)
        blended = self.method.blend(
            first.reshape(-1, vocabulary), second.reshape(-1, vocabulary), weights
        )
        return blended.view(first.shape).to(first.dtype)

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


class TwoBranches(Branches):
    """Runs SPA's branches, which are the same prompt without and with its anchors masked.

    Args:
        model: the causal language model.
        attention: its attention hook, which hides the anchors from the second half if masking is
            by attention.
        method: SPA.
    """

    method: SPA

    def __init__(self, model: Any, attention: AttentionHook, method: SPA) -> None:
        super().__init__(model, attention, method)
        assert attention.anchors is not None
        anchored = attention.anchors.bool().any(dim=0)
        # The first token that the branches do not share.
        self.parting = attention.hidden_from or int(anchored.float().argmax())
        self._warned = False

    # -- hooks -------------------------------------------------------------------------------------

    @untraced
    def _before(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Double the inputs, running what both branches share only once."""
        self.attention.doubled = False
        self.attention.packed = None
        kwargs = dict(call_arguments(model.forward, args, kwargs))
        refuse_media(kwargs)
        if self.blends_logits:
            refuse_loss(kwargs)
        batch, length = given_tokens(kwargs).shape[:2]
        cache_name, cache = given_cache(kwargs)
        past = cache.get_seq_length() if cache is not None else 0
        rows = None if cache is None else cached_rows(cache)
        if can_branch_later(cache):
            if rows in (None, batch) and past + length <= self.parting:
                return (), kwargs  # nothing to hide yet: both branches are still one
            if rows == batch:
                self._branch(cache, batch, past)
            elif rows is None and self._shares_prefix(kwargs, length):
                if can_pack(model, cache, kwargs):
                    return (), self._pack(kwargs, cache, batch, length)
                if not rotates_by_length(model):
                    kwargs = self._run_prefix(kwargs, cache, cache_name, batch, length)
                    past = self.parting
        elif cache is not None:
            if rows == batch or (rows is None and not is_branched(cache) and past > 0):
                double_rows(cache, batch)
            elif rows is None and not is_branched(cache) and not self._warned:
                self._warned = True
                logger.info(
                    "%s is not branched after the prompt's shared part; both branches prefill all "
                    "of it",
                    original_class(cache).__name__,
                )
        if rows is not None and rows not in (batch, 2 * batch):
            raise ValueError(
                f"the cache holds {rows} rows, but the inputs have {batch}; expected a cache that "
                "this steering made, or none"
            )
        if isinstance(cache, SteeredCache):
            cache.branched = True
        return (), self._double(kwargs, batch, past)

    @untraced
    def _after(self, model: Any, args: Any, kwargs: Any, output: Any) -> Any:
        """Blend the logits where the output layer could not be fed blended rows."""
        if not self.attention.is_at_work():
            return None
        doubled, self.attention.doubled = self.attention.doubled, False
        packed, self.attention.packed = self.attention.packed, None
        if output is None:
            return None
        if packed is not None:
            packed.unpack(given_cache(kwargs)[1])
        if not (doubled or packed) or not self.blends_logits:
            return output
        logits = output[0] if isinstance(output, tuple) else output.logits
        blended = self._blend_logits(*logits.chunk(2, dim=1 if packed else 0))
        if isinstance(output, tuple):
            return blended, *output[1:]
        output.logits = blended
        return output

    # -- steps -------------------------------------------------------------------------------------

    def _shares_prefix(self, kwargs: dict[str, Any], length: int) -> bool:
        """Whether the tokens before the first anchor may run once: nobody asks for their logits."""
        keep = kwargs.get("logits_to_keep", 0)
        return (
            0 < self.parting < length
            # Where the branches part would become a part of what is compiled.
            and getattr(self.model, "_compiled_call_impl", None) is None
            and isinstance(keep, int)
            and 0 < keep <= length - self.parting
            and not kwargs.get("output_hidden_states")
            and ready_masks(kwargs.get("attention_mask")) is None
        )

    def _pack(
        self, kwargs: dict[str, Any], cache: DynamicCache, batch: int, length: int
    ) -> dict[str, Any]:
        """Run the prompt and the second branch's own tokens as one row."""
        given = kwargs.get("attention_mask")
        seen = None if given is None else given[:, :length].bool()
        anchored = self.attention.anchored_rows(batch, length, given_tokens(kwargs).device)
        assert anchored is not None
        visible = seen
        if self.attention.hide_anchors:
            visible = ~anchored.bool() if seen is None else seen & ~anchored.bool()
        packed = Packed(length, self.parting, seen, visible)
        self.attention.packed = packed
        return packed.inputs(kwargs, self._masked(kwargs, 0))

    def _run_prefix(
        self, kwargs: dict[str, Any], cache: DynamicCache, cache_name: str, batch: int, length: int
    ) -> dict[str, Any]:
        """Prefill the tokens before the first anchor once, then give each branch a copy."""
        cut = self.parting
        rows = {name: v for name in ROW_INPUTS if (v := kwargs.get(name)) is not None}
        prefix = {name: tokens(name, value, 0, cut) for name, value in rows.items()}
        mask = kwargs.get("attention_mask")
        if mask is not None:
            prefix["attention_mask"] = mask[:, :cut]
        decoder(self.model)(**prefix, **{cache_name: cache}, use_cache=True)
        rest = {name: tokens(name, value, cut, length) for name, value in rows.items()}
        self._branch(cache, batch, cut)
        return {**kwargs, **rest}

    def _branch(self, cache: DynamicCache, batch: int, past: int) -> None:
        """Give the second branch its own copy of a cache that both have shared so far."""
        if past > self.parting:
            raise ValueError(
                f"the cache already holds {past} tokens with the anchors visible, the first at "
                f"position {self.parting}; SPA needs a cache that it made itself, or none"
            )
        cache.batch_select_indices(torch.arange(batch).repeat(2))

    def _masked(self, kwargs: dict[str, Any], past: int | Tensor) -> dict[str, Tensor]:
        """Return the inputs that have a mask token for each anchor, where they are given.

        Args:
            kwargs: the inputs of a forward pass.
            past: the position of its first token.
        """
        token, prompt = self.method.mask_token_id, self.attention.prompt_length
        if token is None or (isinstance(past, int) and past >= prompt):
            return {}
        given = given_tokens(kwargs)
        rows = self.attention.anchored_rows(given.shape[0], prompt + 1, given.device)
        assert rows is not None
        position = past + torch.arange(given.shape[1], device=given.device)
        anchored = rows.index_select(1, position.clamp(max=prompt))
        if kwargs.get("inputs_embeds") is None:
            return {"input_ids": given.masked_fill(anchored, token)}
        embed = self.model.get_input_embeddings()
        mask = embed(torch.tensor(token, device=given.device)).to(given.dtype)
        return {"inputs_embeds": torch.where(anchored[..., None], mask, given)}

    def _double(self, kwargs: dict[str, Any], batch: int, past: int | Tensor) -> dict[str, Any]:
        """Return the inputs of a forward pass over both branches."""
        doubled = dict(kwargs)
        masked = self._masked(kwargs, past)
        for name in ROW_INPUTS:
            value = kwargs.get(name)
            rows = -2 if name == "position_ids" else 0
            # Positions given once for all rows broadcast by themselves.
            if value is not None and value.shape[rows] == batch:
                doubled[name] = torch.cat([value, masked.get(name, value)], dim=rows)
        mask = kwargs.get("attention_mask")
        masks = ready_masks(mask)
        if masks is not None:
            length = given_tokens(kwargs).shape[1]
            both = {
                name: self.attention.double_ready_mask(one, batch, length)
                for name, one in masks.items()
            }
            doubled["attention_mask"] = both if isinstance(mask, dict) else both[""]
        elif mask is not None:
            doubled["attention_mask"] = torch.cat([mask, mask])
        self.attention.doubled = True
        return doubled


def caps_logits(model: Any) -> bool:
    """Whether something that is not linear follows the output layer, so that logits blend."""
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "final_logit_softcapping", None) is not None


def rotates_by_length(model: Any) -> bool:
    """Whether how positions are rotated depends on the length of a pass, so that a prefix differs.

    That is so for rotary embeddings of the kinds "dynamic" and "longrope".
    """
    given = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    kinds = [given, *(value for value in given.values() if isinstance(value, dict))]
    return any(kind.get("rope_type") in ("dynamic", "longrope") for kind in kinds)


def refuse_loss(kwargs: dict[str, Any]) -> None:
    """Raise ValueError if a forward pass is to compute a loss, which is before logits blend."""
    if kwargs.get("labels") is not None:
        raise ValueError(
            "labels were given, but here the logits are blended after the model has computed its "
            "loss; leave labels out and compute the loss from the steered logits"
        )


def refuse_media(kwargs: dict[str, Any]) -> None:
    """Raise ValueError if a forward pass is given images or sound."""
    for name, value in kwargs.items():
        if name.startswith(MEDIA_INPUTS) and (isinstance(value, Tensor) or value):
            raise ValueError(
                f"SPA runs two branches of a prompt's text, but {name} was given; steer "
                "prompts with images or sound by AttentionBias or TargetMass"
            )


def ready_masks(mask: Any) -> dict[str, Tensor] | None:
    """Return the 4-D masks that were made before the forward pass, by layer type; None if 2-D."""
    if isinstance(mask, dict):
        return {name: value for name, value in mask.items() if value is not None}
    if isinstance(mask, Tensor) and mask.dim() == 4:
        return {"": mask}
    return None
