"""Partitioned attention in plain PyTorch: serves every call; differentiable."""

import torch
from torch import Tensor

from radar_kernels.anchor_attention.arguments import AnchorAttentionArguments
from radar_kernels.anchor_attention.scores import score_chunks, softmax_weights, weighted_values


def run(arguments: AnchorAttentionArguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes both parts, accumulating in float32 (float64 for float64 inputs).

    Args:
        arguments: a validated call with bool anchors.

    Returns:
        Output ``[B, Hq, q, Dv]`` and log-sum-exp ``[B, Hq, q]`` of the anchored keys, then of the
        rest.
    """
    assert arguments.anchors is not None
    query = arguments.query
    anchored = arguments.anchors[:, None, None, :]
    parts: list[list[Tensor]] = [[], [], [], []]
    for chunk in score_chunks(arguments) if 0 not in arguments.key.shape else ():
        for place, hidden, sinks in ((0, ~anchored, None), (2, anchored, arguments.sinks)):
            scores = chunk.scores.masked_fill(hidden, -torch.inf)
            weights, lse = softmax_weights(scores, sinks)
            parts[place].append(weighted_values(weights, chunk.value).to(query.dtype))
            parts[place + 1].append(lse)
    if parts[0]:
        anchored_out, anchored_lse, rest, rest_lse = (torch.cat(part, 2) for part in parts)
        return anchored_out, anchored_lse, rest, rest_lse
    out = query.new_zeros(*query.shape[:3], arguments.value.shape[3])
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    lse = query.new_full(query.shape[:3], -torch.inf, dtype=dtype)
    rest_lse = lse.clone()
    if arguments.sinks is not None:
        rest_lse = arguments.sinks.to(dtype).view(1, -1, 1).expand_as(lse).clone()
    return out, lse, out.clone(), rest_lse
