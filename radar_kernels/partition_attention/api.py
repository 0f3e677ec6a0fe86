"""The public functions of partitioned attention."""

from typing import NamedTuple

import torch
from torch import Tensor

from radar_kernels.anchor_attention.api import prepare_anchor_attention
from radar_kernels.anchor_attention.arguments import AnchorAttentionArguments
from radar_kernels.anchor_attention.merge import merge_parts
from radar_kernels.anchor_attention.validation import per_head
from radar_kernels.backends import choose, needs_gradient
from radar_kernels.checks import check_tensors
from radar_kernels.partition_attention import reference
from radar_kernels.registration import register, token_major


class Partition(NamedTuple):
    """Softmax attention in two parts.

    Args:
        anchored: output over the anchored keys alone, ``[B, Hq, q, Dv]``, dtype of the query; 0
            where a query sees none.
        anchored_lse: log-sum-exp of their logits, ``[B, Hq, q]``, float32 (float64 for float64
            inputs), natural logarithm; -inf where a query sees none.
        rest: output over the other keys: attention with the anchors hidden.
        rest_lse: its log-sum-exp, sinks included.
    """

    anchored: Tensor
    anchored_lse: Tensor
    rest: Tensor
    rest_lse: Tensor


def partition_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    anchors: Tensor,
    *,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: str | None = None,
) -> Partition:
    """Attends to the anchored keys and to the rest, each by itself.

    Args:
        query: this and all others as in ``anchor_attention``.
        key: ``[B, Hkv, k, D]``.
        value: ``[B, Hkv, k, Dv]``.
        anchors: bool ``[B, k]`` or ``[1, k]``.
        mask: bool, True = may attend.
        key_lengths: integers ``[B]``.
        causal: whether a query sees only keys up to its own.
        scale: factor of the dot products; None means ``1 / sqrt(D)``.
        window: number of latest keys a query sees.
        softcap: cap of the logits.
        sinks: ``[Hq]``; they belong to the rest.
        backend: "triton", "cpp", "sdpa" or "reference"; None chooses.

    Returns:
        The ``Partition``. With ``L`` the log-sum-exps, the mass of the anchors is
        ``sigmoid(L_anchored - L_rest)``; ``merge_partition`` gives attention with any bias.

    Raises:
        ValueError: an argument is malformed, or ``backend`` cannot serve the call.
    """
    arguments = prepare_partition_attention(
        query,
        key,
        value,
        anchors,
        mask=mask,
        key_lengths=key_lengths,
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    if torch.compiler.is_compiling():
        return Partition(*_traced(arguments, backend))
    return Partition(*choose("partition_attention", arguments, backend)(arguments))


def prepare_partition_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    anchors: Tensor,
    *,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> AnchorAttentionArguments:
    """Validates and normalises a call.

    Args:
        query: this and all others as in ``partition_attention``.

    Returns:
        What the implementations are called with.

    Raises:
        ValueError: an argument is malformed.
    """
    check_tensors(anchors=anchors)
    if anchors.dtype != torch.bool:
        raise ValueError(
            f"anchors are {anchors.dtype}; expected a bool tensor [B, k], pass anchors != 0"
        )
    return prepare_anchor_attention(
        query,
        key,
        value,
        anchors,
        mask=mask,
        key_lengths=key_lengths,
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        return_mass=True,
    )


def merge_partition(partition: Partition, bias: float | Tensor = 0.0) -> Tensor:
    """Attention with a bias on the anchored keys, from its two parts.

    Args:
        partition: what ``partition_attention`` returned.
        bias: a float, 0-dim, ``[Hq]``, ``[B, Hq]`` or ``[B, 1]``, in nats.

    Returns:
        ``(e^(L_A + bias) o_A + e^(L_R) o_R) / (e^(L_A + bias) + e^(L_R))``, ``[B, Hq, q, Dv]``; 0
        where both parts are empty.

    Raises:
        ValueError: ``partition`` is none, or ``bias`` has another shape or is not finite.
    """
    if not isinstance(partition, Partition):
        raise ValueError(
            f"partition is {type(partition).__name__}; expected what partition_attention returns"
        )
    batch, heads, _, _ = partition.anchored.shape
    checked = not torch.compiler.is_compiling()
    added = per_head("bias", bias, batch, heads, partition.anchored.device, checked)
    return merge_parts(
        partition.anchored,
        partition.anchored_lse + added[:, :, None],
        partition.rest,
        partition.rest_lse,
    )[0]


def _traced(
    arguments: AnchorAttentionArguments, backend: str | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if needs_gradient(arguments):
        return reference.run(arguments)
    call = arguments
    return _registered(
        call.query,
        call.key,
        call.value,
        call.anchors,
        call.mask,
        call.key_lengths,
        call.causal,
        call.scale,
        call.window,
        call.softcap,
        call.sinks,
        backend,
    )


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    anchors: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    causal: bool,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = AnchorAttentionArguments(
        query,
        key,
        value,
        anchors,
        mask=mask,
        key_lengths=key_lengths,
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        return_mass=True,
    )
    anchored, anchored_lse, rest, rest_lse = choose("partition_attention", call, backend)(call)
    return (
        token_major(anchored),
        anchored_lse.contiguous(),
        token_major(rest),
        rest_lse.contiguous(),
    )


def _fake(
    query: Tensor, key: Tensor, value: Tensor, *others: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, tokens, _ = query.shape
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32

    def out() -> Tensor:
        return query.new_empty(batch, tokens, heads, value.shape[3]).transpose(1, 2)

    def lse() -> Tensor:
        return query.new_empty(batch, heads, tokens, dtype=dtype)

    return out(), lse(), out(), lse()


register(
    "partition_attention(Tensor query, Tensor key, Tensor value, Tensor anchors, Tensor? mask, "
    "Tensor? key_lengths, bool causal, float scale, int? window, float? softcap, Tensor? sinks, "
    "str? backend=None) -> (Tensor, Tensor, Tensor, Tensor)",
    _run,
    _fake,
)
_registered = torch.ops.radar.partition_attention.default
