"""How much attention a query draws to each sentence before it, and the cache of that reading."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from radar_core.hooks.attachment import MIXING_LAYERS, attach, layer_plans, unwrapped
from radar_core.hooks.attention import AttentionHook, Call
from radar_core.hooks.branches import rotates_by_length
from radar_core.hooks.cache import cache_name, given_cache
from radar_core.hooks.prompts import setting
from radar_core.hooks.provenance import Provenance
from radar_core.hooks.turns import turn
from radar_core.methods.method import Method, NoSteering
from radar_core.methods.second_prompt import SecondPrompt
from radar_core.methods.spa import SPA

logger = logging.getLogger("radar_core")

# Tokens of one pass over a prompt: bounds what masks and activations take.
CHUNK = 2048
# Tokens that are measured at a time: bounds what their weights take.
MEASURED = 16


@dataclass(frozen=True)
class Asked:
    """A prompt and where its query lies.

    Args:
        input_ids: the prompt's tokens.
        first: the query's first token.
        last: one past its last one; what follows opens the answer.
    """

    input_ids: Sequence[int] = field(repr=False)
    first: int
    last: int


class PromptReader:
    """Reads prompts with one model, and remembers the keys and values of the latest prompt.

    What a prompt has in common with the one before is not read again. Windowed layers keep all
    keys here, so that the cache can be cut anywhere; masks see to the windows.

    Nothing of it is used once the model has changed, however that was done. What `state_of` sees is
    compared; and the last token that was read is run again, alone and on the same cache, right
    after a prompt was read and before anything is taken over. What that does not show: a write
    through `.data` that reaches no token but earlier ones, as to an expert that no later one takes.

    Args:
        model: a decoder-only transformers model in evaluation mode.
    """

    def __init__(self, model: Any) -> None:
        self.model = unwrapped(model)
        self._lock = threading.Lock()
        self._ids: list[int] = []
        self._cache: DynamicCache | None = None
        self._state: object = None
        self._echo: list[Tensor] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.model,)  # a copy has read nothing

    @torch.no_grad()
    def sentence_peaks(
        self,
        asked: Asked,
        blank: Asked,
        sentence_of: Tensor,
        count: int,
        layers: Collection[int],
    ) -> tuple[Tensor, Tensor]:
        """Measure the most attention that a token behind the conversation pays to each sentence.

        Args:
            asked: the prompt.
            blank: the same prompt with a query that asks for nothing.
            sentence_of: int64 [tokens], the sentence of each of the prompt's tokens, -1 for none.
            count: number of sentences.
            layers: which layers to measure, in their order.

        Returns:
            Two float32 [layers, 2, heads, count] on the CPU, of `asked` and of `blank`: the largest
            share of attention that a sentence gets from one of the query's tokens, and from one of
            the tokens behind it (0 where there are none).

        Raises:
            ValueError: the model cannot be hooked or cut back, the prompt is longer than its
                context, or a sentence does not lie before the query.
            RuntimeError: the model is in training mode, or is being steered or run by another
                thread.
        """
        model = self.model
        check_can_be_cut(model)
        check_context(model, max(len(asked.input_ids), len(blank.input_ids)))
        shared = shared_length(asked.input_ids, blank.input_ids)
        shared = min(shared, asked.first, blank.first)
        behind = sentence_of[shared:]
        if bool((behind >= 0).any()):
            raise ValueError(
                f"sentence {int(behind.max())} does not lie before the query, whose tokens "
                "therefore cannot attend to it; put the query behind the conversation, or select "
                "by Dense or Lexical"
            )
        sentence_of = sentence_of.to(model.device)
        with turn(model), self._lock, self._unsteered() as (state, steering):
            hook = steering.attention
            assert hook is not None
            try:
                kept = self._usable(asked.input_ids[:shared], state)
                self._cut(kept)
                self._read(asked.input_ids[kept:shared])
                # The content-free query first, so that the prompt's own is what the cache holds.
                nothing = self._measure(hook, blank, sentence_of, count, layers)
                self._cut(shared)
                peaks = self._measure(hook, asked, sentence_of, count, layers)
                self._state = state
                if not rotates_by_length(model):
                    self._echo = self._last_again()
            except BaseException:
                self._drop()
                raise
        return peaks, nothing

    @torch.no_grad()
    def cache_for(self, input_ids: Sequence[int], most: int | None = None) -> Any:
        """Return a cache of the first tokens of a prompt, as far as the latest prompt shares them.

        Args:
            input_ids: the prompt's tokens.
            most: the most tokens that it may hold; the last token is never among them.

        Returns:
            A `DynamicCache` that belongs to the caller, or None if nothing is shared, or the model
            has changed since.

        Raises:
            RuntimeError: something is shared, but whether the model has changed cannot be seen: it
                is in training mode, or is being steered or run by another thread.
        """
        end = len(input_ids) - 1
        wanted = input_ids[: end if most is None else max(0, min(end, most))]
        with turn(self.model), self._lock:
            if not shared_length(self._ids, wanted):
                return None
            with self._unsteered() as (state, _):
                length = self._usable(wanted, state)
            return self._copy(length, self.model.config) if length else None

    def forget(self) -> None:
        """Free the memory of the latest prompt."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        self._cache, self._ids, self._state, self._echo = None, [], None, []

    @contextmanager
    def _unsteered(self) -> Iterator[tuple[object, Any]]:
        """Run the model as it is in a block; gives its state and the hooks that see it attend."""
        state = state_of(self.model)  # before hooks of ours are part of it
        with attach(self.model, NoSteering()) as steering:
            yield state, steering

    def _usable(self, input_ids: Sequence[int], state: object) -> int:
        """Return how many of a prompt's first tokens the cache holds, as the model would make them.

        Nothing is, where the model has changed since, which is forgotten then, or where keys depend
        on how long the pass was that made them.
        """
        shared = shared_length(self._ids, input_ids)
        if not shared or rotates_by_length(self.model):
            return 0
        if self._state != state or not alike(self._echo, self._last_again()):
            self._drop()
            return 0
        return shared

    def _last_again(self) -> list[Tensor]:
        """Run the last token that is held once more; what is held stays as it is.

        Returns:
            Its keys and values in every layer, which hang on all that a layer does, and the
            embeddings of all tokens, which the last one's pass does not look up.
        """
        ids = torch.tensor([self._ids], device=self.model.device)
        cache = self._copy(len(self._ids) - 1)
        self._forward(ids[:, -1:], cache)
        layers: list[Any] = cache.layers
        held = [layer for layer in layers if layer.is_initialized]
        ends = [part[:, :, -1:].clone() for one in held for part in (one.keys, one.values)]
        return [*ends, *embedded(self.model, ids)]

    def _copy(self, length: int, config: Any = None) -> DynamicCache:
        """Copy the first tokens of the cache."""
        copy = DynamicCache(config=config)
        layers: list[Any] = [] if self._cache is None else self._cache.layers
        for index, layer in enumerate(layers):
            if layer.is_initialized and length:
                copy.update(layer.keys[:, :, :length], layer.values[:, :, :length], index)
        return copy

    def _cut(self, length: int) -> None:
        """Keep the first tokens of the cache."""
        if self._cache is None or length == 0:
            self._cache, self._ids = DynamicCache(), []
        elif length < len(self._ids):
            self._cache.crop(length - len(self._ids))
            self._ids = self._ids[:length]

    def _read(self, input_ids: Sequence[int]) -> None:
        """Read tokens behind those that the cache holds."""
        step = len(input_ids) if rotates_by_length(self.model) else CHUNK
        for start in range(0, len(input_ids), max(step, 1)):
            self._run(list(input_ids[start : start + step]))

    def _measure(
        self,
        hook: AttentionHook,
        asked: Asked,
        sentence_of: Tensor,
        count: int,
        layers: Collection[int],
    ) -> Tensor:
        """Read a prompt from the cache's end on; return its [layers, 2, heads, count]."""
        end = len(asked.input_ids)
        meter = Meter(sentence_of, count, frozenset(layers), end - asked.first, end - asked.last)
        hook.observe = meter
        try:
            self._run(list(asked.input_ids[len(self._ids) :]))
        finally:
            hook.observe = None
        peaks = torch.stack([meter.peaks[layer] for layer in layers])
        if hook.shards is not None and peaks.shape[2] != hook.num_heads:
            peaks = hook.shards.gathered(peaks.transpose(2, 3)).transpose(2, 3)
        return peaks.cpu()

    def _run(self, new: list[int]) -> None:
        self._forward(torch.tensor([new], device=self.model.device), self._cache)
        self._ids += new

    def _forward(self, ids: Tensor, cache: DynamicCache | None) -> None:
        model = self.model
        parameters = inspect.signature(model.forward).parameters
        few = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        # Meters are not for graphs, where some have been compiled.
        compiled = "torch._dynamo" in sys.modules
        with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            model(input_ids=ids, use_cache=True, **{cache_name(model): cache}, **few)


class Meter:
    """Measures, whenever a layer attends, how much of a token's attention a sentence gets at most.

    Args:
        sentence_of: int64 [prompt], the sentence of each token, -1 for none.
        count: number of sentences.
        layers: which layers to measure.
        first: how many tokens before the end of the pass the query begins.
        last: how many tokens before the end of the pass it ends.
    """

    def __init__(
        self, sentence_of: Tensor, count: int, layers: frozenset[int], first: int, last: int
    ) -> None:
        self.sentence_of = sentence_of
        self.count = count
        self.layers = layers
        self.first = first
        self.last = last
        self.peaks: dict[int, Tensor] = {}

    def __call__(self, layer: int, call: Call) -> None:
        """Note a layer's peaks: [2, heads, count]."""
        if layer not in self.layers:
            return
        queries = call.query.shape[2]
        if queries < self.first:
            raise ValueError(
                f"layer {layer} is only given the last {queries} of a pass's tokens, which leaves "
                "out some of the query's; choose other layers"
            )
        begin, end = queries - self.first, queries - self.last
        self.peaks[layer] = torch.stack(
            [self._peak(call, begin, end), self._peak(call, end, queries)]
        )

    def _peak(self, call: Call, begin: int, end: int) -> Tensor:
        """Return the largest share of each sentence over some of the tokens: [heads, count]."""
        peak = call.query.new_zeros(call.query.shape[1], self.count, dtype=torch.float32)
        for start in range(begin, end, MEASURED):
            mass = self._mass(call, start, min(start + MEASURED, end))
            peak = torch.maximum(peak, mass.amax(0))
        return peak

    def _mass(self, call: Call, begin: int, end: int) -> Tensor:
        """Return every sentence's share for each of some tokens: [tokens, heads, count].

        Each token becomes a row of a batch, since the operator takes the mean over a row's tokens.
        """
        from radar_kernels import segment_mass

        queries, keys, rows = call.query.shape[2], call.key.shape[2], end - begin
        arguments = call.kernel_arguments()
        if arguments.pop("causal"):
            seen = keys - queries + 1 + torch.arange(begin, end, device=call.query.device)
            arguments["key_lengths"] = seen
        mask = arguments["mask"]
        if mask is not None and mask.shape[2] > 1:
            mask = mask[:, :, begin:end].transpose(0, 2)
        arguments["mask"] = None if mask is None else mask.expand(rows, -1, -1, -1)
        segments = self.sentence_of.new_full((1, keys), -1).to(call.key.device)
        held = min(keys, self.sentence_of.shape[0])
        segments[0, :held] = self.sentence_of[:held]
        return segment_mass(
            call.query[:, :, begin:end].transpose(0, 2),
            call.key.expand(rows, -1, -1, -1),
            segments,
            self.count,
            **arguments,
        )


def unchanged_tokens(model: Any, method: Method, anchors: Tensor, arguments: dict[str, Any]) -> int:
    """Return how many of a prompt's first tokens a steered `generate` may take from a cache.

    Args:
        model: the model.
        method: the steering method.
        anchors: bool [1, prompt].
        arguments: what `generate` is called with.

    Returns:
        The number of tokens whose keys and values are those of the unsteered model, the last one
        left out; 0, and the reason is logged, where a cache cannot be given at all.
    """
    why = None
    if isinstance(method, SecondPrompt):
        why = f"{type(method).__name__} reads a second prompt beside the first"
    elif isinstance(method, SPA) and method.reference is not None:
        why = "the released SPA's own decoding keeps no cache of ours"
    elif given_cache(arguments)[1] is not None:
        why = "generate was given another cache"
    else:
        for name, plain in PLAIN_SETTINGS.items():
            value = setting(model, arguments, name)
            if value is not None and value not in plain:
                why = f"generate was asked for {name}={value!r}"
    length = anchors.shape[1] - 1
    steers = bool(anchors.any()) and not method.is_identity
    if why is None and steers:
        plans = layer_plans(method, model.config.get_text_config(decoder=True))
        start = Provenance.of(method, plans, anchors).start
        if start is not None and start < length:
            length, why = start, f"{type(method).__name__} changes the keys from token {start} on"
    elif why is not None:
        length = 0
    if why is not None and why not in _logged:
        _logged.add(why)
        logger.info(
            "of the prompt that was read to select sentences, %s tokens are taken over: %s",
            length or "no",
            why,
        )
    return length


# Settings of `generate` under which it takes a cache of one row, and their values then.
PLAIN_SETTINGS: dict[str, tuple[Any, ...]] = {
    "cache_implementation": ("dynamic",),
    "use_cache": (True,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "assistant_model": (),
    "prompt_lookup_num_tokens": (),
}
_logged: set[str] = set()


def check_can_be_cut(model: Any) -> None:
    """Raise ValueError if a model carries more from token to token than keys and values."""
    config = model.config.get_text_config(decoder=True)
    unseen = set(getattr(config, "layer_types", None) or ()) & MIXING_LAYERS
    if unseen:
        raise ValueError(
            f"{type(model).__name__} has layers of the kind {min(unseen)!r}, whose states cannot "
            "be cut back to the prompt before the query; select by Dense or Lexical"
        )


def check_context(model: Any, length: int) -> None:
    """Raise ValueError if a prompt is longer than a model's context."""
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise ValueError(
            f"the prompt has {length} tokens, but the model's context holds {limit}; shorten the "
            "conversation, or select by Dense or Lexical"
        )


def shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two prompts begin with in common."""
    pairs = zip(first, second, strict=False)
    shortest = min(len(first), len(second))
    return next((place for place, (one, other) in enumerate(pairs) if one != other), shortest)


def embedded(model: Any, ids: Tensor) -> list[Tensor]:
    """Return the rows of tokens in a model's embedding, to be compared only; none if it has none.

    The module is not called, which would count as a pass over the tokens. Of a part of the weights,
    as each of several processes may have, the rows are others, but always the same.
    """
    weight = getattr(model.get_input_embeddings(), "weight", None)
    if weight is None:
        return []
    weight = weight.to_local() if hasattr(weight, "to_local") else weight
    return [weight[ids.to(weight.device).clamp(max=len(weight) - 1)].float()]


def alike(before: Sequence[Tensor], now: Sequence[Tensor]) -> bool:
    """Return whether the same passes gave the same, but for rounding, as of another thread count.

    The passes have the same length, so that even in bfloat16 hardly anything has to be allowed for;
    what is taken for a change wrongly is only read again.
    """
    return len(before) == len(now) and all(
        one.shape == other.shape
        and bool(
            (
                (one - other).float().norm(dim=-1)
                <= torch.finfo(one.dtype).eps ** 0.5 / 16 * one.float().norm(dim=-1)
            ).all()
        )
        for one, other in zip(before, now, strict=True)
    )


def state_of(model: Any) -> object:
    """Return what tells at once that a model's weights, modules, hooks or adapters have changed.

    A write through `.data` or from numpy leaves no trace in it. Hooks on the model as a whole,
    which mostly watch, do not count; those on its parts do.
    """
    tensors = [
        (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
        for tensor in (*model.parameters(), *model.buffers())
    ]
    parts = [_state_of_part(module, module is model) for module in model.modules()]
    return tensors, parts


def _state_of_part(module: Any, whole: bool) -> object:
    hooks: list[tuple[int, int]] = []
    if not whole:
        both = (*module._forward_pre_hooks.items(), *module._forward_hooks.items())
        hooks = [(number, id(hook)) for number, hook in both]
    adapters = None
    if isinstance(getattr(module, "disable_adapters", None), bool):
        adapters = tuple(module.active_adapters), module.disable_adapters
    scaling = getattr(module, "scaling", None)  # of attention, or by name that of adapters
    scaling = repr(scaling) if isinstance(scaling, dict | int | float) else None
    return id(module), id(vars(module).get("forward")), hooks, adapters, scaling
