"""The public function of segment mass."""

import torch
from torch import Tensor

from radar_kernels.anchor_attention.api import prepare_anchor_attention
from radar_kernels.anchor_attention.arguments import AnchorAttentionArguments
from radar_kernels.anchor_attention.validation import described, unit_stride
from radar_kernels.backends import choose, needs_gradient
from radar_kernels.checks import check_integer, check_tensors
from radar_kernels.registration import register
from radar_kernels.segment_mass import reference
from radar_kernels.segment_mass.arguments import SegmentMassArguments


def segment_mass(
    query: Tensor,
    key: Tensor,
    segments: Tensor,
    num_segments: int,
    *,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Measures the attention mass of each segment of the keys, without values.

    Args:
        query: ``[B, Hq, q, D]``, floating point.
        key: ``[B, Hkv, k, D]``, not repeated.
        segments: int32 or int64 ``[B, k]`` (or ``[1, k]``): the segment of each key, -1 for none.
        num_segments: number of segments, at least 1.
        mask: as in ``anchor_attention``.
        key_lengths: integers ``[B]``.
        causal: whether a query sees only keys up to its own.
        scale: factor of the dot products; None means ``1 / sqrt(D)``.
        window: number of latest keys a query sees.
        softcap: cap of the logits.
        sinks: ``[Hq]``; they take mass of no segment.
        backend: "triton", "cpp" or "reference"; None chooses.

    Returns:
        Float32 ``[B, Hq, num_segments]``: ``mean over queries of the sum over the segment's keys of
        softmax(scale * q . k)``. A query that may attend to nothing counts as 0.

    Raises:
        ValueError: an argument is malformed, or ``backend`` cannot serve the call.
    """
    arguments = prepare_segment_mass(
        query,
        key,
        segments,
        num_segments,
        mask=mask,
        key_lengths=key_lengths,
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    if not torch.compiler.is_compiling():
        return choose("segment_mass", arguments, backend)(arguments)
    call = arguments.attention
    if needs_gradient(call):
        return reference.run(arguments)
    return _registered(
        call.query,
        call.key,
        arguments.segments,
        num_segments,
        call.mask,
        call.key_lengths,
        call.causal,
        call.scale,
        call.window,
        call.softcap,
        call.sinks,
        backend,
    )


def prepare_segment_mass(
    query: Tensor,
    key: Tensor,
    segments: Tensor,
    num_segments: int,
    *,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> SegmentMassArguments:
    """Validates and normalises a call.

    Args:
        query: this and all others as in ``segment_mass``.

    Returns:
        What the implementations are called with.

    Raises:
        ValueError: an argument is malformed.
    """
    attention = prepare_anchor_attention(
        query,
        key,
        key,
        mask=mask,
        key_lengths=key_lengths,
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    batch, keys = query.shape[0], key.shape[2]
    if not torch.compiler.is_compiling():
        check_tensors(segments=segments)
        check_integer("num_segments", num_segments)
        integers = (torch.int32, torch.int64)
        if segments.dtype not in integers or segments.shape not in ((batch, keys), (1, keys)):
            raise ValueError(
                f"segments are {described(segments)}; expected int32 [{batch}, {keys}], -1 for none"
            )
        if num_segments < 1:
            raise ValueError(f"num_segments is {num_segments}; expected at least 1")
        if segments.device.type == "cpu" and segments.numel():
            least, most = (int(end) for end in segments.aminmax())
            if least < -1 or most >= num_segments:
                raise ValueError(
                    f"segments are {least} to {most}; expected -1 to {num_segments - 1}, "
                    "num_segments - 1"
                )
    segments = unit_stride(segments.to(query.device, torch.int64)).expand(batch, keys)
    return SegmentMassArguments(attention, segments, num_segments)


def _run(
    query: Tensor,
    key: Tensor,
    segments: Tensor,
    num_segments: int,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    causal: bool,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    backend: str | None = None,
) -> Tensor:
    attention = AnchorAttentionArguments(
        query,
        key,
        key,
        mask=mask,
        key_lengths=key_lengths,
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    call = SegmentMassArguments(attention, segments, num_segments)
    return choose("segment_mass", call, backend)(call)


def _fake(
    query: Tensor, key: Tensor, segments: Tensor, num_segments: int, *others: object
) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], num_segments, dtype=torch.float32)


register(
    "segment_mass(Tensor query, Tensor key, Tensor segments, SymInt num_segments, Tensor? mask, "
    "Tensor? key_lengths, bool causal, float scale, int? window, float? softcap, Tensor? sinks, "
    "str? backend=None) -> Tensor",
    _run,
    _fake,
)
_registered = torch.ops.radar.segment_mass.default
