"""The logit operators in plain PyTorch."""

import torch
from torch import Tensor

from radar_kernels.logit_blend.arguments import BlendArguments, SampleArguments
from radar_kernels.logit_blend.philox import gumbel, gumbel_rows


def blend(arguments: BlendArguments) -> Tensor:
    """Blends two rows of logits.

    Args:
        arguments: the validated call.

    Returns:
        Float32 ``[B, V]``.
    """
    full, masked = arguments.full.to(torch.float32), arguments.masked.to(torch.float32)
    strength = arguments.strength[:, None]
    # Infinite logits are rules, not measurements: they have no difference to scale.
    infinite = torch.isinf(full) | torch.isinf(masked)
    adjustment = (strength - 1) * (full - masked).masked_fill(infinite, 0)
    if arguments.modulated:
        share = torch.softmax(full, -1).clamp_min(1e-6)
        share = share / share.amax(-1, keepdim=True)
        modulated = (adjustment * share).clamp(-1e2, 1e2)
        adjustment = torch.where(strength.abs() > 1, modulated, adjustment.clamp(-1e3, 1e3))
    blended = full + adjustment
    if arguments.modulated:
        blended = blended.clamp(-1e3, 1e3)
    return torch.where(infinite | (strength == 1), full, blended)


def sample(arguments: SampleArguments) -> Tensor:
    """Blends, truncates and draws one token a row.

    Args:
        arguments: the validated call.

    Returns:
        Int64 ``[B]``; -1 for a row without any logit above -inf.
    """
    logits = arguments.full.to(torch.float32)
    if arguments.masked is not None:
        logits = blend(BlendArguments(logits, arguments.masked, arguments.strength, False))
    logits = logits.masked_fill(torch.isnan(logits), -torch.inf)
    greedy = (arguments.temperature == 0)[:, None]
    warm = logits / arguments.temperature[:, None].masked_fill(greedy, 1)
    scores = torch.where(greedy, warm, _perturbed(_truncated(warm, arguments), arguments))
    best, token = scores.max(-1)
    return token.masked_fill(best == -torch.inf, -1)


def _perturbed(logits: Tensor, arguments: SampleArguments) -> Tensor:
    """Gumbel's trick: the largest perturbed logit is a draw from the softmax."""
    truncates = any(
        limit is not None for limit in (arguments.top_k, arguments.top_p, arguments.min_p)
    )
    if not truncates or logits.device.type != "cpu":
        return logits + gumbel_rows(arguments.seed, arguments.offset, logits.shape[1])
    row, token = (logits > -torch.inf).nonzero(as_tuple=True)
    noise = gumbel(arguments.seed[row], arguments.offset[row], token)
    return logits.index_put((row, token), noise, accumulate=True)


def _truncated(logits: Tensor, arguments: SampleArguments) -> Tensor:
    """top-k, then top-p of what is left, then min-p of that; ties with the last kept stay."""
    top_k, top_p, min_p = arguments.top_k, arguments.top_p, arguments.min_p
    floor = torch.full_like(logits[:, :1], -torch.inf)
    if top_k is not None or top_p is not None:
        order = logits.sort(-1, descending=True).values
        if top_k is not None:
            vocabulary = logits.shape[1]
            last = torch.where(top_k > 0, top_k, vocabulary).clamp_max(vocabulary) - 1
            floor = order.gather(1, last[:, None])
        if top_p is not None:
            weight = torch.softmax(order.masked_fill(order < floor, -torch.inf).double(), -1)
            larger = weight.cumsum(-1) - weight
            kept = ((larger < top_p[:, None]) & (order >= floor)).sum(-1, keepdim=True)
            floor = torch.where((top_p < 1)[:, None], order.gather(1, kept.clamp_min(1) - 1), floor)
    if min_p is not None:
        floor = torch.maximum(floor, logits.amax(-1, keepdim=True) + min_p.log()[:, None])
    return logits.masked_fill(logits < floor, -torch.inf)
