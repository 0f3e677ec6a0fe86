"""The linear layer of PyTorch itself."""

import torch
from torch import Tensor


def run(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes ``torch.nn.functional.linear``.

    Args:
        input: ``[..., in]``.
        weight: ``[out, in]``.
        bias: ``[out]`` or None.

    Returns:
        ``[..., out]``.
    """
    return torch.nn.functional.linear(input, weight, bias)
