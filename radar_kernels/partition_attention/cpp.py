"""Partitioned attention on CPUs, in C++: both parts in one pass over the keys."""

import torch
from torch import Tensor

from radar_kernels import native
from radar_kernels.anchor_attention.arguments import AnchorAttentionArguments
from radar_kernels.anchor_attention.cpp import unsupported

__all__ = ["absent", "run", "unsupported"]

absent = native.absent

if absent() is None:
    _partition = torch.ops.radar_cpp.partition_attention.default


def run(arguments: AnchorAttentionArguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes a call that ``unsupported`` has let through.

    Args:
        arguments: the validated call with bool anchors.

    Returns:
        Output ``[B, Hq, q, Dv]`` (stored as ``[B, q, Hq, Dv]``) and log-sum-exp ``[B, Hq, q]`` of
        the anchored keys, then of the rest.
    """
    return _partition(
        arguments.query,
        arguments.key,
        arguments.value,
        arguments.anchors,
        arguments.mask,
        arguments.key_lengths,
        arguments.causal,
        arguments.scale,
        arguments.window,
        arguments.softcap,
        arguments.sinks,
    )
