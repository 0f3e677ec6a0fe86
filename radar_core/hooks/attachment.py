"""Putting a method on a model for the length of a `with` block, and taking it off again."""

from __future__ import annotations

import copy
import itertools
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from radar_core.hooks.attention import SUPPORTED_IMPLEMENTATIONS, AttentionHook, native_attention
from radar_core.hooks.branches import TwoBranches
from radar_core.hooks.cache import given_cache, let_grow
from radar_core.hooks.few_rows import few_row_linears
from radar_core.hooks.prompts import described
from radar_core.methods.method import Method, NoSteering
from radar_core.methods.spa import SPA

_names = itertools.count()
_steered: weakref.WeakKeyDictionary[Any, tuple[int, Method]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@dataclass(frozen=True)
class Steering:
    """What a `with` block put on a model.

    Args:
        method: the method, as given.
        active: False where nothing had to be hooked (strength 1, bias 0, nothing anchored).
        attention: the attention hook's state; None where not active.
    """

    method: Method
    active: bool
    attention: AttentionHook | None = field(default=None, repr=False)

    @property
    def calls(self) -> dict[int, int]:
        """How often each layer's attention has run, by layer."""
        return {} if self.attention is None else dict(self.attention.calls)


@contextmanager
def attach(
    model: Any, method: Method, anchors: Any = None, *, measure: bool = False
) -> Iterator[Steering]:
    """Steer a model inside a `with` block; see `Method.applied_to`.

    Args:
        model: a transformers causal language model in evaluation mode.
        method: what to do.
        anchors: [batch, prompt] of the prompt's shape, or None.
        measure: also record, for each layer, the share of the last query's attention that the
            anchors get (`Steering.attention.measured`).
    """
    mask = check_anchors(anchors, method)
    check_is_model(model)
    with ExitStack() as stack:
        stack.enter_context(claimed(model, method))
        check_can_be_steered(model)
        steers = mask is not None and not method.is_identity
        if not (steers or measure or isinstance(method, NoSteering)):
            yield Steering(method, active=False)
            return
        hook = attention_hook(model, method if steers else NoSteering(), mask, measure)
        stack.enter_context(interfaces(model, hook))
        if mask is not None:
            stack.enter_context(described(model, mask))
        stack.enter_context(watched(model, hook))
        stack.enter_context(few_row_linears(model))
        if hook.hide_anchors:
            assert isinstance(method, SPA)
            stack.enter_context(TwoBranches(model, hook, method.strengths()).hooked())
        yield Steering(method, active=True, attention=hook)


def attention_hook(
    model: Any, method: Method, anchors: Tensor | None, measure: bool
) -> AttentionHook:
    """Return the state of a model's steered attention; nothing is installed yet."""
    config = model.config.get_text_config(decoder=True)
    hook = AttentionHook(
        method=method,
        anchors=anchors,
        native_name=config._attn_implementation,
        num_layers=config.num_hidden_layers,
        layer_types=getattr(config, "layer_types", None),
        uses_native=needs_native(method, config),
        hide_anchors=isinstance(method, SPA),
        measured={} if measure else None,
    )
    if hook.uses_native and hook.native_name == "eager":
        native_attention(attention_modules(model)[0], "eager")
    return hook


# -- checks ----------------------------------------------------------------------------------------


def check_anchors(anchors: Any, method: Method) -> Tensor | None:
    """Turn the caller's anchors into bool (or float32 factors), None where nothing is anchored.

    Raises:
        ValueError: the shape or the values cannot be anchors, or a row anchors everything.
    """
    if anchors is None:
        return None
    mask = torch.as_tensor(anchors).detach()
    if mask.dim() != 2:
        raise ValueError(
            f"anchors has shape {list(mask.shape)}; expected [batch, prompt tokens], the shape of "
            "input_ids"
        )
    if mask.is_floating_point():
        if not bool(torch.isfinite(mask).all()):
            raise ValueError(
                "anchors has values that are not finite; expected True/False or numbers"
            )
        if bool(((mask == 0) | (mask == 1)).all()):
            mask = mask.bool()
        elif isinstance(method, SPA) or not hasattr(method, "bias"):
            raise ValueError(
                f"anchors holds factors, but {type(method).__name__} can only anchor a token or "
                "not; expected a bool mask"
            )
        else:
            mask = mask.float()
    elif mask.dtype != torch.bool:
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise ValueError(
                f"anchors has dtype {mask.dtype} with values besides 0 and 1; expected a mask"
            )
        mask = mask.bool()
    anchored = mask.bool()
    if not bool(anchored.any()):
        return None
    whole = anchored.all(dim=1)
    if bool(whole.any()) and mask.dtype == torch.bool:
        raise ValueError(
            f"row {int(whole.float().argmax())} of anchors anchors every token of the prompt, "
            "which steers nothing; anchor the part that matters"
        )
    return mask


def check_is_model(model: Any) -> None:
    """Raise ValueError unless this is a decoder-only transformers model with an output layer."""
    name = type(model).__name__
    config = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig) or not hasattr(model, "get_output_embeddings"):
        raise ValueError(
            f"{name} is no transformers model; expected a causal language model such as "
            "AutoModelForCausalLM.from_pretrained(...)"
        )
    if config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder; Radar steers decoder-only models")
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"{name} has no output layer, so it gives no logits; expected a causal language model "
            "such as AutoModelForCausalLM.from_pretrained(...)"
        )


def check_can_be_steered(model: Any) -> None:
    """Raise unless the model can be steered as it stands; nothing is changed.

    Raises:
        ValueError: its attention cannot be hooked.
        RuntimeError: it is in training mode or checkpoints gradients.
    """
    name = type(model).__name__
    if model.training:
        raise RuntimeError(
            f"{name} is in training mode; steering is for inference: call model.eval()"
        )
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise RuntimeError(
            f"{name} checkpoints gradients; steering is for inference: call "
            "model.gradient_checkpointing_disable()"
        )
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{name} keeps a recurrent state beside its attention, which would carry what is "
            "hidden or biased past the hooks; it cannot be steered"
        )
    if not type(model)._can_set_attn_implementation() or not attention_modules(model):
        raise ValueError(
            f"{name} does not call its attention through transformers' AttentionInterface, so it "
            "cannot be hooked; use a model that supports `model.set_attn_implementation`"
        )
    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    if implementation not in SUPPORTED_IMPLEMENTATIONS:
        raise ValueError(
            f"{name} uses the attention implementation {implementation!r}; expected one of "
            f"{list(SUPPORTED_IMPLEMENTATIONS)}: call model.set_attn_implementation('sdpa')"
        )


def attention_modules(model: Any) -> list[torch.nn.Module]:
    """Return the model's self-attention modules in layer order."""
    return [
        module
        for module in model.modules()
        if "Attention" in type(module).__name__
        and isinstance(getattr(module, "layer_idx", None), int)
    ]


def needs_native(method: Method, config: Any) -> bool:
    """Whether a method leaves some layers or queries to the model's own attention."""
    plans = [
        method.layer_plan(layer, config.num_hidden_layers, config.num_attention_heads)
        for layer in range(config.num_hidden_layers)
    ]
    return any(plan is None or plan.queries != "all" for plan in plans)


# -- the parts of an attachment --------------------------------------------------------------------


@contextmanager
def claimed(model: Any, method: Method) -> Iterator[None]:
    """Hold the model for this block alone.

    Raises:
        RuntimeError: it is being steered already, by this thread or another.
    """
    with _lock:
        if model in _steered:
            owner, other = _steered[model]
            who = "this thread" if owner == threading.get_ident() else "another thread"
            raise RuntimeError(
                f"{type(model).__name__} is already steered by {type(other).__name__} in {who}; "
                "leave that block first, or load a second model"
            )
        _steered[model] = (threading.get_ident(), method)
    try:
        yield
    finally:
        with _lock:
            del _steered[model]


@contextmanager
def interfaces(model: Any, hook: AttentionHook) -> Iterator[None]:
    """Register the hook under a name of its own and give the model configs that ask for it.

    The configs are shallow copies, since other models may share the objects; the old ones are put
    back on leaving.
    """
    name = f"radar_{next(_names)}"
    AttentionInterface.register(name, hook.attend)
    AttentionMaskInterface.register(name, hook.make_mask)
    replaced: list[tuple[torch.nn.Module, PreTrainedConfig]] = []
    try:
        copies = steered_configs(model, name)
        for module in model.modules():
            old = getattr(module, "config", None)
            if id(old) in copies:
                replaced.append((module, old))  # type: ignore[arg-type]
                module.config = copies[id(old)]
        yield
    finally:
        for module, old in replaced:
            module.config = old  # type: ignore[assignment]
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


def steered_configs(model: Any, name: str) -> dict[int, PreTrainedConfig]:
    """Return a copy of every config that the model's modules hold, by the old one's id."""
    old: dict[int, PreTrainedConfig] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            old[id(config)] = config
    copies = {key: copy.copy(config) for key, config in old.items()}
    for config in copies.values():
        config._attn_implementation_internal = name
        for sub in getattr(config, "sub_configs", {}):
            nested = getattr(config, sub, None)
            if id(nested) in copies:
                setattr(config, sub, copies[id(nested)])
    return copies


@contextmanager
def watched(model: Any, hook: AttentionHook) -> Iterator[None]:
    """Note what the model is called with, and raise if a layer's attention misses the hook."""
    expected: set[int] = {module.layer_idx for module in attention_modules(model)}  # type: ignore[misc]
    checked = False

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training:
            raise RuntimeError(
                "the model was put into training mode while steered; call model.eval()"
            )
        let_grow(given_cache(kwargs)[1])

    def after(module: Any, args: Any, output: Any) -> None:
        nonlocal checked
        hook.forget_windows()
        if checked or output is None:
            return
        checked = True
        missing = sorted(expected - hook.calls.keys())
        if missing:
            raise RuntimeError(
                f"layers {missing} of {type(model).__name__} never reached Radar's attention, so "
                "they would not be steered; this model cannot be hooked"
            )

    handles = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
