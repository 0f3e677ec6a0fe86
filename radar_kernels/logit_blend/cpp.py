"""Blending and drawing on CPUs, in C++: one pass over the logits, and no sort of the vocabulary.

The pass leaves the largest logit of every few tokens; these bound what a truncation can keep, so
that the cut-offs are found among a few candidates, and only those get noise. A row's token does
not depend on its batch and not on the number of threads.
"""

import torch
from torch import Tensor

from radar_kernels import native
from radar_kernels.logit_blend.arguments import BlendArguments, SampleArguments

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

absent = native.absent

if absent() is None:
    _blend = torch.ops.radar_cpp.blend_logits.default
    _sample = torch.ops.radar_cpp.sample_logits.default


def unsupported(arguments: BlendArguments | SampleArguments) -> str | None:
    """Says why a call cannot be served.

    Args:
        arguments: the validated call of either operator.

    Returns:
        The reason, or None if ``blend`` or ``sample`` can serve it.
    """
    full, masked = arguments.full, arguments.masked
    if full.device.type != "cpu":
        return f"it runs on the CPU only, these tensors are on {full.device}"
    if full.dtype not in _DTYPES or (masked is not None and masked.dtype not in _DTYPES):
        return (
            f"it takes float32, bfloat16 and float16, got {full.dtype}"
            f"{'' if masked is None else f' and {masked.dtype}'}"
        )
    return None


def blend(arguments: BlendArguments) -> Tensor:
    """Computes a call of ``blend_logits`` that ``unsupported`` has let through.

    Args:
        arguments: the validated call.

    Returns:
        Float32 ``[B, V]``.
    """
    full, masked = arguments.full, arguments.masked
    if full.dtype != masked.dtype:
        full, masked = full.float(), masked.float()
    return _blend(full, masked, arguments.strength, arguments.modulated)


def sample(arguments: SampleArguments) -> Tensor:
    """Computes a call of ``sample_logits`` that ``unsupported`` has let through.

    Args:
        arguments: the validated call.

    Returns:
        Int64 ``[B]``; -1 for a row without any logit above -inf.
    """
    return _sample(*operands(arguments))


def operands(arguments: SampleArguments) -> tuple[Tensor | None, ...]:
    """Gives what the C++ operators take.

    Args:
        arguments: the validated call.

    Returns:
        Its tensors in the operators' order, both rows of logits in one dtype.
    """
    full, masked = arguments.full, arguments.masked
    if masked is not None and full.dtype != masked.dtype:
        full, masked = full.float(), masked.float()
    return (
        full,
        masked,
        arguments.strength,
        arguments.temperature,
        arguments.top_k,
        arguments.top_p,
        arguments.min_p,
        arguments.seed,
        arguments.offset,
    )
