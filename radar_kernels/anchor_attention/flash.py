"""Torch's flash attention for CPUs, with a bias per key and the log-sum-exp.

``scaled_dot_product_attention`` accepts either causality or a mask; the operator beneath it takes
both, reads a ``[B, Hq, 1, k]`` mask without expanding it, and returns the log-sum-exp. So a bias
on a causal prompt costs no ``[q, k]`` memory. Not differentiable here.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from radar_kernels.anchor_attention.arguments import AnchorAttentionArguments
from radar_kernels.anchor_attention.merge import join_parts
from radar_kernels.anchor_attention.visibility import seen_by_any, visible_keys

# Queries that share one [q, k] mask: enough for the kernel's own blocks of 256.
_ROWS = 256


def why_not_flash(arguments: AnchorAttentionArguments) -> str | None:
    """Says why torch's flash attention for CPUs cannot serve a call.

    Args:
        arguments: the validated call.

    Returns:
        The reason, or None.
    """
    query, key, value = arguments.query, arguments.key, arguments.value
    if query.device.type != "cpu":
        return f"it runs on CPUs only, query is on {query.device}"
    if not hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return f"torch {torch.__version__} has no flash attention for CPUs"
    if value.shape[3] != query.shape[3]:
        return f"it needs equal head sizes, key has {query.shape[3]} and value {value.shape[3]}"
    if 0 in query.shape or 0 in key.shape:
        return "query or key is empty"
    return None


def attend(arguments: AnchorAttentionArguments, bias_hides: bool = False) -> tuple[Tensor, Tensor]:
    """Attends with everything but softcap, sinks and target mass.

    Args:
        arguments: a call that ``why_not_flash`` accepts.
        bias_hides: whether the bias itself may be -inf.

    Returns:
        Output ``[B, Hq, q, Dv]``, 0 for queries that see nothing, and the log-sum-exp of the
        biased logits ``[B, Hq, q]``, -inf there.
    """
    call = _trimmed(arguments)
    if call.key.shape[2] == 0:
        return nothing(arguments)
    tokens, keys = call.query.shape[2], call.key.shape[2]
    row_wise = tokens > 1 and (
        (call.mask is not None and call.mask.shape[2] > 1)
        or (call.causal and (call.window or call.key_lengths is not None or tokens > keys))
    )
    if row_wise:
        parts = list(_row_wise(call))
        return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)
    causal = call.causal and tokens > 1
    visible = visible_keys(replace(call, causal=False) if causal else call)
    key, value = _readable(call, visible)
    bias = _key_bias(call, visible)
    past = keys - tokens
    hides = bias_hides or visible is not None
    if not causal or past == 0:
        return _flash(call.query, key, value, bias, call.scale, causal, hides)
    before = None if bias is None else bias[..., :past]
    after = None if bias is None else bias[..., past:]
    old, old_lse = _flash(
        call.query, key[:, :, :past], value[:, :, :past], before, call.scale, False, hides
    )
    new, new_lse = _flash(
        call.query, key[:, :, past:], value[:, :, past:], after, call.scale, True, hides
    )
    return join_parts(old, old_lse, new, new_lse)


def attend_parts(arguments: AnchorAttentionArguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attends to the anchored keys and to the rest, each by itself, without bias.

    Args:
        arguments: a call with bool anchors that ``why_not_flash`` accepts.

    Returns:
        Output and log-sum-exp of the anchored keys, then of the rest; sinks belong to the rest.
    """
    anchors = arguments.anchors
    assert anchors is not None
    plain = replace(arguments, anchors=None, bias=None, target_mass=None)
    # Hidden by bias and not by mask: masked keys would be cleared, and these are fit to be read.
    hide = torch.full((1, 1), -torch.inf)
    rest, rest_lse = attend(replace(plain, anchors=anchors, bias=hide), bias_hides=True)
    if arguments.sinks is not None:
        rest, rest_lse = with_sinks(rest, rest_lse, arguments.sinks)
    chosen = anchors.any(0).nonzero().squeeze(-1)
    if len(chosen) == 0:
        return (*nothing(arguments), rest, rest_lse)
    key, value = arguments.key[:, :, chosen], arguments.value[:, :, chosen]
    outs, sums = [], []
    for start in range(0, arguments.query.shape[2], _ROWS):
        stop = min(start + _ROWS, arguments.query.shape[2])
        visible = visible_keys(arguments, start, stop, chosen)
        kept = anchors[:, None, None, chosen]
        visible = kept if visible is None else visible & kept
        few = replace(
            plain,
            query=arguments.query[:, :, start:stop],
            key=key,
            value=value,
            mask=visible,
            key_lengths=None,
            causal=False,
            window=None,
        )
        out, lse = attend(few)
        outs.append(out)
        sums.append(lse)
    return torch.cat(outs, 2), torch.cat(sums, 2), rest, rest_lse


def with_positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """Moves a scale that is not positive into the query.

    Torch's kernels hide keys by -inf before they scale, which gives NaN times 0 and +inf times a
    negative scale.

    Args:
        query: ``[B, Hq, q, D]``.
        scale: any finite number.

    Returns:
        Query and scale of the same logits, the scale above 0.
    """
    if scale > 0:
        return query, scale
    return (-query, -scale) if scale < 0 else (query * 0, 1.0)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Adds one logit per head that has no value.

    Args:
        out: ``[B, Hq, q, Dv]``.
        lse: its log-sum-exp ``[B, Hq, q]``.
        sinks: ``[Hq]``.

    Returns:
        The scaled output and the log-sum-exp with the sink.
    """
    sink = sinks.to(lse.dtype).view(-1, 1)
    share = torch.sigmoid((lse - sink).masked_fill(sink == -torch.inf, torch.inf))
    return (out * share.unsqueeze(-1)).to(out.dtype), torch.logaddexp(lse, sink)


def nothing(arguments: AnchorAttentionArguments) -> tuple[Tensor, Tensor]:
    """The result of attending to no key at all.

    Args:
        arguments: the validated call.

    Returns:
        Zeros ``[B, Hq, q, Dv]`` and -inf ``[B, Hq, q]``.
    """
    query = arguments.query
    out = query.new_zeros(*query.shape[:3], arguments.value.shape[3])
    return out, out.new_full(query.shape[:3], -torch.inf, dtype=_accumulator(query))


def _trimmed(call: AnchorAttentionArguments) -> AnchorAttentionArguments:
    """Without the keys beyond the longest row; without lengths where all rows are equally long."""
    if call.key_lengths is None:
        return call
    lengths = call.key_lengths.tolist()
    keys = max(lengths)
    return replace(
        call,
        key=call.key[:, :, :keys],
        value=call.value[:, :, :keys],
        anchors=None if call.anchors is None else call.anchors[:, :keys],
        mask=None if call.mask is None else call.mask[..., :keys],
        key_lengths=None if min(lengths) == keys else call.key_lengths,
    )


def _row_wise(call: AnchorAttentionArguments) -> Iterator[tuple[Tensor, Tensor]]:
    """A mask of its own for every query, a few queries and only the keys they see at a time."""
    tokens, keys = call.query.shape[2], call.key.shape[2]
    for start in range(0, tokens, _ROWS):
        stop = min(tokens, start + _ROWS)
        first, last = 0, keys
        if call.causal and call.key_lengths is None:
            last = max(1, keys - tokens + stop)
            if call.window is not None:
                first = min(last - 1, max(0, keys - tokens + start - call.window + 1))
        visible = visible_keys(call, start, stop)
        assert visible is not None
        visible = visible[..., first:last]
        few = replace(
            call,
            query=call.query[:, :, start:stop],
            key=call.key[:, :, first:last],
            value=call.value[:, :, first:last],
            anchors=None if call.anchors is None else call.anchors[:, first:last],
        )
        key, value = _readable(few, visible)
        yield _flash(few.query, key, value, _key_bias(few, visible), call.scale, False, True)


def _readable(call: AnchorAttentionArguments, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys and values with 0 where no query reads: 0 * NaN is NaN."""
    if visible is None:
        return call.key, call.value
    # A sum is finite only if every element is: reading is cheaper than copying.
    if bool(torch.isfinite(call.key.sum() + call.value.sum())):
        return call.key, call.value
    unseen = ~seen_by_any(visible, call.key.shape[1])[..., None]
    return call.key.masked_fill(unseen, 0), call.value.masked_fill(unseen, 0)


def _key_bias(call: AnchorAttentionArguments, visible: Tensor | None) -> Tensor | None:
    """What is added to the logits, [B|1, Hq|1, q|1, k]; -inf hides."""
    dtype = _accumulator(call.query)
    if call.bias is None or call.anchors is None:
        if visible is None:
            return None
        return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)
    bias, anchors = call.bias.to(dtype)[:, :, None, None], call.anchors[:, None, None, :]
    bias = torch.where(anchors, bias, 0) if anchors.dtype == torch.bool else bias * anchors
    return bias if visible is None else torch.where(visible, bias, -torch.inf)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float,
    causal: bool,
    hides: bool,
) -> tuple[Tensor, Tensor]:
    """Call torch's operator; `hides` says whether some of the bias may be -inf."""
    query, scale = with_positive_scale(query, scale)
    batch, heads, tokens, size = query.shape
    key_heads, keys = key.shape[1:3]
    packed = tokens == 1 and heads != key_heads
    mask = bias
    if packed:
        # The queries of a group share their keys: as rows of one product they read them once.
        query = query.reshape(batch, key_heads, -1, size)
        if mask is not None and mask.shape[1] != 1:
            mask = mask.reshape(mask.shape[0], key_heads, -1, keys)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scale
    )
    if packed:
        out, lse = out.reshape(batch, heads, 1, size), lse.reshape(batch, heads, 1)
    if bias is not None and hides:
        # The kernel reports 0 for a query that sees nothing.
        alive = bias != -torch.inf
        alive = alive.cumsum(-1).squeeze(2) > 0 if causal else alive.any(-1)
        lse = lse.masked_fill(~alive, -torch.inf)
    return out, lse


def _accumulator(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32
