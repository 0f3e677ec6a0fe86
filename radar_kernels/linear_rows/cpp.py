"""The linear layer on one to eight rows on CPUs, in C++: bound by the bytes of the weights."""

import torch
from torch import Tensor

from radar_kernels import native

MOST_ROWS = 8
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

absent = native.absent

if absent() is None:
    _linear = torch.ops.radar_cpp.linear_rows.default


def unsupported(input: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Says why a call cannot be served.

    Args:
        input: ``[..., in]``.
        weight: ``[out, in]``.
        bias: ``[out]`` or None.

    Returns:
        The reason, or None if ``run`` can serve it.
    """
    if (reason := absent()) is not None:
        return reason
    if not (input.is_cpu and weight.is_cpu):
        return f"it runs on the CPU only, got {input.device} and {weight.device}"
    dtype = weight.dtype
    if input.dtype != dtype or dtype not in _DTYPES:
        return f"it takes one dtype of float32, bfloat16, float16, got {input.dtype} and {dtype}"
    if weight.dim() != 2 or not weight.is_contiguous():
        return "weight must be contiguous [out, in]"
    shape = input.shape
    if not shape or shape[-1] != weight.shape[1]:
        return f"input of shape {tuple(shape)} does not fit weight of {tuple(weight.shape)}"
    rows = input.numel() // shape[-1] if shape[-1] else 0
    if not 1 <= rows <= MOST_ROWS:
        return f"it takes 1 to {MOST_ROWS} rows, got {rows}"
    if torch.is_grad_enabled() and (
        input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return "it computes no gradients, and an input requires one (torch.no_grad() turns it off)"
    if bias is not None and (
        bias.shape != weight.shape[:1]
        or bias.dtype != dtype
        or not bias.is_cpu
        or not bias.is_contiguous()
    ):
        return f"bias must be contiguous {dtype} [{weight.shape[0]}]"
    return None


def run(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes a call that ``unsupported`` has let through.

    Args:
        input: ``[..., in]``, any strides.
        weight: ``[out, in]``, contiguous.
        bias: ``[out]`` or None.

    Returns:
        ``[..., out]``, contiguous.
    """
    return _linear(input, weight, bias)
