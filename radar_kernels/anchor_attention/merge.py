"""Joining two softmax parts by their log-sum-exps."""

import torch
from torch import Tensor

from radar_kernels import native

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def merge_parts(
    first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Softmax attention over the union of two disjoint sets of keys.

    Args:
        first: attention output over the first set, ``[..., Dv]``.
        first_lse: log-sum-exp of its logits, ``[...]``; -inf for an empty set.
        second: output over the second set.
        second_lse: its log-sum-exp.

    Returns:
        The output in the dtype of ``first``, 0 where both sets are empty, and the share of the
        first set, ``e^L1 / (e^L1 + e^L2)``.
    """
    share = torch.sigmoid(first_lse - second_lse)
    share = share.masked_fill(first_lse == -torch.inf, 0)
    weight = share.unsqueeze(-1)
    # An empty part counts nothing, whatever its output.
    out = torch.lerp(second.to(weight.dtype), first.to(weight.dtype), weight)
    return out.to(first.dtype), share


def join_parts(
    first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Softmax attention over the union of two disjoint sets of keys, with its log-sum-exp.

    Args:
        first: attention output over the first set, ``[B, Hq, q, Dv]``.
        first_lse: log-sum-exp of its logits, ``[B, Hq, q]``; -inf for an empty set.
        second: output over the second set.
        second_lse: its log-sum-exp.

    Returns:
        The output in the dtype of ``first`` and the log-sum-exp of the union.
    """
    plain = first.is_cpu and first.dtype in _DTYPES and first_lse.dtype == torch.float32
    needs_gradient = torch.is_grad_enabled() and (first.requires_grad or second.requires_grad)
    if plain and not needs_gradient and native.absent() is None:
        return torch.ops.radar_cpp.merge_parts(first, first_lse, second, second_lse)
    out, _ = merge_parts(first, first_lse, second, second_lse)
    return out, torch.logaddexp(first_lse, second_lse)
