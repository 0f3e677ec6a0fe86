"""Anchor attention through torch's own scaled dot product attention.

On CPUs, where no gradient is needed, the flash kernel takes the bias per key (``flash.py``).
Everywhere else the bias rides in extra columns of the head dimension: with ``q' = [q, c b]`` and
``k' = [k, a]`` the dot product is ``q . k + c b a``, which any kernel computes and any autograd
differentiates.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from radar_kernels.anchor_attention.arguments import AnchorAttentionArguments
from radar_kernels.anchor_attention.flash import (
    attend,
    attend_parts,
    why_not_flash,
    with_positive_scale,
    with_sinks,
)
from radar_kernels.anchor_attention.merge import merge_parts
from radar_kernels.anchor_attention.visibility import seen_by_any, visible_keys
from radar_kernels.backends import has_tangent, needs_gradient

_MASK_BYTES = 64 * 2**20


def unsupported(arguments: AnchorAttentionArguments) -> str | None:
    """Says why a call cannot be served by this backend.

    Args:
        arguments: the validated call.

    Returns:
        The reason, or None if ``run`` can serve it.
    """
    if arguments.softcap is not None:
        return "torch's attention has no softcap"
    if 0 in arguments.query.shape or 0 in arguments.key.shape:
        return "query or key is empty"
    if arguments.bias is not None and arguments.scale == 0:
        return "scale is 0"
    if has_tangent(arguments.query, arguments.key, arguments.value, arguments.bias):
        return "torch's attention has no forward-mode derivative"
    wants_sums = (
        arguments.sinks is not None or arguments.target_mass is not None or arguments.return_mass
    )
    if not wants_sums:
        return None
    if needs_gradient(arguments):
        return "sinks, target_mass and return_mass have no gradient through torch's attention"
    if (reason := why_not_flash(arguments)) is not None:
        return f"sinks, target_mass and return_mass need torch's flash attention for CPUs: {reason}"
    if arguments.return_mass and arguments.anchors is not None and not _is_bool(arguments):
        return "return_mass needs bool anchors"
    return None


def run(arguments: AnchorAttentionArguments) -> tuple[Tensor, Tensor | None]:
    """Runs a call.

    Args:
        arguments: a validated call that ``unsupported`` accepts.

    Returns:
        Output ``[B, Hq, q, Dv]`` in the dtype of the query, and the mass ``[B, Hq, q]`` float32 if
        asked for.
    """
    flash = not needs_gradient(arguments) and why_not_flash(arguments) is None
    if not flash:
        return _by_columns(arguments), None
    if arguments.anchors is not None and (
        arguments.return_mass or arguments.target_mass is not None
    ):
        return _by_parts(arguments)
    out, lse = attend(arguments)
    if arguments.sinks is not None:
        out, _ = with_sinks(out, lse, arguments.sinks)
    if not arguments.return_mass:
        return out, None
    return out, torch.zeros(out.shape[:3], dtype=torch.float32)


def _is_bool(arguments: AnchorAttentionArguments) -> bool:
    return arguments.anchors is not None and arguments.anchors.dtype == torch.bool


def _by_parts(arguments: AnchorAttentionArguments) -> tuple[Tensor, Tensor | None]:
    anchored, anchored_lse, rest, rest_lse = attend_parts(arguments)
    _, mass = merge_parts(anchored, anchored_lse, rest, rest_lse)
    steered = anchored_lse
    if arguments.bias is not None:
        steered = anchored_lse + arguments.bias[:, :, None]
    elif arguments.target_mass is not None:
        bias = torch.logit(arguments.target_mass.to(rest_lse.dtype))[:, :, None]
        bias = bias - (anchored_lse - rest_lse)
        if not arguments.target_exact:
            bias = bias.clamp_min(0)
        # Rows of mass 0 or 1 are left alone.
        one_sided = (anchored_lse == -torch.inf) | (rest_lse == -torch.inf)
        steered = anchored_lse + bias.masked_fill(one_sided, 0)
    out, _ = merge_parts(anchored, steered, rest, rest_lse)
    return out, mass.to(torch.float32) if arguments.return_mass else None


def _by_columns(arguments: AnchorAttentionArguments) -> Tensor:
    """Public scaled dot product attention only; differentiable."""
    query, scale = with_positive_scale(arguments.query, arguments.scale)
    arguments = replace(arguments, query=query, scale=scale)
    query, key, value = arguments.query, arguments.key, arguments.value
    batch, heads, tokens, _ = query.shape
    key_heads, keys, value_size = value.shape[1:]
    if arguments.bias is not None and arguments.anchors is not None:
        query, key = _widened(arguments, arguments.bias, arguments.anchors)
        if value_size == arguments.key.shape[3]:
            # Flash kernels want one head size for all three.
            value = pad(value, (0, key.shape[3] - value_size))
    triangle = (
        arguments.causal
        and tokens == keys
        and arguments.window is None
        and arguments.mask is None
        and arguments.key_lengths is None
    )
    if triangle or (visible := visible_keys(arguments)) is None:
        if tokens == 1:
            query = query.reshape(batch, key_heads, -1, query.shape[3])
        out = scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=triangle and tokens > 1,
            scale=arguments.scale,
            enable_gqa=query.shape[1] != key_heads,
        )
        return out.reshape(batch, heads, tokens, -1)[..., :value_size]
    del visible
    group = heads // key_heads
    step = max(1, _MASK_BYTES // max(1, batch * heads * keys))
    outs = []
    for start in range(0, tokens, step):
        stop = min(tokens, start + step)
        visible = visible_keys(arguments, start, stop)
        assert visible is not None
        unseen = ~seen_by_any(visible, key_heads)[..., None]
        alive = visible.any(-1, keepdim=True)
        few = scaled_dot_product_attention(
            query[:, :, start:stop],
            # Kernels that take a mask take no groups of heads.
            key.masked_fill(unseen, 0).repeat_interleave(group, 1),
            value.masked_fill(unseen, 0).repeat_interleave(group, 1),
            # A query that sees nothing would be NaN in some kernels: let it see zeros instead.
            attn_mask=visible | ~alive,
            scale=arguments.scale,
        )
        outs.append(few.masked_fill(~alive, 0))
    return torch.cat(outs, 2)[..., :value_size]


def _widened(
    arguments: AnchorAttentionArguments, bias: Tensor, anchors: Tensor
) -> tuple[Tensor, Tensor]:
    """Query and key with the columns whose product, times scale, is bias * anchors."""
    query, key = arguments.query, arguments.key
    dtype = query.dtype
    # A power of two near 1 / scale costs no bit and keeps both columns in float16's range.
    power = 2.0 ** round(-math.log2(abs(arguments.scale)))
    left = (bias.double() if dtype == torch.float64 else bias) / (arguments.scale * power)
    right = anchors * power
    columns = [(left, right)]
    if dtype in (torch.float16, torch.bfloat16):
        high = left.to(dtype).to(left.dtype)
        columns = [(high, right), (left - high, right)]
        if anchors.dtype != torch.bool:
            coarse = right.to(dtype).to(right.dtype)
            columns = [(high, coarse), (left - high, coarse), (high, right - coarse)]
    tokens, keys, size = query.shape[2], key.shape[2], query.shape[3]
    batch, heads, key_heads = query.shape[0], query.shape[1], key.shape[1]
    lefts = torch.stack([one for one, _ in columns], -1).to(dtype)[:, :, None]
    rights = torch.stack([one for _, one in columns], -1).to(dtype)[:, None]
    wide_query = torch.cat([query, lefts.expand(batch, heads, tokens, -1)], -1)
    wide_key = torch.cat([key, rights.expand(batch, key_heads, keys, -1)], -1)
    if query.device.type != "cpu":
        spare = -(size + len(columns)) % 8
        wide_query, wide_key = pad(wide_query, (0, spare)), pad(wide_key, (0, spare))
    return wide_query, wide_key
