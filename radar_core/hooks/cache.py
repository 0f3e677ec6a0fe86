"""What steering needs of a cache: room to grow, so that a step copies one token."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from radar_core.hooks.provenance import original_class

_LEAST_ROOM = 256
# What a forward pass calls its cache: transformers 5.24 renamed it.
CACHE_NAMES = ("cache", "past_key_values")


class GrowingLayer(DynamicLayer):
    """A `DynamicLayer` whose keys and values are the front of buffers that grow by a quarter.

    Everything else that can be done to a layer (select, reorder, crop) works on its keys and values
    as before; the buffers are made anew when they no longer hold them.
    """

    _key_buffer: Tensor | None = None
    _value_buffer: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, heads, n, D] and return all of them."""
        needs_gradient = torch.is_grad_enabled() and key_states.requires_grad
        compiling = torch.compiler.is_compiling()  # the buffers' sizes would be compiled for
        if compiling or self.get_seq_length() == 0 or needs_gradient:
            return super().update(key_states, value_states, *args, **kwargs)
        assert self.keys is not None and self.values is not None
        self._key_buffer = with_room(self._key_buffer, self.keys, key_states.shape[-2])
        self._value_buffer = with_room(self._value_buffer, self.values, value_states.shape[-2])
        self.keys = appended(self._key_buffer, self.keys.shape[-2], key_states)
        self.values = appended(self._value_buffer, self.values.shape[-2], value_states)
        return self.keys, self.values


def with_room(buffer: Tensor | None, held: Tensor, added: int) -> Tensor:
    """Return a buffer that starts with `held` [B, heads, n, D] and has room for `added` more."""
    length = held.shape[-2]
    holds = (
        buffer is not None
        and buffer.data_ptr() == held.data_ptr()
        and buffer.stride() == held.stride()
        and buffer.shape[:2] == held.shape[:2]
        and buffer.shape[-2] >= length + added
        and can_be_written(buffer)
    )
    if holds:
        assert buffer is not None
        return buffer
    capacity = length + added + room(length)
    buffer = held.new_empty(*held.shape[:-2], capacity, held.shape[-1])
    buffer[..., :length, :] = held
    return buffer


def can_be_written(tensor: Tensor) -> bool:
    """Whether a tensor can be written in place: outside inference mode its own tensors cannot."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return True
    return not tensor.is_inference()


def room(length: int) -> int:
    """Return how many more tokens a buffer of `length` tokens is given space for."""
    return max(_LEAST_ROOM, length // 4)


def appended(buffer: Tensor, length: int, new: Tensor) -> Tensor:
    """Write `new` behind the first `length` tokens and return the filled part of the buffer."""
    end = length + new.shape[-2]
    buffer[..., length:end, :] = new
    return buffer[..., :end, :]


def let_grow(cache: Any) -> None:
    """Give the plain layers of a plain dynamic cache room to grow; leave other caches alone."""
    if original_class(cache) is not DynamicCache or cache.offloading:
        return
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = GrowingLayer
    for layer in cache.layers:
        if type(layer) is DynamicLayer:
            layer.__class__ = GrowingLayer


def given_cache(keywords: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the cache of a forward pass and the name it goes by."""
    for name in CACHE_NAMES:
        if keywords.get(name) is not None:
            return name, keywords[name]
    return "cache", None


def cache_name(model: Any) -> str:
    """Return what a model calls the cache that it is given."""
    taken = inspect.signature(model.forward).parameters
    return next(name for name in CACHE_NAMES if name in taken)


def empty_cache(model: Any) -> DynamicCache:
    """Return the cache that a model makes when it is given none."""
    return DynamicCache(config=model.config)


def can_branch_later(cache: Any) -> bool:
    """Whether a cache's rows can be copied after a shared prefix."""
    return original_class(cache) is DynamicCache and all(
        type(layer) in (DynamicLayer, GrowingLayer, DynamicSlidingWindowLayer)
        for layer in cache.layers
    )
