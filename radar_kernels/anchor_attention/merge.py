"""Joining two softmax parts by their log-sum-exps."""

import torch
from torch import Tensor


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
