"""Refusing prompts that the anchors do not describe, before they are steered at wrong places."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import UnbatchedClassifierFreeGuidanceLogitsProcessor as Guidance

from radar_core.hooks.cache import given_cache
from radar_core.hooks.undo import Undo
from radar_core.hooks.untraced import untraced


def describe(model: Any, anchors: Tensor, undo: Undo) -> None:
    """Check every prompt that a model is called with against the anchors.

    Args:
        model: the model; its `generate` is wrapped inside the block.
        anchors: [batch, prompt].
        undo: is told how to end this.
    """
    prompts = PromptCheck(model, anchors)
    replace_generate(model, prompts.generate, undo)
    refuse_continuous_batching(model, undo)
    undo.add(model.register_forward_pre_hook(prompts.before, with_kwargs=True).remove)


# What a model's tokens are called, given as ids or as embeddings.
TOKENS = ("input_ids", "inputs", "inputs_embeds")


class PromptCheck:
    """Follows the prompts that a model is called with, and refuses those that anchors do not fit.

    `generate` knows its prompt, so that it is checked whole; other calls show theirs pass by pass.
    A pass without a cache, or on an empty one, begins a prompt; once a pass has ended where the
    anchors end, what runs on its cache is taken for generated. One that begins with the very tokens
    of the last prompt repeats it, for each beam perhaps, and may go on behind it. Inside `generate`
    a pass that begins another prompt, from a logits processor say, is refused.

    Args:
        model: the model.
        anchors: [batch, prompt].
    """

    def __init__(self, model: Any, anchors: Tensor) -> None:
        self.model = model
        self.anchors = anchors
        self._met = False
        # The prompt's tokens so far, as ids, embeddings or both; none where not all were given.
        self._seen: list[Tensor] = []
        self._generates = False

    def generate(self, generate: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `generate`, its prompt checked."""
        arguments = call_arguments(generate, args, kwargs)
        check_generation(self.model, self.anchors, arguments)
        self._met = True
        # Given both, the model runs on embeddings first and on ids where it has no cache.
        given = [value for name in TOKENS if (value := arguments.get(name)) is not None]
        whole = all(value.shape[1] == self.anchors.shape[1] for value in given)
        self._seen = [value.detach().clone() for value in given] if whole else []
        self._generates = True
        try:
            return generate(*args, **kwargs)
        finally:
            self._generates = False

    @untraced
    def before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check a forward pass."""
        arguments = call_arguments(module.forward, args, kwargs)
        given = given_tokens(arguments)
        _, cache = given_cache(arguments)
        past = 0 if cache is None else cache.get_seq_length()
        if isinstance(past, Tensor):
            if given.shape[1] == 1:
                return  # not worth a read from the device for each token
            past = int(past)
        if not self._generates:
            self._check(arguments, given, cache is not None, past)
        elif past == 0 and not self._repeats(given):
            raise ValueError(ANOTHER_PROMPT)

    def _check(self, arguments: dict[str, Any], given: Tensor, has_cache: bool, past: int) -> None:
        """Check a forward pass that is not one of `generate`'s."""
        length = self.anchors.shape[1]
        mask = arguments.get("attention_mask")
        if past == 0:
            if not has_cache and given.shape[1] < length:
                raise ValueError(
                    f"the anchors describe a prompt of {length} tokens, but the model is given "
                    f"{given.shape[1]} without a cache; give anchors of the prompt's own shape or, "
                    "where these are the first tokens of it, an empty DynamicCache"
                )
            if self._met and self._repeats(given):
                check_seen(self.anchors, mask, 0, given.shape[1])
                return
            self._met, self._seen = False, []
        if self._met:
            return
        self._met = check_pass(self.anchors, given, past)
        check_seen(self.anchors, mask, past, past + given.shape[1])
        self._note(given, past)

    def _repeats(self, given: Tensor) -> bool:
        """Whether these are the tokens of the prompt that was run before, as far as both go."""
        length = self.anchors.shape[1]
        if not self._seen:  # it was given in part, on a cache: not to be told
            return given.shape[1] > length
        return any(begin_alike(given, seen, length) for seen in self._seen)

    def _note(self, given: Tensor, past: int) -> None:
        """Keep the prompt's tokens, as long as all before them were given too."""
        if past == 0:
            self._seen = [given.detach().clone()]
            return
        before = [seen for seen in self._seen if seen.shape[1] == past]
        self._seen = [
            torch.cat([seen, given.detach()], dim=1) for seen in before if seen.dim() == given.dim()
        ]


ANOTHER_PROMPT = (
    "the model is called on another prompt while generate runs on its own, and would be steered at "
    "wrong places; let a logits processor or the like call a second model, or generate outside the "
    "steered block"
)


def begin_alike(given: Tensor, prompt: Tensor, length: int) -> bool:
    """Whether two have the same first tokens, as far as both go, up to a length.

    Args:
        given: ids [b, n] or embeddings [b, n, d]; b may be a multiple of the prompt's rows, each
            repeated for beams.
        prompt: ids or embeddings [rows, m, ...].
        length: how many tokens are compared at most.
    """
    rows = prompt.shape[0]
    if given.dim() != prompt.dim() or given.shape[0] % rows:
        return False
    length = min(length, given.shape[1], prompt.shape[1])
    repeated = prompt[:, :length].repeat_interleave(given.shape[0] // rows, dim=0)
    return torch.equal(given[:, :length], repeated.to(given.device))


def replace_generate(model: Any, call: Callable[..., Any], undo: Undo) -> None:
    """Let a model's `generate` go through `call(generate, args, kwargs)`."""
    generate = model.generate
    own = vars(model).get("generate")

    @functools.wraps(generate)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return call(generate, args, kwargs)

    def put_back() -> None:
        if own is not None:
            model.generate = own
        elif vars(model).get("generate") is replaced:
            del model.generate

    undo.add(put_back)
    model.generate = replaced


def call_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name."""
    if not args:
        return kwargs
    return {**inspect.signature(function).bind_partial(*args).arguments, **kwargs}


def given_tokens(arguments: dict[str, Any]) -> Tensor:
    """Return the token ids or embeddings [batch, tokens, ...] that a call runs the model on."""
    for name in TOKENS:
        if arguments.get(name) is not None:
            return arguments[name]
    raise ValueError("the model was called without input_ids and inputs_embeds")


def check_generation(model: Any, anchors: Tensor, arguments: dict[str, Any]) -> None:
    """Raise ValueError unless `generate` is called with the anchors' prompt, in a mode that works.

    Raises:
        ValueError: the anchors do not describe the prompt, or a mode of generation is asked for
            that steering does not reach.
    """
    check_mode(model, arguments)
    check_prompt(anchors, arguments)


def check_prompt(anchors: Tensor, arguments: dict[str, Any]) -> None:
    """Raise ValueError unless anchors describe the prompt that `generate` is called with.

    What a cache already holds belongs to the prompt; where it reaches beyond the anchors, they need
    not cover the rest.
    """
    prompt = given_tokens(arguments)
    rows, length = prompt.shape[:2]
    mask = arguments.get("attention_mask")
    _, cache = given_cache(arguments)
    past = 0 if cache is None else int(cache.get_seq_length())
    if past:
        if mask is not None and mask.dim() == 2:
            length = max(length, mask.shape[1])  # the prompt may be given from the cache's end on
        if length <= past:
            raise ValueError(
                f"the prompt has {length} tokens and the cache holds {past} of them already, so "
                "none is left to run; cut the cache by cache.crop(-1) at least"
            )
    if not past or anchors.dim() != 2 or past < anchors.shape[1]:
        check_shape(anchors, (rows, length), mask)


def check_mode(model: Any, arguments: dict[str, Any]) -> None:
    """Raise ValueError if `generate` is asked for a mode that steering does not reach."""
    processors = arguments.get("logits_processor") or ()
    guided = any(isinstance(processor, Guidance) for processor in processors)
    scale = setting(model, arguments, "guidance_scale") or 1
    if scale != 1 or guided:
        raise ValueError(
            "guidance_scale cannot be combined with steering, since it runs the model on prompts "
            "of its own; leave it out and use SPA, the same guidance with the anchors hidden: "
            f"SPA(strength={scale if scale != 1 else 1.5})"
        )
    if setting(model, arguments, "cache_implementation") == "paged":
        raise ValueError(NO_CONTINUOUS_BATCHING)
    for name, why in REFUSED.items():
        value = setting(model, arguments, name)
        if name == "penalty_alpha" and (setting(model, arguments, "top_k") or 50) <= 1:
            continue
        asked = value is not None and value is not False and value != 0
        if name == "num_beam_groups":
            asked = asked and value != 1
        if name == "custom_generate":
            asked = isinstance(value, str)
        if asked:
            raise ValueError(
                f"{name}={value!r} cannot be combined with steering: {why}. Leave it out, or "
                "generate outside the steered block"
            )
    assistant = arguments.get("assistant_model")
    if assistant is not None and shares_weights(assistant, model):
        raise ValueError(
            "assistant_model is the steered model itself or a part of it; give a smaller model, "
            "or none"
        )


# Settings of `generate` that ask for what steering does not reach.
REFUSED = {
    "penalty_alpha": "contrastive search compares hidden states and runs candidates of its own",
    "dola_layers": "DoLa contrasts the logits of lower layers, which are not steered",
    "constraints": "constrained beam search is not part of transformers any more",
    "force_words_ids": "constrained beam search is not part of transformers any more",
    "num_beam_groups": "group beam search is not part of transformers any more",
    "assistant_early_exit": "the early exit's lower layers are not steered",
    "use_mtp": "its layers for several tokens are not steered",
    "speculation_type": "its drafts are made from hidden states, of which SPA has two",
    "token_healing": "it rewrites the prompt that the anchors describe",
    "custom_generate": "what a recipe from elsewhere runs the model on is not known; pass your own "
    "function, or call the model inside the block",
}
NO_CONTINUOUS_BATCHING = (
    "continuous batching cannot be steered: it packs many requests into one row, which anchors do "
    "not describe, and brings an attention of its own. Call model.generate with a left-padded "
    "batch, or leave the steered block"
)


def setting(model: Any, arguments: dict[str, Any], name: str) -> Any:
    """Return a setting of `generate` as it resolves it, None where nothing sets it."""
    given = arguments.get("generation_config")
    for settings in (arguments, vars(given) if given is not None else {}):
        if settings.get(name) is not None:
            return settings[name]
    return getattr(model.generation_config, name, None)


def shares_weights(assistant: Any, model: Any) -> bool:
    """Whether one model is the other, or a part of it."""
    parts = {part for part in model.modules() if next(part.parameters(), None) is not None}
    return any(module in parts for module in assistant.modules())


def refuse_continuous_batching(model: Any, undo: Undo) -> None:
    """Let everything that starts continuous batching raise inside the block."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise ValueError(NO_CONTINUOUS_BATCHING)

    def put_back(name: str, own: Any) -> None:
        if own is not None:
            setattr(model, name, own)
        elif vars(model).get(name) is refused:
            delattr(model, name)

    for name in ("generate_batch", "init_continuous_batching"):
        if hasattr(model, name):
            undo.add(put_back, name, vars(model).get(name))
            setattr(model, name, refused)


def check_pass(anchors: Tensor, given: Tensor, past: int) -> bool:
    """Return whether a forward pass over some tokens ends where the anchors end.

    Args:
        anchors: [batch, prompt].
        given: ids or embeddings [batch, tokens, ...] of the pass.
        past: how many tokens its cache holds.

    Raises:
        ValueError: the prompt is shorter or longer than the anchors, or has other rows.
    """
    rows, prompt_length = anchors.shape
    batch, length = given.shape[:2]
    if batch != rows:
        raise ValueError(
            f"anchors has {rows} rows, but the model is given {batch} prompts; expected one row of "
            "anchors for every prompt (generate repeats them for beams and returned sequences)"
        )
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


def check_shape(anchors: Tensor, prompt: tuple[int, ...], attention_mask: Tensor | None) -> None:
    """Raise ValueError unless anchors have a prompt's shape and leave some of each prompt alone.

    Args:
        anchors: [batch, prompt].
        prompt: the shape of the prompt, of which the first two sizes count.
        attention_mask: [batch, prompt] or None.
    """
    shape = list(prompt[:2])
    if list(anchors.shape) != shape:
        raise ValueError(
            f"anchors has shape {list(anchors.shape)}; expected {shape}, the shape of the prompt"
        )
    check_seen(anchors, attention_mask, 0, shape[1])


def check_seen(anchors: Tensor, mask: Any, past: int, end: int) -> None:
    """Raise ValueError unless the anchored tokens can be seen, and in every row others too.

    Args:
        anchors: [batch, prompt].
        mask: what a pass is given as its attention mask: [b, >= end], 4-D, a dict of such for
            several kinds of layers, or None.
        past: where the pass begins; what its own queries do not see may have been seen before.
        end: where it ends; before the prompt does, its anchors may yet turn out not to be all.
    """
    masks = mask.values() if isinstance(mask, dict) else (mask,)
    for one in masks:
        if one is None or (past and one.dim() != 2):
            continue
        seen = seen_tokens(one, min(end, anchors.shape[1]))
        if seen is not None and seen.shape[0] % anchors.shape[0] == 0:
            check_rows(anchors, seen)


def seen_tokens(mask: Tensor, length: int) -> Tensor | None:
    """Return which of the first tokens a mask lets anyone see: bool [b, length]; None if unclear.

    A 4-D mask that is not bool hides by how large its numbers are, so that it is not looked at.
    """
    if mask.shape[-1] < length:
        return None
    if mask.dim() == 2:
        return mask[:, :length] != 0
    if mask.dim() != 4 or mask.dtype != torch.bool:
        return None
    return mask.any(dim=1).any(dim=1)[:, :length]


def check_rows(anchors: Tensor, seen: Tensor) -> None:
    """Raise ValueError if anchors lie on tokens that no one sees, or on all that are seen.

    Args:
        anchors: [batch, prompt].
        seen: bool [batch or a multiple of it, tokens], of the prompt's first tokens or all.
    """
    rows = anchors.repeat_interleave(seen.shape[0] // anchors.shape[0], dim=0)
    rows = rows[:, : seen.shape[1]].to(seen.device)
    anchored = rows.bool()
    if bool((anchored & ~seen).any()):
        raise ValueError("anchors marks tokens that attention_mask pads out")
    # Factors can differ where every token has one: that steers.
    graded = anchors.is_floating_point() and not bool(((anchors == 0) | (anchors == 1)).all())
    if graded or seen.shape[1] < anchors.shape[1]:
        return
    whole = (anchored | ~seen).all(dim=1) & anchored.any(dim=1)
    if bool(whole.any()):
        raise ValueError(
            f"row {int(whole.float().argmax())} of anchors anchors every token of its prompt, "
            "which steers nothing; anchor the part that matters"
        )
