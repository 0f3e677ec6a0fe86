"""Segment mass on GPUs, in Triton: two passes over the keys and one over the segments.

Memory is float32 keys x heads, whatever the number of queries; nothing depends on the order in
which programs run. The number of stretches and pieces depends on shapes alone, and a row's bits do
not depend on its batch.
"""

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from radar_kernels import triton_launch
from radar_kernels.anchor_attention.triton import (
    DTYPES,
    LARGEST_SIZE,
    MAX_SPLITS,
    NO_WINDOW,
    demanding_call,
    pack,
)
from radar_kernels.segment_mass.arguments import SegmentMassArguments
from radar_kernels.triton_launch import (
    Launch,
    ceil_div,
    compile_launch,
    interpreted,
    power_of_two,
    run_all,
    target_of,
    used_strides,
    wrong_device,
)

LEAST_KEYS = 256
SPAN_KEYS = 256
SEGMENT_HEADS = 8
SEGMENT_KEYS = 64
TOTAL_ROWS = 32
TOKENS = 16  # of a tile of the second pass, which takes one head at a time
# A segment's keys are cut into pieces until this many programs add segments up.
SEGMENT_PROGRAMS = 2048
MOST_PIECES = 64
PIECE_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Configuration:
    """One pinned setting of the two kernels that multiply.

    Args:
        target: one of ``triton_launch.TARGETS``.
        element_size: bytes of an element of query and key: 2 or 4.
        width: padded head size.
        block_rows: query rows of a tile of the first pass; the second has ``TOKENS``.
        block_keys: keys of a tile.
        warps: warps of a program.
        stages: tiles in flight.
        precision: how fp32 operands are multiplied, "ieee" or "tf32x3".
    """

    target: str
    element_size: int
    width: int
    block_rows: int
    block_keys: int
    warps: int
    stages: int
    precision: str


# (element size, width) -> (query rows of a tile, keys of a tile, warps, stages, fp32 product)
_NVIDIA: dict[tuple[int, int], tuple[int, int, int, int, str]] = {
    (2, 64): (64, 64, 4, 3, "ieee"),
    (2, 128): (64, 64, 4, 2, "ieee"),
    (2, 256): (64, 64, 4, 2, "ieee"),
    (4, 64): (16, 32, 4, 3, "tf32x3"),
    (4, 128): (16, 32, 4, 2, "tf32x3"),
    (4, 256): (16, 16, 8, 2, "ieee"),
}
_TABLE: dict[str, dict[tuple[int, int], tuple[int, int, int, int, str]]] = {
    "sm_80": {**_NVIDIA, (2, 256): (32, 64, 4, 2, "ieee")},
    "sm_90": _NVIDIA,
    "sm_100": _NVIDIA,
    "gfx942": {
        (2, 64): (64, 64, 4, 2, "ieee"),
        (2, 128): (64, 64, 4, 2, "ieee"),
        (2, 256): (32, 32, 4, 2, "ieee"),
        (4, 64): (16, 32, 4, 2, "ieee"),
        (4, 128): (16, 32, 4, 2, "ieee"),
        (4, 256): (16, 16, 8, 2, "ieee"),
    },
}


def configurations() -> list[Configuration]:
    """Lists every setting the launcher can choose.

    Returns:
        One ``Configuration`` for each target, element size and padded head size.
    """
    return [chosen(target, *shape) for target, table in _TABLE.items() for shape in table]


def compile_configuration(configuration: Configuration) -> list[Any]:
    """Compiles the kernels of a setting with every feature they can have.

    Args:
        configuration: one of ``configurations()``.

    Returns:
        Triton's compiled kernels.
    """
    one = configuration
    dtype = torch.float32 if one.element_size == 4 else torch.bfloat16
    attention = demanding_call(dtype, one.width, tokens=64, keys=4096, parts=1, full_mask=True)
    segments = torch.empty(2, 4096, dtype=torch.int64, device="meta")
    call = SegmentMassArguments(attention, segments, 300)
    return [compile_launch(launch, one.target) for launch in launches(call, one.target, one)[0]]


absent = triton_launch.absent


def unsupported(arguments: SegmentMassArguments) -> str | None:
    """Says why a call cannot be served by this backend.

    Args:
        arguments: the validated call.

    Returns:
        The reason, or None if ``run`` can serve it.
    """
    query = arguments.attention.query
    if (reason := absent() or wrong_device("query", query)) is not None:
        return reason
    if query.dtype not in DTYPES:
        return f"query is {query.dtype}, and the Triton kernel takes float32, float16, bfloat16"
    if query.shape[3] > LARGEST_SIZE:
        return f"head size {query.shape[3]} exceeds the Triton kernel's {LARGEST_SIZE}"
    return None


def run(arguments: SegmentMassArguments) -> Tensor:
    """Runs a call that ``unsupported`` accepts.

    Args:
        arguments: the validated call.

    Returns:
        Float32 ``[B, Hq, num_segments]``.
    """
    query, key = arguments.attention.query, arguments.attention.key
    batch, heads, tokens, _ = query.shape
    if 0 in (batch, heads, tokens, key.shape[2]):
        return query.new_zeros(batch, heads, arguments.num_segments, dtype=torch.float32)
    work, out = launches(arguments, target_of(arguments.device))
    run_all(work, arguments.device)
    return out


def launches(
    arguments: SegmentMassArguments, target: str, setting: Configuration | None = None
) -> tuple[list[Launch], Tensor]:
    """The launches of a call, their scratch memory allocated.

    Args:
        arguments: the validated call, with at least one query and key.
        target: whose settings are used.
        setting: None chooses it by the call's shapes.

    Returns:
        The launches, and the float32 ``[B, Hq, num_segments]`` that they fill.
    """
    kernels = _kernels()
    call, segments, count = arguments.attention, arguments.segments, arguments.num_segments
    query, key, mask, window = call.query, call.key, call.mask, call.window
    batch, query_heads, tokens, head_size = query.shape
    heads, keys = key.shape[1:3]
    group = query_heads // heads
    block_size = max(64, power_of_two(head_size))
    if setting is None:
        setting = chosen(target, query.element_size(), block_size)
    blocks = ceil_div(tokens * group, setting.block_rows)
    most = max(1, MAX_SPLITS // blocks)
    longest = keys if window is None else min(keys, window + tokens - 1)
    splits = max(1, min(most, ceil_div(longest, LEAST_KEYS)))
    rows = batch * query_heads * tokens
    pieces = min(MOST_PIECES, ceil_div(keys, SEGMENT_KEYS), max(1, SEGMENT_PROGRAMS // count))

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=query.device)

    sums, totals = scratch(rows, splits), scratch(batch, query_heads, tokens)
    mass = scratch(batch, query_heads, keys)
    firsts = torch.full((batch, count), keys, dtype=torch.int32, device=query.device)
    lasts = torch.full((batch, count), -1, dtype=torch.int32, device=query.device)
    out = scratch(batch, query_heads, count)
    parts = out if pieces == 1 else scratch(pieces, batch, query_heads, count)

    unit = 16 // query.element_size()
    strides = [used_strides(one)[:3] for one in (query, key)]
    if any(stride % unit for three in strides for stride in three):
        unit = 1
    query_strides, key_strides = ([stride // unit for stride in three] for three in strides)
    work: list[Launch] = []
    full_mask = mask is not None and (mask.shape[1] != 1 or mask.shape[2] != 1)
    if mask is not None and mask.stride(3) != 1:
        mask = mask.contiguous()
    if mask is not None and full_mask:
        packing = pack(mask)
        mask = packing.values["packed"]
        work.append(packing)
    mask_strides = [0, 0, 0, 1] if mask is None else used_strides(mask)
    segment_strides = used_strides(segments)
    attention = {
        "query": query,
        "key": key,
        "mask": mask,
        "key_lengths": call.key_lengths,
        "scale": float(call.scale),
        "softcap": None if call.softcap is None else float(call.softcap),
        "keys": keys,
        "tokens": tokens,
        "group": group,
        "heads": heads,
        "causal": int(call.causal and (tokens > 1 or window is not None)),
        "window": NO_WINDOW if window is None else window,
        "query_batch": query_strides[0],
        "query_head": query_strides[1],
        "query_step": query_strides[2],
        "key_batch": key_strides[0],
        "key_head": key_strides[1],
        "key_step": key_strides[2],
        "mask_batch": mask_strides[0],
        "mask_head": mask_strides[1],
        "mask_query": mask_strides[2],
        "UNIT": unit,
        "HEAD_SIZE": head_size,
        "FULL_MASK": full_mask,
        "PRECISION": "interpreted" if interpreted() else setting.precision,
        "BLOCK_KEYS": setting.block_keys,
        "BLOCK_SIZE": block_size,
    }
    scan = {
        "segments": segments,
        "firsts": firsts,
        "lasts": lasts,
        "keys": keys,
        "segments_batch": segment_strides[0],
        "segments_step": segment_strides[1],
        "count": count,
    }
    options = {"num_warps": setting.warps, "num_stages": setting.stages, "enable_fp_fusion": True}
    small = {"num_warps": 2, "num_stages": 2, "enable_fp_fusion": True}
    work += [
        Launch(
            kernels.span_kernel,
            (batch, ceil_div(keys, SPAN_KEYS)),
            {**scan, "BLOCK_KEYS": SPAN_KEYS},
            small,
        ),
        Launch(
            kernels.sum_kernel,
            (batch * heads * blocks, splits),
            {
                **attention,
                "sums": sums,
                "most_splits": most,
                "MIN_KEYS": LEAST_KEYS,
                "BLOCK_ROWS": setting.block_rows,
            },
            options,
        ),
        Launch(
            kernels.total_kernel,
            (ceil_div(rows, TOTAL_ROWS),),
            {
                "sums": sums,
                "sinks": call.sinks,
                "totals": totals,
                "rows": rows,
                "splits": splits,
                "tokens": tokens,
                "group": group,
                "heads": heads,
                "BLOCK_ROWS": TOTAL_ROWS,
                "MAX_SPLITS": MAX_SPLITS,
            },
            small,
        ),
        Launch(
            kernels.mass_kernel,
            (batch * heads, ceil_div(keys, setting.block_keys)),
            {**attention, "totals": totals, "mass": mass, "BLOCK_ROWS": TOKENS},
            options,
        ),
        Launch(
            kernels.segment_kernel,
            (batch * count, ceil_div(query_heads, SEGMENT_HEADS), pieces),
            {
                **scan,
                "mass": mass,
                "out": parts,
                "tokens": tokens,
                "query_heads": query_heads,
                "BLOCK_HEADS": SEGMENT_HEADS,
                "BLOCK_KEYS": SEGMENT_KEYS,
            },
            small,
        ),
    ]
    if pieces > 1:
        work.append(
            Launch(
                kernels.piece_kernel,
                (ceil_div(out.numel(), PIECE_BLOCK),),
                {
                    "parts": parts,
                    "out": out,
                    "size": out.numel(),
                    "pieces": pieces,
                    "BLOCK": PIECE_BLOCK,
                    "MOST_PIECES": MOST_PIECES,
                },
                small,
            )
        )
    return work, out


def chosen(target: str, element_size: int, width: int) -> Configuration:
    """Chooses the setting of a call.

    Args:
        target: one of ``triton_launch.TARGETS``.
        element_size: bytes of an element.
        width: padded head size.

    Returns:
        The setting.
    """
    return Configuration(target, element_size, width, *_TABLE[target][element_size, width])


@functools.cache
def _kernels() -> ModuleType:
    from radar_kernels.segment_mass import _triton_kernels

    return _triton_kernels
