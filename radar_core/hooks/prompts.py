"""Refusing prompts that the anchors do not describe, before they are steered at wrong places."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor
from transformers import UnbatchedClassifierFreeGuidanceLogitsProcessor as Guidance

from radar_core.hooks.cache import given_cache
from radar_core.hooks.undo import Undo
from radar_core.hooks.untraced import untraced


def describe(model: Any, anchors: Tensor, undo: Undo) -> None:
    """Check what a model is called with against the anchors until it has met their prompt.

    `generate` knows its prompt, so that it is checked whole; other calls show theirs pass by pass.
    Once a pass has ended where the anchors end, all that follows is taken for generated: passes
    without a cache run the prompt again, each longer than the last.

    Args:
        model: the model; its `generate` is wrapped inside the block.
        anchors: [batch, prompt].
        undo: is told how to end this.
    """
    met = False
    generate = model.generate
    own = vars(model).get("generate")

    @functools.wraps(generate)
    def checked(*args: Any, **kwargs: Any) -> Any:
        nonlocal met
        check_generation(model, anchors, call_arguments(generate, args, kwargs))
        met = True
        return generate(*args, **kwargs)

    @untraced
    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal met
        if not met:
            met = check_pass(anchors.shape[1], call_arguments(module.forward, args, kwargs))

    def put_back() -> None:
        if own is not None:
            model.generate = own
        elif vars(model).get("generate") is checked:
            del model.generate

    undo.add(put_back)
    model.generate = checked
    undo.add(model.register_forward_pre_hook(before, with_kwargs=True).remove)


def call_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name."""
    if not args:
        return kwargs
    return {**inspect.signature(function).bind_partial(*args).arguments, **kwargs}


def given_tokens(arguments: dict[str, Any]) -> Tensor:
    """Return the token ids or embeddings [batch, tokens, ...] that a call runs the model on."""
    for name in ("input_ids", "inputs", "inputs_embeds"):
        if arguments.get(name) is not None:
            return arguments[name]
    raise ValueError("the model was called without input_ids and inputs_embeds")


def check_generation(model: Any, anchors: Tensor, arguments: dict[str, Any]) -> None:
    """Raise ValueError unless the anchors describe the prompt that `generate` is called with."""
    configs = (arguments, vars(arguments.get("generation_config") or model.generation_config))
    scale = next((s for c in configs if (s := c.get("guidance_scale")) is not None), 1)
    processors = arguments.get("logits_processor") or ()
    if scale != 1 or any(isinstance(processor, Guidance) for processor in processors):
        raise ValueError(
            "guidance_scale cannot be combined with steering, since it runs the model on prompts "
            "of its own; leave it out and use SPA, the same guidance with the anchors hidden: "
            f"SPA(strength={scale if scale != 1 else 1.5})"
        )
    prompt = given_tokens(arguments)
    _, cache = given_cache(arguments)
    if cache is None or int(cache.get_seq_length()) < anchors.shape[1]:
        check_shape(anchors, prompt, arguments.get("attention_mask"))


def check_pass(prompt_length: int, arguments: dict[str, Any]) -> bool:
    """Return whether a forward pass ends where the anchors end.

    Raises:
        ValueError: the prompt is shorter or longer than the anchors.
    """
    length = given_tokens(arguments).shape[1]
    _, cache = given_cache(arguments)
    past = 0 if cache is None else cache.get_seq_length()
    if isinstance(past, Tensor):
        if length == 1:
            return False  # not worth a read from the device for each token
        past = int(past)
    end = past + length
    if length == 1 and end < prompt_length:
        raise ValueError(
            f"the anchors describe a prompt of {prompt_length} tokens, but the model is "
            f"generating after {end}; give anchors of the prompt's own shape"
        )
    if length > 1 and past < prompt_length < end:
        raise ValueError(
            f"the anchors describe a prompt of {prompt_length} tokens, but the model is given "
            f"{end}; give anchors of the prompt's own shape, left padding included. To score a "
            "given answer, run the prompt first and the answer on its cache"
        )
    return end == prompt_length


def check_shape(anchors: Tensor, prompt: Tensor, attention_mask: Tensor | None) -> None:
    """Raise ValueError unless anchors have a prompt's shape and leave some of each prompt alone."""
    shape = list(prompt.shape[:2])
    if list(anchors.shape) != shape:
        raise ValueError(
            f"anchors has shape {list(anchors.shape)}; expected {shape}, the shape of the prompt"
        )
    anchored = anchors.bool()
    if (
        attention_mask is not None
        and attention_mask.dim() == 2
        and attention_mask.shape == anchors.shape
    ):
        padding = attention_mask.to(anchored.device) == 0
        if bool((anchored & padding).any()):
            raise ValueError("anchors marks tokens that attention_mask pads out")
        whole = (anchored | padding).all(dim=1) & anchored.any(dim=1)
        if bool(whole.any()):
            raise ValueError(
                f"row {int(whole.float().argmax())} of anchors anchors every token of its prompt, "
                "which steers nothing; anchor the part that matters"
            )
