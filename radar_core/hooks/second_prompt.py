"""Two-branch decoding where the second branch has a prompt of its own, of any length."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from radar_core.hooks.attention import AttentionHook
from radar_core.hooks.branches import (
    ROW_INPUTS,
    Branches,
    ready_masks,
    refuse_loss,
    refuse_media,
)
from radar_core.hooks.cache import (
    GrowingLayer,
    can_branch_later,
    given_cache,
    room,
)
from radar_core.hooks.prompts import (
    ANOTHER_PROMPT,
    begin_alike,
    call_arguments,
    check_mode,
    given_tokens,
    refuse_continuous_batching,
    replace_generate,
)
from radar_core.hooks.provenance import Prompts, SteeredCache, become_steered, cached_rows
from radar_core.hooks.undo import Undo
from radar_core.hooks.untraced import untraced
from radar_core.methods.second_prompt import SecondPrompt


@dataclass
class Answered:
    """What the second prompt gave, while the first one runs.

    Args:
        logits: [B, 1, V], of its last token.
        cache: its cache; None without one.
        mask: bool [B, second prompt], False where padded or hidden.
    """

    logits: Tensor
    cache: Any
    mask: Tensor


class SecondPromptBranches(Branches):
    """Runs the second prompt beside the first, then both in one batch of two rows each.

    The prompts run one after the other, since their lengths differ; then their caches become one,
    the shorter prompt padded on the left, and each step reads the weights once.

    Args:
        model: the causal language model.
        attention: its attention hook.
        method: what the second prompt is.
    """

    method: SecondPrompt

    def __init__(self, model: Any, attention: AttentionHook, method: SecondPrompt) -> None:
        super().__init__(model, attention, method)
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        ids = [token for row in method.prompt_ids or () for token in row]
        if ids and not (min(ids) >= 0 and max(ids) < vocabulary):
            raise ValueError(
                f"the other prompt has token {max(ids) if min(ids) >= 0 else min(ids)}, but the "
                f"model's vocabulary is 0..{vocabulary - 1}"
            )
        self._prompt: Tensor | None = None  # ids or embeddings, where they are known
        self._length: int | None = None
        self._generates = False
        self._answered: Answered | None = None

    def install(self, undo: Undo) -> None:
        super().install(undo)
        replace_generate(self.model, self._generate, undo)
        refuse_continuous_batching(self.model, undo)

    def _generate(self, generate: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model's `generate`, its prompt noted, or raise where that cannot be steered."""
        arguments = call_arguments(generate, args, kwargs)
        check_mode(self.model, arguments)
        prompt = given_tokens(arguments)
        _, cache = given_cache(arguments)
        config = arguments.get("generation_config") or self.model.generation_config
        kind = arguments.get("cache_implementation") or config.cache_implementation
        if kind not in (None, "dynamic", "dynamic_full") or (
            cache is not None and not can_branch_later(cache)
        ):
            raise ValueError(
                f"{kind or type(cache).__name__} was asked for as the cache, but a second prompt "
                "needs a DynamicCache; leave cache_implementation and the cache out"
            )
        uses_cache = arguments.get("use_cache", config.use_cache)
        if uses_cache is False and arguments.get("inputs_embeds") is not None:
            raise ValueError(
                "use_cache is False with inputs_embeds, which transformers does not continue; "
                "leave use_cache out"
            )
        self._check_cache(cache, prompt.shape[0])
        self._check_rows(prompt.shape[0])
        mask = arguments.get("attention_mask")
        behind = 0 if mask is None or mask.dim() != 2 else mask.shape[1] - prompt.shape[1]
        # A mask that is longer than the prompt describes what a given cache holds as well.
        self._prompt = None if behind else prompt
        self._length = prompt.shape[1] + behind
        self._generates = True
        try:
            return generate(*args, **kwargs)
        finally:
            self._generates = False
            self._prompt = self._length = None

    def _check_rows(self, batch: int) -> None:
        counts = {"strength": len(self.method.strengths())}
        if self.method.prompt_ids is not None:
            counts["the second prompt"] = len(self.method.prompt_ids)
        for name, count in counts.items():
            if count not in (1, batch):
                raise ValueError(
                    f"{name} has {count} rows, but there are {batch} prompts; expected one for "
                    "all, or one for each"
                )

    def _check_cache(self, cache: Any, batch: int) -> None:
        rows = None if cache is None else cached_rows(cache)
        if rows not in (None, batch):
            raise ValueError(
                f"the cache holds {rows} rows, but the prompt has {batch}; a cache of a steered "
                "call cannot be carried over to another prompt: give none"
            )

    # -- hooks -------------------------------------------------------------------------------------

    @untraced
    def _before(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run the second prompt where the first one ends; double what follows."""
        self.attention.doubled = False
        self._answered = None
        kwargs = dict(call_arguments(model.forward, args, kwargs))
        refuse_media(kwargs)
        refuse_loss(kwargs)
        given = given_tokens(kwargs)
        batch, length = given.shape[:2]
        _, cache = given_cache(kwargs)
        if ready_masks(kwargs.get("attention_mask")) is not None or not (
            cache is None or can_branch_later(cache)
        ):
            raise ValueError(
                f"the model runs on a {type(cache).__name__} or a ready-made 4-D mask; a second "
                "prompt needs a DynamicCache, or none, and the usual 2-D mask"
            )
        past = 0 if cache is None else cache.get_seq_length()
        if past and isinstance(cache, SteeredCache) and cache.prompts is not None:
            return (), self._continue(kwargs, cache, cache.prompts, batch, length)
        if past:
            self._check_cache(cache, batch)
        if self._generates and past == 0:
            self._check_is_own(given)
        prompt = self._prompt_length(given, past)
        if past + length < prompt:
            return (), kwargs  # a chunk of the prompt
        if past >= prompt:
            raise ValueError(
                f"the cache holds {past} tokens of a call without this second prompt, the prompt "
                f"{prompt}; expected a cache that this steering made, or none"
            )
        self._answered = self._answer(kwargs, cache, given, past, prompt)
        return (), kwargs

    def _check_is_own(self, given: Tensor) -> None:
        """Raise ValueError if `generate` is at work, but these are not its prompt's tokens."""
        own = self._prompt
        if own is None or own.dim() != given.dim():
            return
        if not begin_alike(given, own, own.shape[1]):
            raise ValueError(ANOTHER_PROMPT)

    def _prompt_length(self, given: Tensor, past: int) -> int:
        """Return how many tokens the prompt has, taking note of it where this pass begins it."""
        if self.attention.anchors is not None:
            if past == 0 and not self._generates:
                self._prompt = given[:, : self.attention.prompt_length]
            return self.attention.prompt_length
        length = past + given.shape[1]
        if self._generates:
            assert self._length is not None
            return self._length
        if past:
            self._prompt = None
            return length
        noted = self._prompt
        if (
            noted is None
            or noted.shape[1] > length
            or noted.dim() != given.dim()
            or noted.shape[0] != given.shape[0]
            or not torch.equal(noted, given[:, : noted.shape[1]])
        ):
            self._prompt = noted = given
        return noted.shape[1]

    @untraced
    def _after(self, model: Any, args: Any, kwargs: Any, output: Any) -> Any:
        """Blend logits where hidden states were not, and make one cache of the prompts' two."""
        if not self.attention.is_at_work():
            return None
        doubled, self.attention.doubled = self.attention.doubled, False
        answered, self._answered = self._answered, None
        if output is None:
            return None
        if doubled and self.blends_logits:
            output.logits = self._blend_logits(*output.logits.chunk(2))
        if answered is None:
            return output
        logits = output.logits
        last = self._blend_logits(logits[:, -1:], answered.logits)
        output.logits = torch.cat([logits[:, :-1], last], dim=1)
        _, cache = given_cache(kwargs)
        cache = given_cache(output)[1] if cache is None else cache
        if cache is not None and answered.cache is not None:
            join(cache, answered.cache, answered.mask)
        return output

    # -- steps -------------------------------------------------------------------------------------

    def _answer(
        self, kwargs: dict[str, Any], cache: Any, given: Tensor, past: int, prompt: int
    ) -> Answered:
        """Run the second prompt, and behind it what a pass without a cache repeats."""
        given_mask = kwargs.get("attention_mask")
        states, mask = self._second(given, given_mask, prompt)
        tail = given[:, prompt - past :]
        if tail.shape[1]:
            states = torch.cat([states, tail], dim=1)
            mask = torch.cat([mask, mask.new_ones(tail.shape[:2])], dim=1)
        first = mask.int().argmax(dim=1, keepdim=True)
        positions = torch.arange(mask.shape[1], device=mask.device) - first
        inputs: dict[str, Any] = {
            "input_ids" if states.dim() == 2 else "inputs_embeds": states,
            "attention_mask": mask.long(),
            "position_ids": positions.clamp(min=0),
        }
        if kwargs.get("use_cache") is not None:
            inputs["use_cache"] = kwargs["use_cache"]
        if cache is not None:
            inputs[given_cache(kwargs)[0]] = self._empty_like(cache)
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            inputs["logits_to_keep"] = 1
        # The hooks of the model are for the first prompt's pass; this one goes past them.
        output = self.model.forward(**inputs, return_dict=True)
        self.attention.forget_windows()
        return Answered(output.logits[:, -1:], given_cache(output)[1], mask)

    def _empty_like(self, cache: DynamicCache) -> DynamicCache:
        windowed = any(isinstance(layer, DynamicSlidingWindowLayer) for layer in cache.layers)
        return DynamicCache(config=self.model.config) if windowed else DynamicCache()

    def _second(
        self, given: Tensor, given_mask: Tensor | None, prompt: int
    ) -> tuple[Tensor, Tensor]:
        """Return the second prompt: ids [B, n] or embeddings [B, n, d], and a bool mask [B, n]."""
        method, batch, device = self.method, given.shape[0], given.device
        if method.prompt_ids is not None:
            rows = len(method.prompt_ids)
            if batch % rows:
                raise ValueError(
                    f"the second prompt has {rows} rows, but the model runs on a batch of {batch}; "
                    "expected one row, or one for every prompt"
                )
            repeated = (
                torch.tensor(values, device=device).repeat_interleave(batch // rows, dim=0)
                for values in (method.prompt_ids, method.prompt_mask)
            )
            ids, mask = repeated
            return ids, mask.bool()
        if not method.removes_anchors and method.context is None:
            last = given[:, -1:] if given.shape[1] <= prompt else given[:, prompt - 1 : prompt]
            return last, torch.ones(batch, 1, dtype=torch.bool, device=device)
        states = self._prompt
        if states is None:
            raise ValueError(
                "the prompt's first tokens are only in the cache, so its context cannot be left "
                "out; give the whole prompt"
            )
        states = states.to(device).repeat_interleave(batch // states.shape[0], dim=0)
        seen = torch.ones(states.shape[:2], dtype=torch.bool, device=device)
        if given_mask is not None:
            seen = given_mask[:, :prompt].bool()
        if method.removes_anchors:
            anchored = self.attention.anchored_rows(batch, prompt, device)
            assert anchored is not None
            kept = seen & ~anchored
        else:
            kept = seen & ~method.left_out(seen)
        count = kept.sum(1)
        if not bool(count.all()):
            raise ValueError("context leaves nothing of a prompt; leave out less")
        order = kept.int().argsort(dim=1, stable=True)[:, prompt - int(count.max()) :]
        index = order if states.dim() == 2 else order[..., None].expand(-1, -1, states.shape[2])
        return states.gather(1, index), kept.gather(1, order)

    def _continue(
        self, kwargs: dict[str, Any], cache: Any, held: Prompts, batch: int, length: int
    ) -> dict[str, Any]:
        """Return the inputs of a pass over what follows both prompts."""
        if cached_rows(cache) != 2 * batch:
            raise ValueError(
                f"the cache holds {cached_rows(cache)} rows, but the inputs have {batch}; expected "
                f"{2 * batch}, those of both prompts"
            )
        second = held.second_mask
        widest = max(held.first_length, second.shape[1])
        new = cache.get_seq_length() - widest
        end = widest + new + length
        doubled = dict(kwargs)
        for name in ROW_INPUTS:
            value = kwargs.get(name)
            if value is not None and name != "position_ids":
                doubled[name] = torch.cat([value, value])
        device = given_tokens(kwargs).device
        step = torch.arange(new, new + length, device=device)
        positions = kwargs.get("position_ids")
        if positions is None:
            positions = held.first_length + step
        own = second.shape[1] - second.int().argmax(dim=1, keepdim=True) + step
        positions = positions.expand(*positions.shape[:-2], batch, length)
        doubled["position_ids"] = torch.cat([positions, own.expand_as(positions)], dim=-2)
        mask = torch.zeros(2 * batch, end, dtype=torch.long, device=device)
        mask[:, widest:] = 1
        given_mask = kwargs.get("attention_mask")
        start = widest - held.first_length
        mask[:batch, start:] = 1 if given_mask is None else given_mask
        mask[batch:, widest - second.shape[1] : widest] = second
        doubled["attention_mask"] = mask
        self.attention.doubled = True
        return doubled


def join(first: DynamicCache, second: DynamicCache, mask: Tensor) -> None:
    """Put the rows of a second prompt's cache behind those of the first's, aligned at their ends.

    Args:
        first: the first prompt's cache, which from then on knows both prompts.
        second: the second prompt's.
        mask: bool [B, second prompt], what may be attended to of it.
    """
    length, other = first.get_seq_length(), second.get_seq_length()
    layers: list[tuple[Any, Any]] = list(zip(first.layers, second.layers, strict=True))
    for one, two in layers:
        held = max(one.keys.shape[-2], two.keys.shape[-2])
        keys, values = _stacked(one.keys, two.keys), _stacked(one.values, two.values)
        one.keys, one.values = keys[..., :held, :], values[..., :held, :]
        if isinstance(one, GrowingLayer):
            one._key_buffer, one._value_buffer = keys, values
        elif isinstance(one, DynamicSlidingWindowLayer):
            one.cumulative_length = max(length, other)
    become_steered(first).prompts = Prompts(length, mask)


def _stacked(one: Tensor, two: Tensor) -> Tensor:
    """Return [2B, heads, n, D] with room to grow, the shorter states padded on the left."""
    batch, heads, _, size = one.shape
    held = max(one.shape[-2], two.shape[-2])
    rows = one.new_empty(2 * batch, heads, held + room(held), size)
    for states, part in ((one, rows[:batch]), (two, rows[batch:])):
        start = held - states.shape[-2]
        part[..., :start, :] = 0
        part[..., start:held, :] = states
    return rows
