"""Attention mass per segment in plain PyTorch; differentiable."""

import torch
from torch import Tensor

from radar_kernels.anchor_attention.scores import score_chunks, softmax_weights
from radar_kernels.segment_mass.arguments import SegmentMassArguments


def run(arguments: SegmentMassArguments) -> Tensor:
    """Sums the attention weights of a few queries at a time.

    Args:
        arguments: the validated call.

    Returns:
        Float32 ``[B, Hq, num_segments]``.
    """
    attention, segments = arguments.attention, arguments.segments
    batch, heads, tokens, _ = attention.query.shape
    keys = attention.key.shape[2]
    per_key = attention.query.new_zeros(batch, heads, keys, dtype=torch.float32)
    for chunk in score_chunks(attention) if tokens and keys else ():
        weights, _ = softmax_weights(chunk.scores, attention.sinks)
        per_key = per_key + weights.sum(2)
    # One place more for the keys of no segment.
    place = torch.where(segments < 0, arguments.num_segments, segments)
    mass = per_key.new_zeros(batch, heads, arguments.num_segments + 1)
    mass = mass.scatter_add(2, place[:, None].expand(batch, heads, keys), per_key)
    return mass[..., :-1].to(torch.float32) / max(1, tokens)
