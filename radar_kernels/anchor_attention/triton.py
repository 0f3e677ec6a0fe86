"""Anchor attention on GPUs, in Triton: one kernel for decoding, chunks and whole prompts.

The query heads that share a key head and all query tokens are packed into the rows of one tile, so
keys and values are read once for all of them. Where that leaves few programs, the keys are cut
into stretches that run side by side and are merged by their log-sum-exps (split-K decoding, as in
Flash-Decoding). How many depends on shapes alone, and not on the batch: nor do a row's bits.
``run(arguments, splits=1)`` fixes it.

A bias joins the logits in the multiplication that scales them, so it costs nothing beside plain
attention; torch's own flash kernel, fed through extra columns of the head dimension (``sdpa.py``),
would first copy all keys and pay for a larger head size. Where the mass is wanted the anchored keys
have a softmax part and an accumulator of their own, which costs nothing in a tile without anchors.

With ``TRITON_INTERPRET=1`` set before Triton is first imported the same kernels run on CPU
tensors, slowly: for tests.
"""

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from radar_kernels import triton_launch
from radar_kernels.anchor_attention.arguments import AnchorAttentionArguments
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

# The blocks of rows of one key head share MAX_SPLITS stretches, each of at least as many keys as
# make writing and merging its parts cheap beside reading it. Neither depends on the batch, the
# device or the other rows.
MAX_SPLITS = 64
FEW_ROWS = 16
LEAST_KEYS = {FEW_ROWS: 128}  # rows of a tile -> keys of a stretch, else:
LEAST_KEYS_OF_MANY = 256
BLOCK_SPLITS = 16
PACKED_WORDS = 32
LARGEST_SIZE = 256
NO_WINDOW = 1 << 30
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Configuration:
    """One pinned setting of the attention kernel.

    Args:
        target: one of ``triton_launch.TARGETS``.
        element_size: bytes of an element of query, key and value: 2 or 4.
        width: padded head size the setting is for, the larger of key's and value's.
        block_rows: query rows (tokens x heads of a group) of a program.
        parts: most softmax parts it serves: 2 where the mass is wanted, else 1.
        full_mask: whether it serves masks that differ between heads or queries.
        block_keys: keys a program reads at a time.
        warps: warps of a program.
        stages: tiles in flight.
        precision: how fp32 operands are multiplied, "ieee" or "tf32x3".
    """

    target: str
    element_size: int
    width: int
    block_rows: int
    parts: int
    full_mask: bool
    block_keys: int
    warps: int
    stages: int
    precision: str


# (element size, width, rows of a tile, parts, full mask) -> (keys a tile, warps, stages, fp32
# product). A second accumulator and a full mask take registers, so the largest tiles serve neither.
# Three TF32 products come close to one in fp32, for which NVIDIA has no matrix unit.
_Shape = tuple[int, int, int, int, bool]
_Setting = tuple[int, int, int, str]
_TABLE: dict[str, dict[_Shape, _Setting]] = {
    "sm_80": {
        (2, 64, 16, 2, True): (64, 4, 2, "ieee"),
        (2, 64, 64, 2, True): (32, 4, 2, "ieee"),
        (2, 64, 128, 1, False): (64, 8, 2, "ieee"),
        (2, 128, 16, 2, True): (64, 4, 2, "ieee"),
        (2, 128, 32, 2, True): (32, 4, 2, "ieee"),
        (2, 128, 64, 1, False): (32, 4, 2, "ieee"),
        (2, 128, 128, 1, False): (32, 8, 2, "ieee"),
        (2, 256, 16, 2, True): (32, 4, 2, "ieee"),
        (2, 256, 32, 2, True): (32, 8, 2, "ieee"),
        (2, 256, 64, 1, False): (32, 8, 2, "ieee"),
        (4, 64, 16, 2, True): (32, 4, 2, "tf32x3"),
        (4, 64, 64, 1, False): (16, 8, 2, "tf32x3"),
        (4, 64, 64, 2, True): (16, 8, 2, "ieee"),
        (4, 128, 16, 2, True): (32, 4, 2, "tf32x3"),
        (4, 128, 32, 2, True): (16, 8, 2, "ieee"),
        (4, 256, 16, 2, True): (16, 8, 2, "ieee"),
        (4, 256, 32, 1, False): (16, 8, 2, "ieee"),
    },
    "sm_90": {
        (2, 64, 16, 2, True): (64, 4, 3, "ieee"),
        (2, 64, 64, 2, True): (64, 8, 3, "ieee"),
        (2, 64, 128, 1, False): (64, 8, 3, "ieee"),
        (2, 128, 16, 2, True): (64, 4, 3, "ieee"),
        (2, 128, 64, 2, True): (64, 8, 3, "ieee"),
        (2, 128, 128, 1, False): (64, 8, 3, "ieee"),
        (2, 256, 16, 2, True): (32, 4, 3, "ieee"),
        (2, 256, 64, 1, False): (64, 8, 2, "ieee"),
        (2, 256, 64, 2, True): (32, 8, 2, "ieee"),
        (4, 64, 16, 2, True): (32, 4, 3, "tf32x3"),
        (4, 64, 64, 1, False): (32, 4, 2, "tf32x3"),
        (4, 64, 64, 2, True): (16, 8, 2, "tf32x3"),
        (4, 128, 16, 2, True): (32, 4, 3, "tf32x3"),
        (4, 128, 32, 2, True): (16, 8, 2, "ieee"),
        (4, 128, 64, 1, False): (16, 8, 2, "tf32x3"),
        (4, 256, 16, 2, True): (16, 8, 3, "ieee"),
        (4, 256, 32, 1, False): (16, 8, 2, "ieee"),
    },
    "sm_100": {
        (2, 64, 16, 2, True): (64, 4, 2, "ieee"),
        (2, 64, 64, 2, True): (64, 8, 3, "ieee"),
        (2, 64, 128, 1, False): (64, 8, 3, "ieee"),
        (2, 128, 16, 2, True): (64, 4, 3, "ieee"),
        (2, 128, 64, 2, True): (32, 8, 2, "ieee"),
        (2, 128, 128, 1, False): (64, 8, 3, "ieee"),
        (2, 256, 16, 2, True): (32, 4, 3, "ieee"),
        (2, 256, 64, 1, False): (64, 8, 3, "ieee"),
        (2, 256, 64, 2, True): (16, 8, 2, "ieee"),
        (4, 64, 16, 2, True): (32, 4, 3, "tf32x3"),
        (4, 64, 64, 1, False): (32, 8, 2, "tf32x3"),
        (4, 64, 64, 2, True): (32, 8, 2, "tf32x3"),
        (4, 128, 16, 2, True): (32, 4, 2, "tf32x3"),
        (4, 128, 32, 2, True): (16, 8, 2, "ieee"),
        (4, 256, 16, 2, True): (16, 8, 2, "ieee"),
        (4, 256, 32, 1, False): (16, 8, 2, "ieee"),
    },
    "gfx942": {
        (2, 64, 16, 2, True): (64, 4, 2, "ieee"),
        (2, 64, 64, 2, True): (64, 4, 2, "ieee"),
        (2, 64, 128, 1, False): (64, 8, 2, "ieee"),
        (2, 128, 16, 2, True): (32, 4, 2, "ieee"),
        (2, 128, 64, 2, True): (32, 4, 2, "ieee"),
        (2, 128, 128, 1, False): (32, 4, 2, "ieee"),
        (2, 256, 16, 2, True): (32, 4, 2, "ieee"),
        (4, 64, 16, 2, True): (32, 4, 2, "ieee"),
        (4, 64, 64, 2, True): (16, 8, 2, "ieee"),
        (4, 128, 16, 2, True): (32, 4, 2, "ieee"),
        (4, 256, 16, 2, True): (16, 8, 2, "ieee"),
    },
}


def configurations() -> list[Configuration]:
    """Lists every setting the launcher can choose.

    Returns:
        The settings of every target.
    """
    return [
        Configuration(target, *shape, *setting)
        for target, table in _TABLE.items()
        for shape, setting in table.items()
    ]


def compile_configuration(configuration: Configuration) -> list[Any]:
    """Compiles the kernels of a setting with every feature they can have.

    Args:
        configuration: one of ``configurations()``.

    Returns:
        Triton's compiled kernels.
    """
    one = configuration
    size, keys = one.width, 4096
    tokens = one.block_rows // 4 if one.block_rows == FEW_ROWS else 4096
    dtype = torch.float32 if one.element_size == 4 else torch.bfloat16
    call = demanding_call(
        dtype, size, tokens=tokens, keys=keys, parts=one.parts, full_mask=one.full_mask
    )
    return [
        compile_launch(launch, one.target) for launch in launches(call, one.target, setting=one)
    ]


def demanding_call(
    dtype: torch.dtype, size: int, *, tokens: int, keys: int, parts: int, full_mask: bool
) -> AnchorAttentionArguments:
    """A call on the meta device that asks for everything at once.

    Args:
        dtype: of query, key and value.
        size: of a head.
        tokens: number of queries.
        keys: number of keys.
        parts: 2 to ask for the mass too.
        full_mask: whether heads and queries have a mask each, instead of one for all.

    Returns:
        The call: 8 query heads on 2 key heads, with factors, a bias, a mask, key lengths, a window,
        a softcap and sinks.
    """

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    return AnchorAttentionArguments(
        tensor(2, 8, tokens, size),
        tensor(2, 2, keys, size),
        tensor(2, 2, keys, size),
        anchors=tensor(2, keys, dtype=torch.float32),
        bias=tensor(2, 8, dtype=torch.float32),
        mask=tensor(2, *((8, tokens) if full_mask else (1, 1)), keys, dtype=torch.bool),
        key_lengths=tensor(2, dtype=torch.int32),
        causal=True,
        scale=0.1,
        window=4000,
        softcap=50.0,
        sinks=tensor(8, dtype=torch.float32),
        return_mass=parts == 2,
    )


absent = triton_launch.absent


def unsupported(arguments: AnchorAttentionArguments) -> str | None:
    """Says why a call cannot be served by this backend.

    Args:
        arguments: the validated call.

    Returns:
        The reason, or None if ``run`` can serve it.
    """
    query, value = arguments.query, arguments.value
    if (reason := absent() or wrong_device("query", query)) is not None:
        return reason
    if query.dtype not in DTYPES:
        return f"query is {query.dtype}, and the Triton kernel takes float32, float16, bfloat16"
    if max(query.shape[3], value.shape[3]) > LARGEST_SIZE:
        return (
            f"head sizes {query.shape[3]} (key) and {value.shape[3]} (value) exceed the Triton "
            f"kernel's {LARGEST_SIZE}"
        )
    return None


def run(
    arguments: AnchorAttentionArguments, *, splits: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Runs a call that ``unsupported`` accepts.

    Args:
        arguments: the validated call.
        splits: most stretches a row's keys are cut into; None chooses from the number of query
            rows of a key head. A row's bits depend on it, and on nothing else but the row.

    Returns:
        Output ``[B, Hq, q, Dv]`` in the query's dtype (stored as ``[B, q, Hq, Dv]``) and the mass
        ``[B, Hq, q]`` in float32, or None where it was not asked for.
    """
    results = Results.empty(arguments)
    if results.out.numel() != 0:
        target = target_of(arguments.device)
        run_all(launches(arguments, target, results, splits=splits), arguments.device)
    return results.out, results.mass


@dataclass(frozen=True, slots=True)
class Results:
    """Where the kernels write.

    Args:
        out: ``[B, Hq, q, Dv]`` stored as ``[B, q, Hq, Dv]``; of a partition, the rest.
        mass: float32 ``[B, Hq, q]``, or None.
        anchored: None, or of a partition the output of the anchored keys, as ``out``.
        anchored_lse: its log-sum-exp, float32 ``[B, Hq, q]``.
        rest_lse: that of the rest.
    """

    out: Tensor
    mass: Tensor | None = None
    anchored: Tensor | None = None
    anchored_lse: Tensor | None = None
    rest_lse: Tensor | None = None

    @classmethod
    def empty(cls, arguments: AnchorAttentionArguments, *, partition: bool = False) -> "Results":
        """Allocates the results of a call.

        Args:
            arguments: the validated call.
            partition: whether the four parts are wanted.

        Returns:
            Memory that holds anything.
        """
        query = arguments.query
        batch, heads, tokens, _ = query.shape

        def out() -> Tensor:
            return query.new_empty(batch, tokens, heads, arguments.value.shape[3]).transpose(1, 2)

        def number() -> Tensor:
            return torch.empty((batch, heads, tokens), dtype=torch.float32, device=query.device)

        if partition:
            return cls(out(), None, out(), number(), number())
        return cls(out(), number() if arguments.return_mass else None)


def launches(
    arguments: AnchorAttentionArguments,
    target: str,
    results: Results | None = None,
    *,
    splits: int | None = None,
    setting: Configuration | None = None,
) -> list[Launch]:
    """The launches of a call, their scratch memory allocated.

    Args:
        arguments: the validated call.
        target: whose settings are used.
        results: where to write; None allocates.
        splits: as in ``run``.
        setting: None chooses it by the call's shapes.

    Returns:
        The attention kernel's launch; before it one that packs a mask that differs between heads
        or queries; after it, where keys are cut, the merge kernel's.
    """
    kernels = _kernels()
    if results is None:
        results = Results.empty(arguments)
    query, key, value = arguments.query, arguments.key, arguments.value
    batch, query_heads, tokens, head_size = query.shape
    heads, keys, value_size = key.shape[1], key.shape[2], value.shape[3]
    group = query_heads // heads
    anchors, bias, mask = arguments.anchors, arguments.bias, arguments.mask
    partition = results.anchored is not None
    if bias is None and arguments.target_mass is None and results.mass is None and not partition:
        anchors = None
    two = anchors is not None and (
        partition or results.mass is not None or arguments.target_mass is not None
    )
    parts = 2 if two else 1
    factors = two and bias is not None and anchors is not None and anchors.dtype != torch.bool
    window = arguments.window
    causal = arguments.causal and (tokens > 1 or window is not None)

    full_mask = mask is not None and (mask.shape[1] != 1 or mask.shape[2] != 1)
    block_size, block_value = _padded(head_size), _padded(value_size)
    if setting is None:
        width = max(block_size, block_value)
        setting = chosen(target, query.element_size(), width, tokens * group, parts, full_mask)
    blocks = ceil_div(tokens * group, setting.block_rows)
    least = LEAST_KEYS.get(setting.block_rows, LEAST_KEYS_OF_MANY)
    most = max(1, MAX_SPLITS // blocks if splits is None else splits)
    # The grid covers the longest row there can be; the kernel cuts each row by its own length.
    longest = keys if window is None else min(keys, window + tokens - 1)
    used = max(1, min(most, ceil_div(longest, least)))
    # Not where there happens to be one stretch: a row's bits must not depend on the others' length.
    direct = most == 1
    rows = batch * query_heads * tokens
    partial = lse = None
    if not direct:
        partial = query.new_empty((parts, rows, used, value_size), dtype=torch.float32)
        lse = query.new_empty((parts + factors, rows, used), dtype=torch.float32)

    unit = 16 // query.element_size()
    strides = [used_strides(one)[:3] for one in (query, key, value)]
    if any(stride % unit for three in strides for stride in three):
        unit = 1
    (query_strides, key_strides, value_strides) = (
        [stride // unit for stride in three] for three in strides
    )
    packing: list[Launch] = []
    if mask is not None and mask.stride(3) != 1:
        mask = mask.contiguous()
    if mask is not None and full_mask:
        packing = [pack(mask)]
        mask = packing[0].values["packed"]
    mask_strides = [0, 0, 0, 1] if mask is None else used_strides(mask)
    per_head = {
        "bias": bias if anchors is not None else None,
        "target": arguments.target_mass if two else None,
        "sinks": arguments.sinks,
    }
    common = {
        "partial": partial,
        "lse": lse,
        **per_head,
        "out": results.out,
        "mass": results.mass,
        "anchored_out": results.anchored,
        "anchored_lse": results.anchored_lse,
        "rest_lse": results.rest_lse,
        "tokens": tokens,
        "group": group,
        "heads": heads,
        "bias_batch": _batch_stride(bias),
        "target_batch": _batch_stride(arguments.target_mass),
        "PARTS": parts,
        "FACTORS": factors,
        "EXACT": arguments.target_exact,
        "VALUE_SIZE": value_size,
        "BLOCK_VALUE": block_value,
    }
    attend = Launch(
        kernels.attention_kernel,
        (batch * heads * blocks, used),
        {
            **common,
            "query": query,
            "key": key,
            "value": value,
            "anchors": anchors,
            "mask": mask,
            "key_lengths": arguments.key_lengths,
            "scale": float(arguments.scale),
            "softcap": None if arguments.softcap is None else float(arguments.softcap),
            "keys": keys,
            "causal": int(causal),
            "window": NO_WINDOW if window is None else window,
            "query_batch": query_strides[0],
            "query_head": query_strides[1],
            "query_step": query_strides[2],
            "key_batch": key_strides[0],
            "key_head": key_strides[1],
            "key_step": key_strides[2],
            "value_batch": value_strides[0],
            "value_head": value_strides[1],
            "value_step": value_strides[2],
            "anchors_batch": 0 if anchors is None else anchors.stride(0),
            "mask_batch": mask_strides[0],
            "mask_head": mask_strides[1],
            "mask_query": mask_strides[2],
            "most_splits": most,
            "UNIT": unit,
            "HEAD_SIZE": head_size,
            "FULL_MASK": full_mask,
            "DIRECT": direct,
            "PRECISION": "interpreted" if interpreted() else setting.precision,
            "MIN_KEYS": least,
            "BLOCK_ROWS": setting.block_rows,
            "BLOCK_KEYS": setting.block_keys,
            "BLOCK_SIZE": block_size,
        },
        {"num_warps": setting.warps, "num_stages": setting.stages, "enable_fp_fusion": True},
    )
    if direct:
        return [*packing, attend]
    merge = Launch(
        kernels.merge_kernel,
        (rows,),
        {
            **common,
            "rows": rows,
            "splits": used,
            "MAX_SPLITS": power_of_two(max(most, MAX_SPLITS)),
            "BLOCK_SPLITS": BLOCK_SPLITS,
        },
        {"num_warps": 2, "num_stages": 2, "enable_fp_fusion": True},
    )
    return [*packing, attend, merge]


def pack(mask: Tensor) -> Launch:
    """Packs a mask that differs between queries or heads, since every head of a group reads it.

    Args:
        mask: bool ``[B|1, Hq|1, q|1, k]``, last stride 1.

    Returns:
        The launch; its "packed" are the words.
    """
    batch, heads, tokens, keys = mask.shape
    words = max(2, 2 * ceil_div(keys, 64))
    packed = torch.empty((batch, heads, tokens, words), dtype=torch.int32, device=mask.device)
    strides = used_strides(mask)
    return Launch(
        _kernels().pack_kernel,
        (batch * heads * tokens, ceil_div(words, PACKED_WORDS)),
        {
            "mask": mask,
            "packed": packed,
            "keys": keys,
            "words": words,
            "heads": heads,
            "tokens": tokens,
            "mask_batch": strides[0],
            "mask_head": strides[1],
            "mask_query": strides[2],
            "BLOCK_WORDS": PACKED_WORDS,
        },
        {"num_warps": 2, "num_stages": 1, "enable_fp_fusion": True},
    )


@functools.lru_cache(maxsize=1024)
def chosen(
    target: str, element_size: int, width: int, rows: int, parts: int, full_mask: bool
) -> Configuration:
    """Chooses the setting of a call.

    Args:
        target: one of ``triton_launch.TARGETS``.
        element_size: bytes of an element.
        width: padded head size.
        rows: query rows of a key head.
        parts: softmax parts.
        full_mask: whether the mask differs between heads or queries.

    Returns:
        The setting with the smallest tile that holds all rows, or with the largest tile.
    """
    wanted = (target, element_size, width)
    fitting = sorted(
        (
            one
            for one in configurations()
            if (one.target, one.element_size, one.width) == wanted
            and one.parts >= parts
            and one.full_mask >= full_mask
        ),
        key=lambda one: (one.block_rows, one.parts, one.full_mask),
    )
    largest = fitting[-1].block_rows
    return next(one for one in fitting if one.block_rows >= min(rows, largest))


@functools.cache
def _kernels() -> ModuleType:
    from radar_kernels.anchor_attention import _triton_kernels

    return _triton_kernels


def _padded(size: int) -> int:
    return max(64, power_of_two(size))


def _batch_stride(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0)
