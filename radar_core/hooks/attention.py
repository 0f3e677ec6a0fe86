"""Radar's attention inside a transformers model: one attention and one mask function per model."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from radar_core.hooks.cache import can_be_written
from radar_core.hooks.packed import Packed
from radar_core.hooks.shards import Shards
from radar_core.methods.method import LayerPlan, Method
from radar_kernels import anchor_attention

# Attention implementations of transformers whose masks and results Radar reproduces.
SUPPORTED_IMPLEMENTATIONS = ("sdpa", "eager")

# What some models give their attention that changes its result, and Radar's does not know.
UNSERVED_KEYWORDS = ("indices", "block_indices", "position_bias", "sinks")


@dataclass
class Window:
    """What one forward pass is told of its keys, for one kind of layer.

    Args:
        key_length: number of keys that the attention functions get.
        query_length: number of queries; layers that share keys may be given the last ones alone.
        anchored: [B, keys] of the full branch's rows; None if nothing is anchored.
        generated: which queries predict generated tokens: how many of the last ones, or bool [q]
            where only the device knows (a static cache); None where no layer asks.
        query_offset: position of the first query; a 0-dim tensor with a static cache.
        native_mask: the mask that the model's own attention expects, for layers left untouched.
        local: whether it belongs to layers that see only a sliding window or chunk of the keys.
        mask: the mask that those layers are given.
        compact: whether that mask has one row for all queries, and leaves causality to attention.
    """

    key_length: int
    query_length: int
    anchored: Tensor | None = None
    generated: int | Tensor | None = None
    query_offset: int | Tensor = 0
    native_mask: Tensor | None = None
    local: bool = False
    mask: Tensor | None = None
    compact: bool = False


class Ran:
    """A note that a compiled pass leaves: it writes it without reading, so it is not guarded on."""

    compiled = False


@dataclass(frozen=True)
class Call:
    """One call of a layer's attention, as the model makes it.

    Args:
        query: [B, heads, q, D].
        key: [B, kv_heads, k, D], not repeated.
        value: [B, kv_heads, k, Dv].
        mask: bool [B or 1, 1, q or 1, k]; where it is compact, or None for all keys, causality
            comes on top, the last query at the last key.
        window: where the keys lie in the sequence.
        scaling: factor on the logits.
        keywords: what else the model passes (softcap, sinks, sliding window, ...).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    window: Window
    scaling: float | None
    keywords: dict[str, Any]

    def last_queries(self, count: int) -> Call:
        """Return the call of the last `count` query tokens alone."""
        mask = None if self.mask is None else self.mask[..., -count:, :]
        return replace(self, query=self.query[:, :, -count:], mask=mask)

    def first_rows(self, count: int) -> Call:
        """Return the call of the first `count` rows alone."""
        return replace(
            self,
            query=self.query[:count],
            key=self.key[:count],
            value=self.value[:count],
            mask=None if self.mask is None else self.mask[:count],
        )

    def anchored(self, plan: LayerPlan) -> Tensor | None:
        """Return the anchored keys: [B, k], none of them where a single query is in the prompt."""
        anchored, generated = self.window.anchored, self.window.generated
        if anchored is None:
            return None
        if plan.queries != "all" and isinstance(generated, Tensor) and self.query.shape[2] == 1:
            anchored = anchored * generated[-1:].to(anchored.device)
        return anchored.to(self.query.device)

    def kernel_arguments(self) -> dict[str, Any]:
        """Return what `anchor_attention` needs besides the tensors.

        Raises:
            ValueError: the mask holds numbers, so that what it hides cannot be told from a bias, or
                the model asks for what Radar's attention does not serve.
        """
        if self.mask is not None and self.mask.dtype != torch.bool:
            raise ValueError(
                f"the 4-D attention mask has dtype {self.mask.dtype}; steering needs a bool mask "
                "(True = may attend) or the usual 2-D one"
            )
        for name in UNSERVED_KEYWORDS:
            if self.keywords.get(name) is not None:
                raise ValueError(
                    f"the model gives its attention {name}, which Radar's does not serve; it "
                    "cannot be steered"
                )
        return {
            "mask": self.mask,
            "causal": self.query.shape[2] > 1 and (self.mask is None or self.window.compact),
            "scale": self.scaling,
            "softcap": self.keywords.get("softcap"),
            "sinks": self.keywords.get("s_aux"),
        }


@dataclass
class AttentionHook:
    """The state of one steered model's attention: anchors, plans, and what was called.

    Args:
        method: the steering method.
        anchors: [batch, prompt] bool, or float32 factors; None for nothing anchored.
        native_name: the attention implementation that the model had ("sdpa" or "eager").
        plans: what the method does in each layer, on all its heads; None for layers left alone.
        layer_types: transformers' name for the kind of every layer's attention; None if all alike.
        modules: the attention modules to steer; others, such as a vision tower's, are left alone.
        only_generated: whether some layer steers only the queries of generated tokens.
        hide_anchors: whether the second half of a doubled batch cannot see the anchors.
        hidden_from: the first position whose token cannot see the anchors there.
        doubled: whether the forward pass at work runs both branches.
        entered: whether the model's own hooks have seen the forward pass at work.
        packed: how both branches lie in one row, where the forward pass at work has them so.
        num_heads: number of query heads of a layer, over all processes.
        shards: how the heads are split over processes; None where they are not.
        measured: [B, heads] for each layer, filled by every forward pass; None not to measure.
        observe: called with every layer and its call before it is served; None for nobody.
        calls: how often each layer's attention has run.
        thread: the thread that last ran the model.
    """

    method: Method
    anchors: Tensor | None
    native_name: str
    plans: Sequence[LayerPlan | None]
    layer_types: Sequence[str] | None = None
    modules: frozenset[torch.nn.Module] = frozenset()
    only_generated: bool = False
    hide_anchors: bool = False
    hidden_from: int = 0
    doubled: bool = False
    entered: bool = False
    packed: Packed | None = None
    num_heads: int | None = None
    shards: Shards | None = None
    measured: dict[int, Tensor] | None = None
    observe: Callable[[int, Call], None] | None = None
    calls: dict[int, int] = field(default_factory=dict)
    thread: int | None = None
    _placed: dict[int, tuple[int, torch.device, LayerPlan | None]] = field(default_factory=dict)
    _windows: list[Window] = field(default_factory=list)
    _ran: dict[int, Ran] = field(default_factory=dict)
    _rows: Tensor | None = None
    # Whether some layer or query is left to the model's own attention.
    uses_native: bool = field(init=False)

    def __post_init__(self) -> None:
        self.uses_native = any(plan is None or plan.queries != "all" for plan in self.plans)

    @property
    def prompt_length(self) -> int:
        """Number of tokens of the prompt that the anchors describe."""
        return 0 if self.anchors is None else self.anchors.shape[1]

    def anchored_rows(self, batch: int, length: int, device: torch.device) -> Tensor | None:
        """Return the anchors of every row over positions 0..length-1: [batch, length].

        Rows are repeated for beams and returned sequences; positions after the prompt are not
        anchored, unless the method biases generated keys too. The result is a view of a buffer that
        grows by doubling, so that a step copies nothing.

        Raises:
            ValueError: the batch is no multiple of the anchors' rows.
        """
        if self.anchors is None:
            return None
        rows = self._rows
        if (
            rows is None
            or rows.shape[0] != batch
            or rows.shape[1] < length
            or rows.device != device
            or not can_be_written(rows)
        ):
            count = self.anchors.shape[0]
            if batch % count:
                raise ValueError(
                    f"anchors has {count} rows, but the model runs on a batch of {batch}; expected "
                    "one row of anchors for every prompt"
                )
            # Not by the prompt's length where that is shorter: a compiled step would see it.
            capacity = max(2 * length + 256, self.prompt_length)
            rows = torch.zeros(batch, capacity, dtype=self.anchors.dtype, device=device)
            rows[:, self.prompt_length :] = getattr(self.method, "keep_generated", False)
            repeated = self.anchors.to(device).repeat_interleave(batch // count, dim=0)
            rows[:, : self.prompt_length] = repeated
            self._rows = rows
        return rows[:, :length]

    def measured_mass(self) -> Tensor:
        """Return what the last forward pass measured: float32 [B, layers, heads]."""
        assert self.measured is not None
        mass = torch.stack([self.measured[layer] for layer in range(len(self.plans))], dim=1)
        whole = self.shards is None or mass.shape[2] == self.num_heads
        return mass if whole else self.shards.gathered(mass)  # type: ignore[union-attr]

    def is_at_work(self) -> bool:
        """Whether this thread runs the model; another's call, which is refused, changes nothing."""
        return self.thread == threading.get_ident()

    def forget_windows(self) -> None:
        """Drop what is only true of one forward pass."""
        self._windows.clear()

    def leave(self) -> None:
        """End a forward pass of the model."""
        self.forget_windows()
        self.entered = False

    def count_compiled_calls(self) -> None:
        """Count the layers that a compiled forward pass has run, once it has ended."""
        for layer, ran in self._ran.items():
            if ran.compiled:
                ran.compiled = False
                self.calls[layer] = self.calls.get(layer, 0) + 1

    def anchored_keys(
        self, batch: int, start: int, length: int, device: torch.device
    ) -> Tensor | None:
        """Return which keys at positions start..start+length-1 are anchored: [batch, length]."""
        if self.anchors is None:
            return None
        if not torch.compiler.is_compiling():
            rows = self.anchored_rows(batch, start + length, device)
            return None if rows is None else rows[:, start:]
        # Traced without a buffer, whose size would be one more thing to compile for.
        last = self.prompt_length - 1
        positions = torch.arange(start, start + length, device=device)
        anchored = self.anchors.to(device)[:, positions.clamp(max=last)]
        keeps = getattr(self.method, "keep_generated", False)
        anchored = anchored.masked_fill(positions > last, keeps)
        return anchored.repeat_interleave(batch // anchored.shape[0], dim=0)

    def generated_queries(self, length: int, offset: int | Tensor) -> int | Tensor | None:
        """Return which queries predict generated tokens; see `Window.generated`."""
        if not self.only_generated or self.anchors is None:
            return None
        first = self.prompt_length - 1
        if isinstance(offset, Tensor):
            if length == 1 or torch.compiler.is_compiling():
                return offset + torch.arange(length, device=offset.device) >= first
            offset = int(offset)  # a static cache's prefill: one read for each prompt
        return max(0, min(length, offset + length - first))

    # -- the mask function -------------------------------------------------------------------------

    def make_mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int | Tensor = 0,
        kv_offset: int = 0,
        attention_mask: Tensor | None = None,
        allow_is_causal_skip: bool = True,
        device: torch.device | str = "cpu",
        **kwargs: Any,
    ) -> Tensor | None:
        """Build the mask of a forward pass, and note where its keys lie.

        In the second half of a doubled batch the anchored keys are hidden. Where the pattern is
        plain causality the mask only says which keys may be seen, bool [B, 1, 1, k] or None for
        all, and the attention function adds causality itself; else it is bool [B, 1, q, k].
        """
        if self.packed is not None:
            return None  # each branch has a mask of its own
        device = torch.device(device)
        arguments = dict(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            device=device,
            **kwargs,
        )
        local = kwargs.get("local_size") is not None
        # A static cache's offset is its own counter: it moves on before the layers' attention runs.
        first = q_offset.clone() if isinstance(q_offset, Tensor) else q_offset
        rows = batch_size // 2 if self.doubled else batch_size
        window = Window(
            kv_length,
            q_length,
            self.anchored_keys(rows, kv_offset, kv_length, device),
            self.generated_queries(q_length, first),
            first,
            local=local,
        )
        self._windows.append(window)
        if self.uses_native:
            window.native_mask = ALL_MASK_ATTENTION_FUNCTIONS[self.native_name](
                attention_mask=attention_mask,
                allow_is_causal_skip=allow_is_causal_skip,
                **arguments,
            )
        hides = self.doubled and self.hide_anchors
        for_some = hides and self._hides_from_some(q_offset)
        end = kv_offset + kv_length
        plainly_causal = (
            allow_is_causal_skip  # else the model itself reads the mask
            and kwargs.get("mask_function") is causal_mask_function
            and not local
            and not for_some
            and isinstance(q_offset, int)
            and q_offset + q_length == end
            and (attention_mask is None or attention_mask.shape[1] == end)
        )
        if hides and not for_some:
            attention_mask = self._hide(attention_mask, batch_size, end, device)
        if not plainly_causal:
            window.mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](
                attention_mask=attention_mask, allow_is_causal_skip=False, **arguments
            )
        elif attention_mask is not None:
            window.mask = attention_mask[:, None, None, kv_offset:]
            window.compact = True
        if for_some:
            assert window.mask is not None
            both = window.mask.expand(batch_size, -1, -1, -1).clone()
            both[batch_size // 2 :] &= ~self._hidden_keys(window, q_length, device)
            window.mask = both
        return window.mask

    def _hides_from_some(self, query_offset: int | Tensor) -> bool:
        """Whether some tokens of a pass may see the anchors in the second branch, others not."""
        if isinstance(query_offset, Tensor):
            return self.hidden_from > 0
        return query_offset < self.hidden_from

    def _hidden_keys(self, window: Window, queries: int, device: torch.device) -> Tensor:
        """Return what the second branch hides: bool [batch, 1, q, k]."""
        assert window.anchored is not None
        anchored = window.anchored[:, None, None].bool()
        if self.hidden_from == 0:
            return anchored
        position = window.query_offset + torch.arange(queries, device=device)
        return anchored & (position >= self.hidden_from)[None, None, :, None]

    def _hide(
        self, attention_mask: Tensor | None, batch: int, length: int, device: torch.device
    ) -> Tensor:
        """Return a 2-D mask whose second half of rows cannot see the anchors: bool [batch, n]."""
        half = batch // 2
        visible = torch.ones(batch, length, dtype=torch.bool, device=device)
        if attention_mask is not None:
            seen = attention_mask[:, :length].to(device=device, dtype=torch.bool)
            visible[:, : seen.shape[1]] = seen
        anchored = self.anchored_rows(half, length, device)
        if anchored is not None:
            visible[half:] &= ~anchored.bool()
        return visible

    def double_ready_mask(self, mask: Tensor, batch: int, queries: int) -> Tensor:
        """Double a 4-D bool mask made before the forward pass; one half may lose the anchors.

        Args:
            mask: bool [B or 1, 1, q or 1, k], as generate builds it for static caches.
            batch: B, rows of the pass.
            queries: q, tokens of the pass.

        Returns:
            bool [2B, 1, q, k].

        Raises:
            ValueError: the mask is not bool, so that what it hides cannot be told from a bias.
        """
        if mask.dtype != torch.bool:
            raise ValueError(
                f"the 4-D attention mask has dtype {mask.dtype}; steering needs a bool mask (True "
                "= may attend) or the usual 2-D one"
            )
        window = self._window(queries, mask.shape[-1], mask, None, batch, mask.device)
        first = second = mask.expand(batch, -1, queries, -1)
        if self.hide_anchors:
            second = first & ~self._hidden_keys(window, queries, mask.device)
        # Another one, since the layers of a model that is compiled look at it in their graph.
        both = replace(window, mask=torch.cat([first, second]))
        self._windows.append(both)
        assert both.mask is not None
        return both.mask

    # -- the attention function --------------------------------------------------------------------

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Serve one layer's attention: Radar's where the plan steers it, else the model's own."""
        if module not in self.modules:
            function = native_attention(module, self.native_name)
            return function(
                module,
                query,
                key,
                value,
                attention_mask,
                scaling=scaling,
                dropout=dropout,
                **kwargs,
            )
        if not self.entered:
            raise RuntimeError(
                "a steered model was run past the hooks that it is entered by: by its `forward`, a "
                "part of it alone, or a wrapper around it; call model(...) or model.generate(...), "
                "and steer the wrapper where there is one"
            )
        layer: int = module.layer_idx  # type: ignore[assignment]
        if torch.compiler.is_compiling():
            self._ran[layer].compiled = True
        else:
            self.calls[layer] = self.calls.get(layer, 0) + 1
        if dropout:
            raise RuntimeError("attention dropout under steering; call model.eval() first")
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if self.packed is not None:
            return self._attend_packed(self.packed, query, key, value, scaling, kwargs), None
        plan = self._plan(layer, query.shape[1], query.device)
        rows = query.shape[0] // 2 if self.doubled else query.shape[0]
        window = self._window(
            query.shape[2], key.shape[2], attention_mask, layer, rows, query.device
        )
        call = Call(query, key, value, attention_mask, window, scaling, kwargs)
        if self.measured is not None:
            self.measured[layer] = self._measure(plan or LayerPlan(), call)
        if self.observe is not None:
            self.observe(layer, call)
        if plan is None:
            return self._native(module, call)
        generated = None if plan.queries == "all" else window.generated
        if generated is None or (query.shape[2] == 1 and isinstance(generated, Tensor)):
            return self._steer(plan, call), None
        if isinstance(generated, Tensor):
            out, _ = self._native(module, call)
            chosen = generated[-query.shape[2] :].to(out.device)[None, :, None, None]
            return torch.where(chosen, self._steer(plan, call), out), None
        # Layers that share keys may be given fewer queries than the pass has.
        generated = min(generated, query.shape[2])
        if generated == 0:
            return self._native(module, call)
        if generated == query.shape[2]:
            return self._steer(plan, call), None
        out, _ = self._native(module, call)
        last = self._steer(plan, call.last_queries(generated))
        return torch.cat([out[:, :-generated], last], dim=1), None

    def _steer(self, plan: LayerPlan, call: Call) -> Tensor:
        """Run Radar's attention with a layer's plan: [B, q, heads, D]."""
        shared = call.kernel_arguments()
        anchors = None
        if plan.bias is not None or plan.target_mass is not None:
            anchors = call.anchored(plan)
        if anchors is None:
            return self._plain(call, shared).transpose(1, 2)
        out = anchor_attention(
            call.query,
            call.key,
            call.value,
            anchors,
            bias=plan.bias,
            target_mass=plan.target_mass,
            target_mode="exact" if plan.exact else "at_least",
            **shared,
        )
        assert isinstance(out, Tensor)
        if plan.left_alone is not None:
            plain = self._plain(call, shared)
            out = torch.where(plan.left_alone[None, :, None, None], plain, out)
        return out.transpose(1, 2)

    def _plain(self, call: Call, shared: dict[str, Any]) -> Tensor:
        """Run Radar's attention with nothing anchored: [B, heads, q, D]."""
        out = anchor_attention(call.query, call.key, call.value, None, **shared)
        assert isinstance(out, Tensor)
        return out

    def _attend_packed(
        self,
        packed: Packed,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        keywords: dict[str, Any],
    ) -> Tensor:
        """Run the attention of both branches of a packed row: [B, q, heads, D]."""
        window = Window(packed.prompt, packed.prompt, compact=True)
        seen, visible = (
            None if mask is None else mask[:, None, None] for mask in (packed.seen, packed.visible)
        )
        first = Call(
            packed.whole(query),
            packed.whole(key),
            packed.whole(value),
            seen,
            window,
            scaling,
            keywords,
        )
        second = Call(
            packed.anew(query),
            packed.second(key),
            packed.second(value),
            visible,
            window,
            scaling,
            keywords,
        )
        outs = [self._plain(call, call.kernel_arguments()) for call in (first, second)]
        return torch.cat([out.transpose(1, 2) for out in outs], dim=1)

    def _measure(self, plan: LayerPlan, call: Call) -> Tensor:
        """Return the share of the last query's attention on the anchors, as steered: [B, heads]."""
        anchors = call.anchored(LayerPlan())
        assert anchors is not None
        rows = anchors.shape[0]
        last = call.last_queries(1).first_rows(rows)
        shared = last.kernel_arguments()
        if plan.bias is not None and anchors.dtype != torch.bool:
            return self._measure_factors(plan.bias, last, anchors, shared)
        _, mass = anchor_attention(
            last.query, last.key, last.value, anchors, return_mass=True, **shared
        )
        mass = mass[:, :, 0]
        if plan.bias is not None:
            return torch.sigmoid(torch.logit(mass) + plan.bias)
        if plan.target_mass is not None:
            target = plan.target_mass.expand_as(mass)
            wanted = target if plan.exact else torch.maximum(mass, target)
            movable = (mass > 0) & (mass < 1)
            if plan.left_alone is not None:
                movable &= ~plan.left_alone
            return torch.where(movable, wanted, mass)
        return mass

    def _measure_factors(
        self, bias: Tensor, last: Call, anchors: Tensor, shared: dict[str, Any]
    ) -> Tensor:
        """Return the share that anchors of several factors get under a bias: [B, heads].

        It is the output where an anchored key's value is 1 and any other's 0.
        """
        heads = last.key.shape[1]
        value = (anchors != 0).to(last.value.dtype)[:, None, :, None].expand(-1, heads, -1, -1)
        out = anchor_attention(last.query, last.key, value, anchors, bias=bias, **shared)
        assert isinstance(out, Tensor)
        return out[:, :, 0, 0].float()

    def _native(self, module: torch.nn.Module, call: Call) -> tuple[Tensor, Tensor | None]:
        """Run the attention that the model had, with the mask that it would have had."""
        function = native_attention(module, self.native_name)
        mask, queries = call.window.native_mask, call.query.shape[2]
        if queries < call.window.query_length:
            if mask is not None:
                mask = mask[..., -queries:, :]
            elif queries > 1:  # sdpa would take the last queries for the first
                keys = call.key.shape[2]
                mask = torch.ones(queries, keys, dtype=torch.bool, device=call.query.device)
                mask = mask.tril(keys - queries)[None, None]
        return function(
            module,
            call.query,
            call.key,
            call.value,
            mask,
            scaling=call.scaling,
            dropout=0.0,
            **call.keywords,
        )

    # -- lookups -----------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make what a compiled pass looks up, so that it need not be made while tracing."""
        for module in self.modules:
            self._ran[module.layer_idx] = Ran()  # type: ignore[index]
            weight = next(module.parameters(), None)
            heads = self.num_heads
            if self.shards is not None and heads is not None:
                heads //= self.shards.size
            if weight is not None and isinstance(heads, int) and weight.device.type != "meta":
                self._plan(module.layer_idx, heads, weight.device)  # type: ignore[arg-type]

    def _plan(self, layer: int, heads: int, device: torch.device) -> LayerPlan | None:
        placed = self._placed.get(layer)
        if placed is not None and placed[0] == heads and placed[1] == device:
            return placed[2]
        # Where heads are split, a layer that gathers them still has all of them.
        split = self.shards is not None and heads * self.shards.size == self.num_heads
        count = heads * self.shards.size if split else heads  # type: ignore[union-attr]
        known = count == self.num_heads and layer < len(self.plans)
        plan = self.plans[layer] if known else self.method.layer_plan(layer, len(self.plans), count)
        if plan is not None and split:
            plan = self.shards.own(plan, heads)  # type: ignore[union-attr]
        if plan is not None:
            bias, target, left_alone = (
                None if value is None else value.to(device)
                for value in (plan.bias, plan.target_mass, plan.left_alone)
            )
            plan = replace(plan, bias=bias, target_mass=target, left_alone=left_alone)
        self._placed[layer] = (heads, device, plan)
        return plan

    def _window(
        self,
        queries: int,
        keys: int,
        mask: Tensor | None,
        layer: int | None,
        rows: int,
        device: torch.device,
    ) -> Window:
        """Return the window that a mask was made for: full and windowed layers may both be at work.

        A mask that is not the very one that was made (moved to another device, say) goes by the
        kind of the layer that was given it.
        """
        windows = [window for window in reversed(self._windows) if window.key_length == keys]
        kinds = None if layer is None else self.layer_types
        local = kinds is not None and kinds[layer] != "full_attention"  # type: ignore[index]
        for window in windows:
            if window.mask is mask:
                return window
        for window in windows:
            if kinds is None or window.local == local:
                return window
        # A 4-D mask from the caller bypasses the mask function: its keys start at position 0.
        return Window(
            keys,
            queries,
            self.anchored_keys(rows, 0, keys, device),
            self.generated_queries(queries, keys - queries),
            keys - queries,
            native_mask=mask,
        )


def native_attention(module: torch.nn.Module, name: str) -> Callable[..., Any]:
    """Return the attention function that a module would call under the implementation `name`.

    Eager attention is a function of the module's own modeling file; the others are registered.
    """
    if name != "eager":
        return ALL_ATTENTION_FUNCTIONS[name]
    namespace = sys.modules[type(module).__module__]
    return namespace.eager_attention_forward
