"""Attention logits in plain PyTorch, a few queries at a time."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from radar_kernels.anchor_attention.arguments import AnchorAttentionArguments
from radar_kernels.anchor_attention.visibility import seen_by_any, visible_keys

_SCORE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class ScoreChunk:
    """The logits of some queries.

    Args:
        scores: ``[B, Hq, n, k]``, after scale and softcap, -inf where hidden; float64 for float64
            inputs, else float32.
        value: ``[B, Hkv, k, Dv]`` in the dtype of ``scores``, 0 where no query reads it.
    """

    scores: Tensor
    value: Tensor


def score_chunks(arguments: AnchorAttentionArguments) -> Iterator[ScoreChunk]:
    """Computes the logits of all queries, at most 64 MiB at a time.

    Args:
        arguments: a validated call with at least one key.

    Yields:
        The chunks in the order of the queries.
    """
    query, key, value = arguments.query, arguments.key, arguments.value
    accumulator = torch.float64 if query.dtype == torch.float64 else torch.float32
    batch, heads, tokens, size = query.shape
    key_heads, keys = key.shape[1:3]
    step = max(1, _SCORE_BYTES // max(1, batch * heads * keys * accumulator.itemsize))
    key, value = key.to(accumulator), value.to(accumulator)
    for start in range(0, tokens, step):
        stop = min(tokens, start + step)
        visible = visible_keys(arguments, start, stop)
        read_key, read_value = key, value
        if visible is not None:
            # 0 * NaN is NaN: memory nobody may read must not reach a product.
            unseen = ~seen_by_any(visible, key_heads)[..., None]
            read_key = key.masked_fill(unseen, 0)
            read_value = value.masked_fill(unseen, 0)
        packed = query[:, :, start:stop].to(accumulator) * arguments.scale
        packed = packed.reshape(batch, key_heads, heads // key_heads * (stop - start), size)
        scores = (packed @ read_key.mT).view(batch, heads, stop - start, keys)
        if arguments.softcap is not None:
            scores = arguments.softcap * torch.tanh(scores / arguments.softcap)
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
        yield ScoreChunk(scores, read_value)


def softmax_weights(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax over keys, with an optional sink, that gives 0 to rows without any key.

    Args:
        scores: ``[B, Hq, n, k]``, -inf where hidden.
        sinks: None or ``[Hq]``.

    Returns:
        The weights ``[B, Hq, n, k]`` and the log-sum-exp ``[B, Hq, n]``, sink included, -inf for
        rows with nothing.
    """
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks.to(scores.dtype).view(-1, 1, 1))
    top = top.detach().masked_fill(top == -torch.inf, 0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.to(scores.dtype).view(-1, 1, 1) - top)
    lse = (total.log() + top).squeeze(-1)
    return weights / total.clamp_min(torch.finfo(total.dtype).tiny), lse


def weighted_values(weights: Tensor, value: Tensor) -> Tensor:
    """Sums values by weight without repeating them for the heads of a group.

    Args:
        weights: ``[B, Hq, n, k]``.
        value: ``[B, Hkv, k, Dv]``.

    Returns:
        ``[B, Hq, n, Dv]``.
    """
    batch, heads, tokens, keys = weights.shape
    packed = weights.reshape(batch, value.shape[1], heads // value.shape[1] * tokens, keys)
    return (packed @ value).view(batch, heads, tokens, value.shape[3])
