"""Putting a method on a model for the length of a `with` block, and taking it off again."""

from __future__ import annotations

import copy
import itertools
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedConfig

from radar_core.hooks import released_spa
from radar_core.hooks.attention import SUPPORTED_IMPLEMENTATIONS, AttentionHook, native_attention
from radar_core.hooks.branches import TwoBranches
from radar_core.hooks.cache import given_cache, let_grow
from radar_core.hooks.few_rows import serve_few_rows
from radar_core.hooks.keys import KeyHook, check_keys
from radar_core.hooks.parts import Parts
from radar_core.hooks.prompts import call_arguments, describe, given_tokens
from radar_core.hooks.provenance import Provenance, SteeredCache
from radar_core.hooks.second_prompt import SecondPromptBranches
from radar_core.hooks.shards import shards
from radar_core.hooks.undo import Undo, uninterrupted
from radar_core.hooks.untraced import placed, untraced
from radar_core.methods.key_edit import KeyEdit
from radar_core.methods.method import LARGEST, LayerPlan, Method, NoSteering
from radar_core.methods.second_prompt import SecondPrompt
from radar_core.methods.spa import SPA
from radar_core.methods.two_branch import TwoBranch

# Names of the models' steered attention: a model compiled under one is found compiled again.
_names = itertools.count()
_named: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_steered: weakref.WeakKeyDictionary[Any, Claim] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
# Kinds of layers that carry what they read on in a state, and that mix tokens beside attention.
STATEFUL_LAYERS = {"linear_attention", "mamba", "hybrid", "hybrid_sliding"}
MIXING_LAYERS = {"conv"}
# States that a decoder attends to beside its prompt.
ELSEWHERE_INPUTS = ("encoder_hidden_states", "cross_attention_states")
# Names of attention implementations under which steered models run.
STEERED_NAME = "radar_"


@dataclass(frozen=True)
class Steering:
    """What a `with` block put on a model.

    Args:
        method: the method, as given but for a mask token that the model has settled.
        active: False where nothing had to be hooked (strength 1, bias 0, nothing anchored).
        attention: the attention hook's state; None where none is hooked, or where only keys are
            edited.
        keys: the key hook's state; None unless the method edits keys.
    """

    method: Method
    active: bool
    attention: AttentionHook | None = field(default=None, repr=False)
    keys: KeyHook | None = field(default=None, repr=False)

    @property
    def calls(self) -> dict[int, int]:
        """How often each layer's attention has run, or its keys were edited, by layer."""
        hook = self.keys or self.attention
        return {} if hook is None else dict(hook.calls)


def attach(
    model: Any, method: Method, anchors: Any = None, *, measure: bool = False
) -> AbstractContextManager[Steering]:
    """Steer a model inside a `with` block; see `Method.applied_to`.

    Args:
        model: a transformers causal language model in evaluation mode.
        method: what to do.
        anchors: [batch, prompt] of the prompt's shape, or None.
        measure: also record, for each layer, the share of the last query's attention that the
            anchors get (`Steering.attention.measured`).
    """
    return Attachment(model, method, anchors, measure)


class Attachment(AbstractContextManager[Steering]):
    """One method on one model: all that it changed, and how to take that back.

    Putting it on and taking it off cannot be interrupted, by Ctrl-C say; what is left of it, where
    the block was never left, is taken off with the last reference.
    """

    def __init__(self, model: Any, method: Method, anchors: Any, measure: bool) -> None:
        self.model = unwrapped(model)
        self.method = method
        self.anchors = anchors
        self.measure = measure
        self._entry: Entry | None = None

    def __enter__(self) -> Steering:
        entry = Entry(self)

        def put_on() -> None:
            entry.steering = self._put_on(entry.undo)
            self._entry = entry

        try:
            uninterrupted(put_on)
        except BaseException:
            entry.take_off()
            raise
        assert entry.steering is not None
        return entry.steering

    def __exit__(self, kind: Any, *raised: object) -> None:
        entry = self._entry
        if entry is None:
            return
        steers = entry.steering is not None and entry.steering.active
        unfinished = kind is None and steers and is_run_elsewhere(self.model)
        try:
            entry.take_off()
        except BaseException:
            entry.take_off()
            raise
        if unfinished:
            raise RuntimeError(
                f"the steered block was left while another thread is running "
                f"{type(self.model).__name__}, whose reply is steered no longer; wait for that "
                "thread (join it) before leaving the block"
            )

    def _put_on(self, undo: Undo) -> Steering:
        model, method = self.model, self.method
        mask = check_anchors(self.anchors, method)
        check_is_model(model)
        claim(model, method, undo)
        parts = Parts.of(model)
        check_can_be_steered(parts, method)
        check_strengths(method, mask)
        check_idle(model)
        if isinstance(method, SPA):
            method = method.settled(parts.config)
        by_anchors = needs_anchors(method, mask)
        steers = (mask is not None or not by_anchors) and not method.is_identity
        if not (steers or self.measure or isinstance(method, NoSteering)):
            return Steering(method, active=False)
        refuse_copies([model], undo)
        if steers and isinstance(method, SPA) and method.reference is not None:
            assert mask is not None
            released_spa.put_on(model, method, mask, undo)
            return Steering(method, active=True)
        acting = method if steers else NoSteering()
        plans = layer_plans(acting, parts.config)
        keys = hook = None
        if steers and isinstance(method, KeyEdit):
            assert mask is not None
            keys = KeyHook(parts, method, mask)
        if keys is None or self.measure:
            hook = attention_hook(parts, acting, plans, mask, self.measure)
            replace_configs(parts, register(model, hook, undo), undo)
        if mask is not None:
            describe(model, mask, undo)
        Watch(model, hook, Provenance.of(acting, plans, mask)).install(model, undo)
        serve_few_rows(parts.modules, undo)
        if hook is not None and steers and isinstance(method, SPA):
            TwoBranches(model, hook, method).install(undo)
        elif hook is not None and steers and isinstance(method, SecondPrompt):
            SecondPromptBranches(model, hook, method).install(undo)
        if keys is not None:
            keys.install(model, undo)
        return Steering(method, active=True, attention=hook, keys=keys)


class Entry:
    """One time that a block was entered: what it put on the model, and how to take that off.

    Every time has its own, so that one that is refused takes off nothing of one that is at work.
    """

    def __init__(self, block: Attachment) -> None:
        self.undo = Undo()
        self.steering: Steering | None = None
        self._forgotten = weakref.finalize(block, self.undo.run)

    def take_off(self) -> None:
        """Take everything off the model; harmless when that was done before."""

        def take_off() -> None:
            self.undo.run()
            self._forgotten.detach()

        uninterrupted(take_off)


def attention_hook(
    parts: Parts,
    method: Method,
    plans: Sequence[LayerPlan | None],
    anchors: Tensor | None,
    measure: bool,
) -> AttentionHook:
    """Return the state of a model's steered attention; nothing is installed yet."""
    config = parts.config
    hook = AttentionHook(
        method=method,
        anchors=None if anchors is None else placed(anchors, parts.model),
        native_name=config._attn_implementation,
        plans=plans,
        layer_types=getattr(config, "layer_types", None),
        modules=frozenset(parts.attention),
        only_generated=getattr(method, "queries", "all") != "all",
        hide_anchors=isinstance(method, SPA) and method.masking == "attention",
        hidden_from=direct_from(method, anchors),
        num_heads=getattr(config, "num_attention_heads", None),
        shards=shards(parts.model),
        measured={} if measure else None,
    )
    if hook.uses_native and hook.native_name == "eager":
        native_attention(parts.attention[0], "eager")
    hook.prepare()
    return hook


def needs_anchors(method: Method, anchors: Tensor | None) -> bool:
    """Return whether a method steers by anchors.

    Raises:
        ValueError: it does not, but was given some.
    """
    if not isinstance(method, TwoBranch) or method.needs_anchors:
        return True
    if anchors is not None:
        raise ValueError(
            "anchors marks tokens, but the method has a second prompt of its own; leave anchors "
            "out, or use SPA or CAD without context="
        )
    return False


def direct_from(method: Method, anchors: Tensor | None) -> int:
    """Return the first position whose token cannot see the anchors in the second branch."""
    if anchors is None or not isinstance(method, SPA) or method.branch != "direct":
        return 0
    return anchors.shape[1] - 1


def unwrapped(model: Any) -> Any:
    """Return the transformers model of a PEFT wrapper, any other model as it is.

    Raises:
        ValueError: the wrapper puts tokens of its own before the prompt.
    """
    configs = getattr(model, "peft_config", None)
    if configs is None or not hasattr(model, "get_base_model"):
        return model
    if any(getattr(config, "is_prompt_learning", False) for config in configs.values()):
        raise ValueError(
            f"{type(model).__name__} puts learned tokens before the prompt, which the anchors do "
            "not describe; steer a model with LoRA or other adapters of its weights"
        )
    return model.get_base_model()


# -- checks ----------------------------------------------------------------------------------------


def check_anchors(anchors: Any, method: Method) -> Tensor | None:
    """Turn the caller's anchors into bool (or float32 factors), None where nothing is anchored.

    Raises:
        ValueError: the shape or the values cannot be anchors, or a row anchors everything.
    """
    if anchors is None:
        return None
    mask = as_mask(anchors)
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
        elif isinstance(method, TwoBranch) or not hasattr(method, "bias"):
            raise ValueError(
                f"anchors holds factors, but {method.name} can only anchor a token or "
                "not; expected a bool mask, or AttentionBias, whose bias the factors scale"
            )
        else:
            mask = mask.float()
            largest = float(mask.abs().max()) * abs(method.bias)
            if largest > LARGEST:
                raise ValueError(
                    f"anchors holds factors that make the bias as large as {largest:.3g}; expected "
                    f"at most {LARGEST:g}"
                )
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
            f"row {int(whole.float().argmax())} of anchors, of shape {list(mask.shape)}, anchors "
            "every token of the prompt, which steers nothing; anchor the part that matters"
        )
    return mask


def as_mask(anchors: Any) -> Tensor:
    """Copy what was given as anchors into a tensor; its shape and values are not looked at."""
    expected = "expected a mask [batch, prompt tokens], True where a token is anchored"
    try:
        mask = torch.as_tensor(anchors).detach()
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"anchors is a {type(anchors).__name__} that makes no tensor; {expected}"
        ) from None
    kind = unreadable(mask)
    if kind is not None:
        raise ValueError(f"anchors is {kind}, whose values cannot be looked at; {expected}")
    return mask.clone()  # the caller may go on writing to his


def unreadable(tensor: Tensor) -> str | None:
    """Return what is odd about a tensor whose values cannot be compared, None where they can."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_meta:
        return "a tensor on the meta device"
    if tensor.layout != torch.strided:
        return f"a {str(tensor.layout).removeprefix('torch.')} tensor"
    if tensor.is_quantized or (tensor.is_floating_point() and tensor.dtype.itemsize < 2):
        return f"a tensor of {tensor.dtype}"
    return None


def check_is_model(model: Any) -> None:
    """Raise ValueError unless this is a decoder-only transformers model with an output layer."""
    name = type(model).__name__
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            f"{name} is what torch.compile(model) returned, which hooks do not reach; compile in "
            "place by model.compile(), or steer the model itself"
        )
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


def check_can_be_steered(parts: Parts, method: Method) -> None:
    """Raise unless the model can be steered as it stands; nothing is changed.

    Raises:
        ValueError: its attention cannot be hooked.
        RuntimeError: it is in training mode or checkpoints gradients.
    """
    model, name, config = parts.model, parts.name, parts.config
    if model.training:
        raise RuntimeError(
            f"{name} is in training mode; steering is for inference: call model.eval()"
        )
    if any(vars(module).get("gradient_checkpointing") for module in parts.modules):
        raise RuntimeError(
            f"{name} checkpoints gradients; steering is for inference: call "
            "model.gradient_checkpointing_disable()"
        )
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{name} keeps a recurrent state beside its attention, which would carry what is "
            "hidden or biased past the hooks; it cannot be steered"
        )
    if not type(model)._can_set_attn_implementation() or not parts.attention:
        raise ValueError(
            f"{name} does not call its attention through transformers' AttentionInterface, so it "
            "cannot be hooked; use a model that supports `model.set_attn_implementation`"
        )
    kinds = set(getattr(config, "layer_types", None) or ())
    unseen = kinds & (STATEFUL_LAYERS | (MIXING_LAYERS if isinstance(method, TwoBranch) else set()))
    if unseen:
        raise ValueError(
            f"{name} has layers of the kind {min(unseen)!r}, which pass on what attention hides: "
            f"{method.name} cannot steer it"
            + ("" if unseen & STATEFUL_LAYERS else "; use AttentionBias or TargetMass")
        )
    crossing = next((module for module in parts.attention if attends_elsewhere(module)), None)
    if crossing is not None:
        raise ValueError(
            f"{name} has {type(crossing).__name__} layers, which attend to other inputs than the "
            "prompt; it cannot be steered"
        )
    if any("Indexer" in type(module).__name__ for module in parts.modules):
        raise ValueError(
            f"{name} chooses by an indexer which keys its attention reads, which Radar's attention "
            "does not serve; it cannot be steered"
        )
    if any(hasattr(module, "prepare_dynamic_mask") for module in parts.attention):
        raise ValueError(
            f"{name} adds a dynamic mask of its own to the scores, which Radar's attention does "
            "not serve; it cannot be steered"
        )
    if not any(getattr(module, "is_causal", True) for module in parts.attention):
        raise ValueError(
            f"the attention of {name} is not causal: it is an encoder; Radar steers decoder-only "
            "models"
        )
    implementation = config._attn_implementation
    if implementation.startswith(STEERED_NAME):
        raise RuntimeError(
            f"{name} is a copy of a steered model, or was left steered; load it anew"
        )
    if implementation not in SUPPORTED_IMPLEMENTATIONS:
        raise ValueError(
            f"{name} uses the attention implementation {implementation!r}; expected one of "
            f"{list(SUPPORTED_IMPLEMENTATIONS)}: call model.set_attn_implementation('sdpa')"
        )
    if isinstance(method, KeyEdit):
        check_keys(parts, method)


def attends_elsewhere(module: Any) -> bool:
    """Whether an attention module attends to an encoder's states, not to the prompt itself."""
    return "CrossAttention" in type(module).__name__ or bool(
        getattr(module, "is_cross_attention", False)
    )


def check_strengths(method: Method, anchors: Tensor | None) -> None:
    """Raise ValueError if there are several strengths, but not one for every row of the anchors."""
    if anchors is None or not isinstance(method, TwoBranch):
        return
    count, rows = len(method.strengths()), anchors.shape[0]
    if count not in (1, rows):
        raise ValueError(
            f"strength has {count} values, but anchors has {rows} rows; expected one number, or "
            "one for every prompt"
        )


def check_idle(model: Any) -> None:
    """Raise RuntimeError if another thread is in the middle of running the model."""
    if is_run_elsewhere(model):
        raise RuntimeError(
            f"another thread is running {type(model).__name__}; wait for it, or load a second model"
        )


def is_run_elsewhere(model: Any) -> bool:
    """Whether another thread is in the middle of running the model."""
    others = sys._current_frames().keys() - {threading.get_ident()}
    return any(is_inside(model, thread) for thread in others)


def layer_plans(method: Method, config: Any) -> list[LayerPlan | None]:
    """Return what a method plans for the attention of each layer."""
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    return [method.layer_plan(layer, layers, heads) for layer in range(layers)]


def steered_layers(model: Any, method: Method) -> list[int]:
    """Return the layers of a model that a method steers."""
    if isinstance(method, KeyEdit):
        return list(method.steered_layers)
    plans = layer_plans(method, model.config.get_text_config(decoder=True))
    return [layer for layer, plan in enumerate(plans) if plan is not None]


# -- the parts of an attachment --------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """A model that is steered: by which thread and method, and its modules that are held."""

    thread: int
    method: Method
    parts: frozenset[torch.nn.Module]


def claim(model: Any, method: Method, undo: Undo) -> None:
    """Hold the model for this block alone, its parts too, which other models may share.

    Raises:
        RuntimeError: it or a part of it is being steered already, by this thread or another.
    """
    # Whatever is changed in a block is one of these; activations and the like may be anyone's.
    parts = {part for part in model.modules() if part._parameters or "config" in vars(part)}
    mine = Claim(threading.get_ident(), method, frozenset({model, *parts}))

    def release() -> None:
        with _lock:
            if _steered.get(model) is mine:
                del _steered[model]

    with _lock:
        for steered, claim in _steered.items():
            if claim.parts.isdisjoint(mine.parts):
                continue
            is_same = "is" if steered is model else "shares parts with a model that is"
            who = "this thread" if claim.thread == threading.get_ident() else "another thread"
            raise RuntimeError(
                f"{type(model).__name__} {is_same} already steered by {claim.method.name} in "
                f"{who}; leave that block first, or load a second model"
            )
        undo.add(release)
        _steered[model] = mine


def register(model: Any, hook: AttentionHook, undo: Undo) -> str:
    """Register the hook's attention and mask under the model's own name; return the name."""
    if model not in _named:
        _named[model] = f"{STEERED_NAME}{next(_names)}"
    name = _named[model]
    undo.add(AttentionInterface._global_mapping.pop, name, None)
    undo.add(AttentionMaskInterface._global_mapping.pop, name, None)
    AttentionInterface.register(name, hook.attend)
    AttentionMaskInterface.register(name, hook.make_mask)
    return name


def replace_configs(parts: Parts, name: str, undo: Undo) -> None:
    """Give the modules configs that ask for the attention `name`.

    They are shallow copies, since other models may share the objects: of every config that says
    how text attends, the text decoder's and those that hold it. A vision or audio tower keeps its
    own.
    """
    kind = type(parts.config)
    found = [(module, vars(module).get("config")) for module in parts.modules]
    copies: dict[int, PreTrainedConfig] = {}
    for _, old in found:
        if id(old) not in copies and isinstance(old, PreTrainedConfig) and holds(old, kind):
            copies[id(old)] = copy.copy(old)
    for config in copies.values():
        config._attn_implementation_internal = name
        for sub in config.sub_configs:
            nested = getattr(config, sub, None)
            if id(nested) in copies:
                setattr(config, sub, copies[id(nested)])
    steered = [(module, old) for module, old in found if id(old) in copies]
    refuse_copies([module for module, _ in steered], undo)

    def put_back() -> None:
        for module, old in steered:
            vars(module)["config"] = old

    undo.add(put_back)
    for module, old in steered:
        vars(module)["config"] = copies[id(old)]


def refuse_copies(modules: Sequence[torch.nn.Module], undo: Undo) -> None:
    """Let copying or pickling a module raise: the copy would stay steered for ever."""

    def refused(protocol: Any) -> Any:
        raise RuntimeError(
            "a steered model cannot be copied or pickled, the copy would stay steered for ever; "
            "leave the steered block first"
        )

    def put_back() -> None:
        for module in modules:
            vars(module).pop("__reduce_ex__", None)

    undo.add(put_back)
    for module in modules:
        vars(module)["__reduce_ex__"] = refused


def holds(config: Any, kind: type) -> bool:
    """Whether a config is of a kind, or has one of that kind inside."""
    return isinstance(config, kind) or any(
        holds(getattr(config, sub, None), kind) for sub in getattr(config, "sub_configs", ())
    )


class Watch:
    """Checks every forward pass of a steered model, and raises if a layer misses the hook.

    Args:
        model: the model, its configs replaced.
        hook: its attention; None where the model's own is left in place.
        provenance: marks the caches that the steered model fills.
    """

    def __init__(self, model: Any, hook: AttentionHook | None, provenance: Provenance) -> None:
        self.hook = hook
        self.provenance = provenance
        self.config = model.config
        self.text_config = model.config.get_text_config(decoder=True)
        self.name = self.text_config._attn_implementation_internal
        self.checked = False
        self.thread: int | None = None
        self._serving: SteeredCache | None = None
        self._lock = threading.Lock()

    def install(self, model: Any, undo: Undo) -> None:
        """Hook the model."""
        before = model.register_forward_pre_hook(self.before, with_kwargs=True)
        undo.add(before.remove)
        after = model.register_forward_hook(self.after, always_call=True)
        undo.add(after.remove)

    @untraced
    def before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._check_thread(model)
        if model.training:
            raise RuntimeError(
                "the model was put into training mode while steered; call model.eval()"
            )
        asked = self.text_config._attn_implementation_internal
        if asked != self.name or model.config is not self.config:
            raise RuntimeError(
                f"the model's attention implementation was set to {asked!r} or its config replaced "
                "while steered; do that before the steered block"
            )
        asked = kwargs.get("output_attentions") or self.text_config.output_attentions
        if asked and self.hook is not None:
            raise ValueError(
                "output_attentions=True cannot be had while steered, the weights are never formed; "
                "measure what anchors get with radar_core.attention_mass(model, ...), or leave the "
                "block"
            )
        for name in ELSEWHERE_INPUTS:
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{name} was given, but a steered model attends to its prompt alone; leave the "
                    "steered block for such calls"
                )
        cache = given_cache(kwargs)[1]
        if cache is not None:
            added = given_tokens(call_arguments(model.forward, args, kwargs)).shape[1]
            self._serving = self.provenance.admit(cache, added)
        let_grow(cache)
        if self.hook is not None:
            self.hook.entered = True

    @untraced
    def after(self, model: Any, args: Any, output: Any) -> None:
        if self.thread != threading.get_ident():
            return  # this thread was refused, another one's pass is at work
        self._close(output)
        if self.hook is None:
            return
        self.hook.count_compiled_calls()
        self.hook.leave()
        if self.checked or output is None:
            return
        self.checked = True
        expected: set[int] = {module.layer_idx for module in self.hook.modules}  # type: ignore[misc]
        missing = sorted(expected - self.hook.calls.keys())
        if missing:
            raise RuntimeError(
                f"layers {missing} of {type(model).__name__} never reached Radar's attention, so "
                "they would not be steered; this model cannot be hooked"
            )

    def _close(self, output: Any) -> None:
        """End the pass for its cache; one that the model made itself is marked now."""
        cache, self._serving = self._serving, None
        if cache is not None:
            cache.serving = False
        elif isinstance(output, Mapping) and isinstance(made := given_cache(output)[1], Cache):
            self.provenance.mark(made)

    def _check_thread(self, model: Any) -> None:
        """Refuse a thread that calls the model while another one is inside it.

        A forward pass keeps its state in the hooks, so two at a time would mix theirs. A thread
        that was started in the block, to stream from, is as good as the one that entered it.
        """
        thread = threading.get_ident()
        if thread == self.thread:
            return
        with self._lock:
            if self.thread is not None and is_inside(model, self.thread):
                raise RuntimeError(
                    f"{type(model).__name__} is steered, and another thread is running it; a "
                    "steered model serves one thread at a time: take turns, or load a second model"
                )
            self.thread = thread
            if self.hook is not None:
                self.hook.thread = thread


def is_inside(model: Any, thread: int) -> bool:
    """Whether a thread is at work in a model's `generate` or forward pass."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_name in ("generate", "_call_impl") and (
            frame.f_locals.get("self") is model
        ):
            return True
        frame = frame.f_back
    return False
