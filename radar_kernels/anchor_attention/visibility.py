"""Which keys a query may attend to."""

import torch
from torch import Tensor

from radar_kernels.anchor_attention.arguments import AnchorAttentionArguments


def visible_keys(
    arguments: AnchorAttentionArguments,
    start: int = 0,
    stop: int | None = None,
    position: Tensor | None = None,
) -> Tensor | None:
    """Joins mask, key lengths, causality and window for the queries ``start`` to ``stop``.

    Args:
        arguments: a validated call.
        start: first query.
        stop: end of the queries; None means all.
        position: integers ``[n]``, the keys asked about; None means all ``k``.

    Returns:
        Bool, each size 1 or full of ``[B, Hq, stop - start, n or k]``, True = may attend; None if
        nothing is hidden.
    """
    tokens, keys = arguments.query.shape[2], arguments.key.shape[2]
    stop = tokens if stop is None else stop
    visible = arguments.mask
    if visible is not None and visible.shape[2] != 1:
        visible = visible[:, :, start:stop]
    if visible is not None and position is not None:
        visible = visible[..., position]
    if arguments.key_lengths is None and not arguments.causal:
        return visible
    device = arguments.device
    if position is None:
        position = torch.arange(keys, device=device)
    if arguments.key_lengths is None:
        end = torch.full((1, 1, 1, 1), keys, device=device)
    else:
        end = arguments.key_lengths.view(-1, 1, 1, 1)
    if arguments.causal:
        own = end - tokens + torch.arange(start, stop, device=device).view(1, 1, -1, 1)
        inside = position <= own
        if arguments.window is not None:
            inside &= position > own - arguments.window
    else:
        inside = position < end
    return inside if visible is None else visible & inside


def seen_by_any(visible: Tensor, key_heads: int) -> Tensor:
    """Says which keys any query that reads them may attend to.

    Args:
        visible: bool ``[B|1, Hq|1, q|1, k]``.
        key_heads: number of key heads.

    Returns:
        Bool ``[B|1, Hkv|1, k]``.
    """
    seen = visible.any(2)
    return seen if seen.shape[1] == 1 else seen.unflatten(1, (key_heads, -1)).any(2)
