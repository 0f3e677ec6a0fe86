"""Reaching a model's keys before they are rotated and cached, to read or to edit them."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from radar_core.hooks.cache import given_cache
from radar_core.hooks.parts import Parts
from radar_core.hooks.prompts import call_arguments, given_tokens
from radar_core.hooks.undo import Undo
from radar_core.methods.key_edit import KeyEdit
from radar_core.methods.projections import Projections

# Layers that make queries, keys and values at once: by the model's type, their name and order.
FUSED: dict[str, tuple[str, Literal["joined", "by head"]]] = {
    "gpt2": ("c_attn", "joined"),
    "phi3": ("qkv_proj", "joined"),
    "gpt_neox": ("query_key_value", "by head"),
}
# Models whose `k_norm` comes after rotary embedding.
LATE_NORMS = ("gemma3n", "gemma4", "diffusion_gemma", "nanochat")


@dataclass(frozen=True)
class Site:
    """Where a layer's keys or queries come out, before rotary embedding.

    Args:
        module: gives them, [B, T, heads * size], [B, T, heads, size] or [B, heads, T, size].
        heads: number of heads.
        size: length of one head.
        start: first column of a module that gives more than these.
        order: None where it gives these alone; "joined" where queries, keys and values lie behind
            each other, "by head" where they do so for each head.
    """

    module: nn.Module
    heads: int
    size: int
    start: int = 0
    order: Literal["joined", "by head"] | None = None

    def states(self, output: Tensor, given: Tensor) -> Tensor:
        """Return a view of the module's output: [B, heads, T, size].

        Args:
            output: what the module gave.
            given: what it was given.

        Raises:
            ValueError: the output has none of the shapes that it should have.
        """
        heads, size = self.heads, self.size
        if self.order == "joined":
            part = output[..., self.start : self.start + heads * size]
            return part.unflatten(-1, (heads, size)).transpose(1, 2)
        if self.order == "by head":
            whole = output.unflatten(-1, (heads, 3 * size))
            return whole[..., self.start : self.start + size].transpose(1, 2)
        if output.dim() == 3 and output.shape[-1] == heads * size:
            return output.unflatten(-1, (heads, size)).transpose(1, 2)
        if output.dim() == 4 and output.shape[-1] == size and heads in output.shape[1:3]:
            # With as many tokens as heads only the memory tells: a token's heads lie together.
            by_token = output.shape[2] == heads and (
                output.shape[1] != heads or given.stride(1) >= given.stride(2)
            )
            return output.transpose(1, 2) if by_token else output
        raise ValueError(
            f"{type(self.module).__name__} gave {list(output.shape)}; expected {heads} heads of "
            f"{size}, all on one device: key edits do not work on a part of the heads"
        )


def site(
    attention: nn.Module, model_type: str, what: Literal["query", "key"], heads: int, size: int
) -> Site:
    """Find where an attention module's queries or keys come out.

    Args:
        attention: the module.
        model_type: transformers' name of the model's kind.
        what: "query" or "key".
        heads: how many heads these have.
        size: length of one head.

    Raises:
        ValueError: they cannot be found, or are normalised after rotary embedding.
    """
    name = type(attention).__name__
    if model_type in FUSED:
        child, order = FUSED[model_type]
        start = 0 if what == "query" else size
        if order == "joined" and what == "key":
            start = attention.config.num_attention_heads * size  # type: ignore
        module = getattr(attention, child, None)
        if isinstance(module, nn.Module):
            return Site(module, heads, size, start, order)
    letter = what[0]
    projection = getattr(attention, f"{letter}_proj", None)
    if not isinstance(projection, nn.Module):
        raise ValueError(
            f"{name} has no {letter}_proj of its own, so its {what} states cannot be reached "
            "before rotary embedding: key edits cannot steer this model; use AttentionBias"
        )
    width = getattr(projection, "out_features", heads * size)
    if width != heads * size:
        raise ValueError(
            f"{letter}_proj of {name} gives {width} numbers; expected {heads} heads of {size}: key "
            "edits cannot steer this model; use AttentionBias"
        )
    norms = [
        child
        for child, module in attention.named_children()
        if re.fullmatch(rf"({letter}|{what}|qk)_?(layer_?)?norm", child)
    ]
    late = model_type.startswith(LATE_NORMS)
    if norms and (norms != [f"{letter}_norm"] or late):
        raise ValueError(
            f"{name} normalises its {what} states by {norms[0]}, not known to come before rotary "
            "embedding: key edits cannot steer this model; use AttentionBias"
        )
    module = getattr(attention, norms[0]) if norms else projection
    assert isinstance(module, nn.Module)
    return Site(module, heads, size)


@dataclass(frozen=True)
class Shape:
    """How a model's attention is made.

    Args:
        model_type: transformers' name of its kind.
        num_layers: number of layers.
        heads: number of query heads.
        key_heads: number of key heads.
        head_size: length of one head.
    """

    model_type: str
    num_layers: int
    heads: int
    key_heads: int
    head_size: int


def shape_of(model: Any) -> Shape:
    """Return how a model's attention is made.

    Raises:
        ValueError: layers share keys, or the heads are split over devices.
    """
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    if getattr(config, "num_kv_shared_layers", 0):
        raise ValueError(
            f"the last {config.num_kv_shared_layers} layers of {name} use the keys of others: key "
            "edits cannot steer this model; use AttentionBias"
        )
    if (parts := getattr(model, "tp_size", None) or 1) > 1:
        raise ValueError(
            f"{name} has its heads split over {parts} devices: key edits do not work under tensor "
            "parallelism; use AttentionBias, or another device_map"
        )
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    return Shape(config.model_type, config.num_hidden_layers, heads, key_heads, size)


def key_sites(parts: Parts, layers: tuple[int, ...]) -> dict[int, Site]:
    """Find where the keys of some layers come out.

    Raises:
        ValueError: they cannot be reached.
    """
    return _sites(parts, layers, "key")


def _sites(parts: Parts, layers: tuple[int, ...], what: Literal["query", "key"]) -> dict[int, Site]:
    shape = shape_of(parts.model)
    heads = shape.heads if what == "query" else shape.key_heads
    modules = {module.layer_idx: module for module in parts.attention}
    missing = sorted(set(layers) - modules.keys())
    if missing:
        raise ValueError(f"layers {missing} of {parts.name} have no attention")
    return {
        layer: site(modules[layer], shape.model_type, what, heads, shape.head_size)  # type: ignore[index]
        for layer in layers
    }


def check_fits(projections: Projections, model: Any) -> None:
    """Raise ValueError unless projections were learned from a model of this kind and shape."""
    shape = shape_of(model)
    wanted = {
        "model_type": shape.model_type,
        "num_layers": shape.num_layers,
        "key_heads": shape.key_heads,
        "head_size": shape.head_size,
    }
    came = projections.description()
    for name, expected in wanted.items():
        if came[name] != expected:
            raise ValueError(
                f"the projections were learned from a model with {name} {came[name]!r}; expected "
                f"{expected!r}, as {type(model).__name__} has: learn them from this model"
            )


def check_keys(parts: Parts, method: KeyEdit) -> None:
    """Raise ValueError unless a method can edit this model's keys; nothing is changed."""
    for one in method.learned:
        check_fits(one, parts.model)
    key_sites(parts, method.steered_layers)
    if method.needs_query:
        _sites(parts, method.steered_layers, "query")


def _first(anchors: Tensor, length: int) -> Tensor:
    """Return anchors over the first `length` tokens, none behind the prompt."""
    missing = length - anchors.shape[1]
    if missing <= 0:
        return anchors[:, :length]
    return torch.cat([anchors, anchors.new_zeros(anchors.shape[0], missing)], dim=1)


class Edit:
    """The anchored keys of one forward pass.

    Args:
        rows: bool [B, T], the anchors of its tokens.
        columns: int64 [n], those that hold any.
        last: place of the prompt's last token in the pass, None if it is not there.
    """

    def __init__(self, rows: Tensor, columns: Tensor, last: int | None) -> None:
        self.last = last
        self.queries: dict[int, Tensor] = {}
        self.edited: set[int] = set()
        self._made = (rows[:, columns], columns)
        self._placed = {rows.device: self._made}

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the anchors of the columns, and the columns, on a device."""
        if device not in self._placed:
            rows, columns = self._made
            self._placed[device] = (rows.to(device), columns.to(device))
        return self._placed[device]


@dataclass(frozen=True)
class TracedEdit:
    """A forward pass that is being compiled.

    Args:
        past: how many tokens come before it; a 0-dim tensor with a static cache.
    """

    past: int | Tensor


class KeyHook:
    """Edits the keys of anchored tokens in the passes that hold any; does nothing in others.

    Args:
        parts: the model, which `check_keys` has found to fit the method.
        method: the method.
        anchors: bool [batch, prompt].
    """

    def __init__(self, parts: Parts, method: KeyEdit, anchors: Tensor) -> None:
        self.method = method
        self.anchors = anchors.cpu()
        self.sites = key_sites(parts, method.steered_layers)
        self.query_sites: dict[int, Site] = {}
        if method.needs_query:
            self.query_sites = _sites(parts, method.steered_layers, "query")
        # With a place behind the prompt, where nothing is anchored.
        self._behind: dict[torch.device, Tensor] = {}
        for layer, one in self.sites.items():
            device = next(one.module.parameters()).device
            if device.type != "meta":  # nor where weights come from elsewhere when they are needed
                method.placed(layer, device)
                self._behind[device] = _first(self.anchors, self.prompt_length + 1).to(device)
        anchored = self.anchors.any(dim=0).nonzero().flatten()
        self.first_anchor, self.last_anchor = int(anchored[0]), int(anchored[-1])
        self.calls: dict[int, int] = {}
        self._edit: Edit | TracedEdit | None = None
        self._static: tuple[Any, int] | None = None

    @property
    def prompt_length(self) -> int:
        """Number of tokens of the prompt that the anchors describe."""
        return self.anchors.shape[1]

    def install(self, model: Any, undo: Undo) -> None:
        """Hook the model and the modules that give its keys."""
        before = model.register_forward_pre_hook(self._before, with_kwargs=True)
        undo.add(before.remove)
        after = model.register_forward_hook(self._after, with_kwargs=True, always_call=True)
        undo.add(after.remove)
        for sites, act in ((self.query_sites, self._note_query), (self.sites, self._edit_keys)):
            for layer, one in sites.items():
                undo.add(one.module.register_forward_hook(_bound(act, layer, one)).remove)

    # -- one forward pass --------------------------------------------------------------------------

    def _before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find out which anchors a forward pass holds."""
        self._edit = None
        kwargs = call_arguments(model.forward, args, kwargs)
        batch, length = given_tokens(kwargs).shape[:2]
        cache = given_cache(kwargs)[1]
        past = 0 if cache is None else cache.get_seq_length()
        if torch.compiler.is_compiling():
            if length > 1 or (isinstance(past, int) and past < self.prompt_length):
                self._edit = self._traced(past)
            return
        past = self._past(cache, past, length)
        end = past + length
        if past > self.last_anchor or end <= self.first_anchor:
            return
        rows = _first(self._rows(batch), end)[:, past:]
        columns = rows.any(dim=0).nonzero().flatten()
        if not len(columns):
            return
        last = self.prompt_length - 1 - past
        self._edit = Edit(rows, columns, last if 0 <= last < length else None)

    def _past(self, cache: Any, past: int | Tensor, length: int) -> int:
        """Return how many tokens a cache holds, read from a device only while in the prompt."""
        if not isinstance(past, Tensor):
            return past
        cached, seen = self._static or (lambda: None, 0)
        in_prompt = length > 1 or seen < self.prompt_length or cached() is not cache
        if not in_prompt and past.device.type != "cpu":
            return seen
        held = int(past)
        self._static = (weakref.ref(cache), held + length)
        return held

    def _rows(self, batch: int) -> Tensor:
        """Return the anchors of every row: bool [batch, prompt].

        Raises:
            ValueError: the batch is no multiple of the anchors' rows.
        """
        count = self.anchors.shape[0]
        if batch % count:
            raise ValueError(
                f"anchors has {count} rows, but the model runs on a batch of {batch}; expected one "
                "row of anchors for every prompt"
            )
        return self.anchors.repeat_interleave(batch // count, dim=0)

    def _traced(self, past: int | Tensor) -> TracedEdit:
        """Return a compiled pass's anchors, to be found on the device: any length, one graph."""
        if self.method.needs_query:
            raise ValueError(
                f"{self.method.name} needs to know where the prompt ends, which a "
                "compiled pass does not say; run the prompt uncompiled, or use SEKA"
            )
        return TracedEdit(past)

    def _edit_traced(self, edit: TracedEdit, layer: int, keys: Tensor) -> Tensor:
        """Return the keys of a compiled pass, edited where anchored."""
        self.calls[layer] = 1  # counting would compile anew each time
        anchors = self._behind[keys.device]
        if keys.shape[0] % anchors.shape[0]:
            raise ValueError(
                f"anchors has {anchors.shape[0]} rows, but the model runs on a batch of "
                f"{keys.shape[0]}; expected one row of anchors for every prompt"
            )
        places = torch.arange(keys.shape[2], device=keys.device) + edit.past
        rows = anchors[:, places.clamp(max=self.prompt_length)]
        rows = rows.repeat_interleave(keys.shape[0] // anchors.shape[0], dim=0)
        return self.method.edit(layer, keys, rows, None)

    def _after(self, model: Any, args: Any, kwargs: Any, output: Any) -> None:
        edit, self._edit = self._edit, None
        if output is None or not isinstance(edit, Edit):
            return
        missing = sorted(self.sites.keys() - edit.edited)
        if missing:
            raise RuntimeError(
                f"the keys of layers {missing} of {type(model).__name__} were never reached, so "
                "they would not be steered; this model's keys cannot be edited"
            )

    def _note_query(self, layer: int, one: Site, given: Tensor, output: Tensor) -> Tensor | None:
        edit = self._edit
        if not isinstance(edit, Edit):
            return None
        if edit.last is None:
            raise ValueError(
                f"{self.method.name} weighs its experts by the prompt's last token, "
                "which must be in the pass that reads the anchors: leave out prefill_chunk_size"
            )
        edit.queries[layer] = one.states(output, given)[:, :, edit.last]
        return None

    def _edit_keys(self, layer: int, one: Site, given: Tensor, output: Tensor) -> Tensor | None:
        edit = self._edit
        if edit is None:
            return None
        edited = output.clone()
        keys = one.states(edited, given)
        if isinstance(edit, TracedEdit):
            keys.copy_(self._edit_traced(edit, layer, keys))
            return edited
        self.calls[layer] = self.calls.get(layer, 0) + 1
        edit.edited.add(layer)
        rows, columns = edit.on(output.device)
        chosen = keys.index_select(2, columns)
        changed = self.method.edit(layer, chosen, rows, edit.queries.pop(layer, None))
        keys.index_copy_(2, columns, changed)
        return edited


def _bound(act: Callable[..., Tensor | None], layer: int, one: Site) -> Callable[..., Any]:
    """Return a forward hook that acts for one layer."""

    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        return act(layer, one, args[0], output)

    return hook
