"""Attention mass per segment on CPUs, in C++: the scores of a few queries at a time, never all."""

import torch
from torch import Tensor

from radar_kernels import native
from radar_kernels.anchor_attention import cpp as anchor_attention
from radar_kernels.segment_mass.arguments import SegmentMassArguments

absent = native.absent

if absent() is None:
    _measure = torch.ops.radar_cpp.segment_mass.default
    _products_absent = torch.ops.radar_cpp.products_absent()


def unsupported(arguments: SegmentMassArguments) -> str | None:
    """Says why a call cannot be served.

    Args:
        arguments: the validated call.

    Returns:
        The reason, or None if ``run`` can serve it.
    """
    if _products_absent:
        return f"it needs oneDNN: {_products_absent}"
    return anchor_attention.unsupported(arguments.attention)


def run(arguments: SegmentMassArguments) -> Tensor:
    """Computes a call that ``unsupported`` has let through.

    Args:
        arguments: the validated call.

    Returns:
        Float32 ``[B, Hq, num_segments]``.
    """
    call = arguments.attention
    return _measure(
        call.query,
        call.key,
        arguments.segments,
        arguments.num_segments,
        call.mask,
        call.key_lengths,
        call.causal,
        call.scale,
        call.window,
        call.softcap,
        call.sinks,
    )
