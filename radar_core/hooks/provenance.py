"""Caches that know which steering wrote them, and refuse to serve any other or none."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, QuantizedLayer, StaticLayer

from radar_core.methods.key_edit import KeyEdit
from radar_core.methods.method import LayerPlan, Method, NoSteering
from radar_core.methods.second_prompt import SecondPrompt
from radar_core.methods.spa import SPA


@dataclass(frozen=True, eq=False)
class Provenance:
    """Which steering wrote the keys and values of a cache.

    Args:
        method: the steering method.
        anchors: [rows, tokens] on the CPU, cut after the last anchored token.
        start: first position whose keys and values steering changes; None if it changes none, as
            where only the last layer is steered.
    """

    method: Method
    anchors: Tensor = field(repr=False)
    start: int | None

    @classmethod
    def of(
        cls, method: Method, plans: Sequence[LayerPlan | None], anchors: Tensor | None
    ) -> Provenance:
        """Return what a method with these anchors, planned layer by layer, makes of caches."""
        if anchors is None or isinstance(method, SecondPrompt | NoSteering):
            # A second prompt's rows are told apart by `SteeredCache.prompts`.
            return cls(method, torch.zeros(1, 0, dtype=torch.bool), None)
        held = anchors.detach().cpu()
        columns = held.bool().any(dim=0).nonzero().flatten()
        first, last = int(columns[0]), int(columns[-1])
        # What the last layer does is not read again.
        written = [plan for plan in plans[:-1] if plan is not None]
        start: int | None = first
        if isinstance(method, KeyEdit):
            pass
        elif isinstance(method, SPA) and method.branch == "direct":
            start = held.shape[1] - 1
        elif not written:
            start = None
        elif all(plan.queries == "generated" for plan in written):
            start = held.shape[1] - 1
        return cls(method, held[:, : last + 1].clone(), start)

    def __str__(self) -> str:
        counts = self.anchors.bool().sum(dim=1).tolist()
        return f"{self.method!r} with {counts[0] if len(counts) == 1 else counts} anchored tokens"

    def __deepcopy__(self, memo: Any) -> Provenance:
        return self  # a cache is copied often, and nothing of this ever changes

    def changes(self, length: int) -> bool:
        """Whether steering changes some of a cache's first `length` tokens."""
        return self.start is not None and self.start < length

    def equals(self, other: Provenance, length: int) -> bool:
        """Whether a cache's first `length` tokens are the same under another steering.

        The strength of SPA does not matter: it blends what the two branches say, after the cache.
        """
        if self.start != other.start or hidden_by(self.method) != hidden_by(other.method):
            return False
        one, another = (cut(steering.anchors, length) for steering in (self, other))
        rows = max(one.shape[0], another.shape[0])
        if rows % one.shape[0] or rows % another.shape[0]:
            return False
        return torch.equal(
            one.repeat_interleave(rows // one.shape[0], dim=0),
            another.repeat_interleave(rows // another.shape[0], dim=0),
        )

    def admit(self, cache: Any, added: int) -> SteeredCache:
        """Let a cache serve a steered pass over `added` more tokens, and mark it.

        Args:
            cache: the cache that the pass is given; it becomes a `SteeredCache`.
            added: number of tokens of the pass.

        Returns:
            The cache.

        Raises:
            ValueError: the cache was made under another steering or none, so that the results would
                differ from those of a run without it; or it is of a kind that cannot be steered.
        """
        if not isinstance(cache, Cache):
            raise ValueError(
                f"the cache is a {type(cache).__name__}; steering needs one of transformers' own, "
                "such as DynamicCache, StaticCache or QuantizedCache"
            )
        steered = become_steered(cache)
        if steered.prompts is not None and not isinstance(self.method, SecondPrompt):
            raise ValueError(
                "the cache was made by CFG or CAD and holds their second prompt; "
                f"{self.method.name} needs a cache that it made itself, or none"
            )
        held = steered.steering
        if held is not self and not (held is None and self.start is None):
            length = int(cache.get_seq_length())
            self._check(held, length)
            steered.steering = self if self.changes(length + added) else None
        steered.serving = True
        return steered

    def mark(self, cache: Any) -> None:
        """Mark a cache that a steered pass without one has made."""
        become_steered(cache).steering = self if self.changes(int(cache.get_seq_length())) else None

    def _check(self, held: Provenance | None, length: int) -> None:
        """Raise ValueError unless a cache of `length` tokens is what this steering would make."""
        held = held if held is not None and held.changes(length) else None
        if held is None and self.changes(length):
            every = getattr(self.method, "queries", None) == "all"
            instead = ', steer only the answer by queries="generated"' if every else ""
            raise ValueError(
                f"the cache already holds {length} tokens that ran unsteered, with the anchors "
                f"visible, but {self} steers from token {self.start} on; give it a cache that it "
                f"made itself, one of at most {self.start} tokens{instead}, or none"
            )
        if held is not None and not (self.changes(length) and held.equals(self, length)):
            raise ValueError(
                f"the cache was made under {held}, from token {held.start} on; under {self} the "
                f"results would mix both. Run the prompt anew without it, or {CUT.format(held)}"
            )


# How a cache can be used although steering wrote into it.
CUT = "cut it to its first {0.start} tokens by cache.crop(...)"


def hidden_by(method: Method) -> Any:
    """Return what of a method tells what a cache holds: of SPA, only how it hides the anchors."""
    if isinstance(method, SPA):
        return "SPA", method.masking, method.branch, method.mask_token_id
    return method


def cut(anchors: Tensor, length: int) -> Tensor:
    """Return anchors over exactly the first `length` tokens, as numbers."""
    padded = torch.zeros(anchors.shape[0], length)
    kept = min(length, anchors.shape[1])
    padded[:, :kept] = anchors[:, :kept]
    return padded


@dataclass(frozen=True)
class Prompts:
    """Two prompts of different length in one cache, each row's tokens aligned at their end.

    Args:
        first_length: tokens of the first prompt, padding included.
        second_mask: bool [B, second prompt], False where padded or hidden.
    """

    first_length: int
    second_mask: Tensor


class SteeredCache:
    """What a cache becomes in a steered pass: its own class still, with these methods in front.

    A cache becomes one by its class alone, so it can be copied and pickled as before; it then
    still knows what steering wrote it. Outside the steered passes it raises where it would serve a
    model that is not steered, except while it only holds tokens that no steering has changed.

    Args:
        steering: what wrote its keys and values; None if no steering changed any. Setting it to
            None lets any model use the cache.
        serving: whether a steered pass is at work with it.
        branched: whether it holds both branches of two-branch decoding, the full one first.
        prompts: the prompts that it holds, where the second branch has one of its own.
    """

    original: type
    steering: Provenance | None = None
    serving: bool = False
    branched: bool = False
    prompts: Prompts | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values, as the cache's own class does.

        Raises:
            RuntimeError: the model is not steered, but the cache was.
        """
        if not torch.compiler.is_compiling() and self.steering is not None and not self.serving:
            self._release(layer_idx)
        return super().update(  # type: ignore[misc]
            key_states, value_states, layer_idx, *args, **kwargs
        )

    def _release(self, layer: int) -> None:
        assert self.steering is not None
        if self.steering.changes(int(self.get_seq_length(layer))):  # type: ignore[attr-defined]
            refuse(self.steering)
        self.steering = None

    def reorder_cache(self, beam_idx: Any) -> None:
        """Reorder both halves as the first: beam search only knows of the full branch's rows."""
        rows = cached_rows(self)
        count = beam_idx.shape[0]
        if rows == 2 * count or (rows is None and self.branched):
            beam_idx = torch.cat([beam_idx, beam_idx + count])
        super().reorder_cache(beam_idx)  # type: ignore[misc]

    def reset(self) -> None:
        """Empty the cache, which then any model may use."""
        self.steering = None
        self.branched = False
        self.prompts = None
        super().reset()  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {key: value for key, value in vars(self).items() if key != "serving"}
        return revive, (self.original,), state


def refuse(steering: Provenance) -> NoReturn:
    """Raise RuntimeError where a model that is not steered is given a steered cache."""
    raise RuntimeError(
        f"the cache was made under {steering}, from token {steering.start} on, but this model is "
        "not steered; call it inside the same steering, run the prompt anew without the cache, "
        f"{CUT.format(steering)}, or set cache.steering = None to use it as it is"
    )


@functools.cache
def steered_class(original: type) -> type:
    """Return the class that caches of a class become when they serve a steered model."""
    return type(f"Steered{original.__name__}", (SteeredCache, original), {"original": original})


def become_steered(cache: Any) -> SteeredCache:
    """Turn a cache into a `SteeredCache` in place, and return it."""
    if not isinstance(cache, SteeredCache):
        kind: Any = type(cache)
        cache.__class__ = steered_class(kind)
    steered: SteeredCache = cache
    return steered


def revive(original: type) -> Any:
    """Return an empty steered cache, to be filled by copying or unpickling."""
    return object.__new__(steered_class(original))


def original_class(cache: Any) -> type:
    """Return the class that a cache had before it served a steered model."""
    return cache.original if isinstance(cache, SteeredCache) else type(cache)


def cached_rows(cache: Any) -> int | None:
    """Return how many rows a cache holds, None if it is empty or does not say."""
    for layer in cache.layers:
        keys = getattr(layer, "keys", None)
        if isinstance(keys, Tensor) and keys.dim() == 4:
            return keys.shape[0]
    return None


def is_branched(cache: Any) -> bool:
    """Whether a cache is known to hold both branches of two-branch decoding."""
    return isinstance(cache, SteeredCache) and cache.branched


def double_rows(cache: Any, batch: int) -> None:
    """Give each branch its own copy of what a cache of any kind holds so far.

    Raises:
        ValueError: the cache holds quantised states, of which this transformers cannot copy rows.
    """
    both = torch.arange(batch).repeat(2)
    for layer in cache.layers:
        if not layer.is_initialized:
            continue
        if isinstance(layer, StaticLayer):
            assert layer.keys is not None and layer.values is not None
            layer.keys, layer.values = layer.keys[both], layer.values[both]
            layer.batch_size = 2 * batch
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(layer.keys)
                torch._dynamo.mark_static_address(layer.values)
        elif isinstance(layer, QuantizedLayer) and not hasattr(layer, "_pending_beam_idx"):
            raise ValueError(
                f"the {original_class(cache).__name__} holds one row for each prompt, and this "
                "version of transformers cannot copy quantised rows for SPA's second branch; give "
                "an empty cache, or transformers 5.24"
            )
        else:
            layer.reorder_cache(both)
