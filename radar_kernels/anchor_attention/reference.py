"""Anchor attention in plain PyTorch: serves every call on every device; differentiable."""

import torch
from torch import Tensor

from radar_kernels.anchor_attention.arguments import AnchorAttentionArguments
from radar_kernels.anchor_attention.scores import score_chunks, softmax_weights, weighted_values


def unsupported(arguments: AnchorAttentionArguments) -> str | None:
    """Says why a call cannot be served: never.

    Args:
        arguments: the validated call.

    Returns:
        None.
    """
    return None


def run(arguments: AnchorAttentionArguments) -> tuple[Tensor, Tensor | None]:
    """Runs a call, accumulating in float32 (float64 for float64 inputs).

    Args:
        arguments: the validated call.

    Returns:
        Output ``[B, Hq, q, Dv]`` in the dtype of the query, and the mass ``[B, Hq, q]`` float32 if
        asked for.
    """
    query, value = arguments.query, arguments.value
    batch, heads, tokens, _ = query.shape
    outs: list[Tensor] = []
    masses: list[Tensor] = []
    if arguments.key.shape[2] and tokens:
        for chunk in score_chunks(arguments):
            scores = chunk.scores
            if arguments.anchors is not None:
                scores, mass = _steer(scores, arguments)
                if mass is not None:
                    masses.append(mass)
            weights, _ = softmax_weights(scores, arguments.sinks)
            outs.append(weighted_values(weights, chunk.value).to(query.dtype))
    if outs:
        out = torch.cat(outs, 2) if len(outs) > 1 else outs[0]
    else:
        out = query.new_zeros(batch, heads, tokens, value.shape[3])
    if not arguments.return_mass:
        return out, None
    if masses:
        return out, torch.cat(masses, 2).to(torch.float32)
    return out, query.new_zeros(batch, heads, tokens, dtype=torch.float32)


def _steer(scores: Tensor, arguments: AnchorAttentionArguments) -> tuple[Tensor, Tensor | None]:
    """The biased logits and the mass before the bias."""
    assert arguments.anchors is not None
    factor = arguments.anchors[:, None, None, :]
    anchored = factor != 0 if factor.dtype != torch.bool else factor
    mass = None
    if arguments.return_mass or arguments.target_mass is not None:
        odds, empty, full = _log_odds(scores, anchored, arguments.sinks)
        mass = torch.sigmoid(odds).masked_fill(empty, 0).masked_fill(full, 1)
    if arguments.target_mass is not None:
        bias = _per_query(torch.logit(arguments.target_mass.to(scores.dtype))) - odds
        if not arguments.target_exact:
            bias = bias.clamp_min(0)
        bias = bias.masked_fill(empty | full, 0)[..., None]
    elif arguments.bias is not None:
        bias = _per_query(arguments.bias.to(scores.dtype))[..., None]
    else:
        return scores, mass
    return scores + bias * factor, mass


def _log_odds(
    scores: Tensor, anchored: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """log(mass / (1 - mass)) per query; where nothing anchored, nothing else is there."""
    anchored_lse = torch.logsumexp(scores.masked_fill(~anchored, -torch.inf), -1)
    rest_lse = torch.logsumexp(scores.masked_fill(anchored, -torch.inf), -1)
    if sinks is not None:
        rest_lse = torch.logaddexp(rest_lse, sinks.to(scores.dtype).view(-1, 1))
    empty, full = anchored_lse == -torch.inf, rest_lse == -torch.inf
    odds = anchored_lse.masked_fill(empty, 0) - rest_lse.masked_fill(full, 0)
    return odds, empty, full & ~empty


def _per_query(per_head: Tensor) -> Tensor:
    return per_head[:, :, None]
