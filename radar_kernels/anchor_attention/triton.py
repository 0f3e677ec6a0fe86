"""Anchor attention for one query token on GPUs, in Triton.

The keys of a row are cut into stretches that run side by side and are merged by their
log-sum-exps (split-K decoding, as in Flash-Decoding). The query heads that share a key head are
packed into one tile, so keys and values are read once. Anchored keys have a softmax part of
their own, which costs nothing in a tile without anchors; a bias, a target mass and the mass
itself then follow from the two parts.

With ``TRITON_INTERPRET=1`` set before Triton is first imported the same kernels run on CPU
tensors, slowly: for tests.
"""

import functools
import importlib.util
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from radar_kernels.anchor_attention.arguments import AnchorAttentionArguments

# A row shorter than MAX_SPLITS * MIN_KEYS is cut every MIN_KEYS keys, a longer one into MAX_SPLITS
# stretches. Neither depends on the batch, the device or the other rows: nor do a row's bits.
MAX_SPLITS = 64
MIN_KEYS = 128
BLOCK_HEADS = 16
BLOCK_SPLITS = 16
LARGEST_SIZE = 256
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Configuration:
    """One pinned setting of the split kernel.

    Args:
        target: "sm_80", "sm_90", "sm_100" or "gfx942".
        element_size: bytes of an element of query, key and value: 2 or 4.
        width: padded head size the setting is for, the larger of key's and value's.
        head_mask: whether the mask differs between heads.
        block_keys: keys a program reads at a time.
        warps: warps of a program.
        stages: tiles in flight.
        precision: how fp32 operands are multiplied, "ieee" or "tf32x3".
    """

    target: str
    element_size: int
    width: int
    head_mask: bool
    block_keys: int
    warps: int
    stages: int
    precision: str


# (element size, width) -> (keys a tile, warps, stages, fp32 product). sm_80 also serves the other
# 8.x and the 12.x parts, whose programs may use 99 KiB of shared memory; gfx942 has 64 KiB. Three
# TF32 products come close to one in fp32, for which NVIDIA has no matrix unit; at width 256 they
# would spill.
_TABLE: dict[str, dict[tuple[int, int], tuple[int, int, int, str]]] = {
    "sm_80": {
        (2, 64): (64, 4, 3, "ieee"),
        (2, 128): (64, 4, 2, "ieee"),
        (2, 256): (32, 4, 2, "ieee"),
        (4, 64): (32, 4, 2, "tf32x3"),
        (4, 128): (16, 4, 2, "tf32x3"),
        (4, 256): (16, 8, 2, "ieee"),
    },
    "sm_90": {
        (2, 64): (64, 4, 3, "ieee"),
        (2, 128): (64, 4, 3, "ieee"),
        (2, 256): (32, 4, 3, "ieee"),
        (4, 64): (32, 4, 3, "tf32x3"),
        (4, 128): (32, 4, 3, "tf32x3"),
        (4, 256): (16, 8, 3, "ieee"),
    },
    "sm_100": {
        (2, 64): (64, 4, 3, "ieee"),
        (2, 128): (64, 4, 3, "ieee"),
        (2, 256): (32, 4, 3, "ieee"),
        (4, 64): (32, 4, 3, "tf32x3"),
        (4, 128): (32, 4, 3, "tf32x3"),
        (4, 256): (16, 8, 2, "ieee"),
    },
    "gfx942": {
        (2, 64): (64, 4, 2, "ieee"),
        (2, 128): (32, 4, 2, "ieee"),
        (2, 256): (32, 4, 2, "ieee"),
        (4, 64): (32, 4, 2, "ieee"),
        (4, 128): (32, 4, 2, "ieee"),
        (4, 256): (16, 8, 2, "ieee"),
    },
}


def configurations() -> list[Configuration]:
    """Lists every setting the launcher can choose.

    Returns:
        One ``Configuration`` for each target, element size, padded head size and kind of mask.
    """
    return [
        _configuration(target, element_size, width, head_mask)
        for target, table in _TABLE.items()
        for element_size, width in table
        for head_mask in (False, True)
    ]


def absent() -> str | None:
    """Says why this backend cannot run on this machine at all.

    Returns:
        The reason, or None where Triton and a GPU (or Triton's interpreter) are present.
    """
    if importlib.util.find_spec("triton") is None:
        return 'triton is not installed (pip install "radar-kernels[triton]")'
    if _interpreted() or torch.cuda.is_available():
        return None
    return "torch sees no CUDA or ROCm device"


def unsupported(arguments: AnchorAttentionArguments) -> str | None:
    """Says why a call cannot be served by this backend.

    Args:
        arguments: the validated call.

    Returns:
        The reason, or None if ``run`` can serve it.
    """
    query, value = arguments.query, arguments.value
    if (reason := absent()) is not None:
        return reason
    if query.device.type != ("cpu" if _interpreted() else "cuda"):
        return f"query is on {query.device}, and the Triton kernels run on GPUs"
    if query.shape[2] != 1:
        return f"query has {query.shape[2]} tokens, and the Triton kernel decodes one"
    if query.dtype not in DTYPES:
        return f"query is {query.dtype}, and the Triton kernel takes float32, float16, bfloat16"
    if max(query.shape[3], value.shape[3]) > LARGEST_SIZE:
        return (
            f"head sizes {query.shape[3]} (key) and {value.shape[3]} (value) exceed the Triton "
            f"kernel's {LARGEST_SIZE}"
        )
    if not _interpreted() and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(query.device)
        if capability < (8, 0):
            return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    return None


def run(
    arguments: AnchorAttentionArguments, *, splits: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Runs a call that ``unsupported`` accepts.

    Args:
        arguments: the validated call.
        splits: most stretches a row is cut into, default ``MAX_SPLITS``; for tests. A row's bits
            depend on it, and on nothing else but the row.

    Returns:
        Output ``[B, Hq, 1, Dv]`` in the query's dtype and the mass ``[B, Hq, 1]`` in float32, or
        None where it was not asked for.
    """
    query, value = arguments.query, arguments.value
    out = query.new_empty((*query.shape[:3], value.shape[3]))
    mass = None
    if arguments.return_mass:
        mass = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    if out.numel() == 0:
        return out, mass
    with torch.cuda.device_of(query):
        for launch in _launches(arguments, _target(query.device), out, mass, splits):
            launch.kernel[launch.grid](**launch.values, **launch.options)
    return out, mass


def compile_for(target: str, arguments: AnchorAttentionArguments) -> list[Any]:
    """Compiles the two kernels of a call for a target; no GPU is needed.

    Args:
        target: "sm_80", "sm_90", "sm_100" or "gfx942".
        arguments: the call; only shapes, dtypes and strides matter, so meta tensors will do.

    Returns:
        Triton's compiled split and merge kernels, as a launch on that target would build them.

    Raises:
        ValueError: ``target`` is not one of the four.
        RuntimeError: Triton was imported with ``TRITON_INTERPRET=1`` and compiles nothing.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if target not in _TABLE:
        raise ValueError(f"target is {target!r}, expected one of {', '.join(_TABLE)}")
    if _interpreted():
        raise RuntimeError("TRITON_INTERPRET=1 is set: unset it to compile kernels")
    if target.startswith("sm_"):
        machine = GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    else:
        machine = GPUTarget("hip", target, 64)
    query, value = arguments.query, arguments.value
    out = query.new_empty((*query.shape[:3], value.shape[3]))
    mass = None
    if arguments.return_mass:
        mass = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    compiled = []
    for launch in _launches(arguments, target, out, mass, None):
        signature, constants, attributes = _signature(launch)
        source = ASTSource(launch.kernel, signature, constants, attributes)
        compiled.append(triton.compile(source, target=machine, options=launch.options))
    return compiled


def _configuration(target: str, element_size: int, width: int, head_mask: bool) -> Configuration:
    block_keys, warps, stages, precision = _TABLE[target][element_size, width]
    if head_mask and (element_size, width) != (2, 64):
        # The mask of every head is held for the whole tile: half the tile keeps it in registers.
        block_keys = max(16, block_keys // 2)
    return Configuration(
        target, element_size, width, head_mask, block_keys, warps, stages, precision
    )


@dataclass(frozen=True, slots=True)
class _Launch:
    kernel: Any
    grid: tuple[int, ...]
    values: dict[str, Any]
    options: dict[str, int]


def _launches(
    arguments: AnchorAttentionArguments,
    target: str,
    out: Tensor,
    mass: Tensor | None,
    splits: int | None,
) -> tuple[_Launch, _Launch]:
    """The two launches of a call, their scratch memory allocated."""
    kernels = _kernels()
    query, key, value = arguments.query, arguments.key, arguments.value
    batch, query_heads, _, head_size = query.shape
    heads, keys, value_size = key.shape[1], key.shape[2], value.shape[3]
    group = query_heads // heads
    rows = batch * query_heads
    anchors, bias, mask = arguments.anchors, arguments.bias, arguments.mask
    window = arguments.window
    factors = anchors is not None and anchors.dtype != torch.bool and bias is not None

    block_size, block_value = _padded(head_size), _padded(value_size)
    head_mask = mask is not None and mask.shape[1] != 1
    width = max(block_size, block_value)
    setting = _configuration(target, query.element_size(), width, head_mask)
    most = MAX_SPLITS if splits is None else splits
    # The grid covers the longest row there can be; the kernel cuts each row by its own length.
    used = max(1, min(most, _ceil_div(keys if window is None else min(keys, window), MIN_KEYS)))
    parts = 1 if anchors is None else 2
    partial = torch.empty((parts, rows, used, value_size), dtype=torch.float32, device=query.device)
    lse = torch.empty((parts + factors, rows, used), dtype=torch.float32, device=query.device)

    unit = 16 // query.element_size()
    key_strides, value_strides = _used_strides(key)[:3], _used_strides(value)[:3]
    if any(stride % unit for stride in (*key_strides, *value_strides)):
        unit = 1
    mask_strides = [0, 0, 0, 0] if mask is None else _used_strides(mask)
    split = _Launch(
        kernels.split_kernel,
        (batch * heads * _ceil_div(group, BLOCK_HEADS), used),
        {
            "query": query,
            "key": key,
            "value": value,
            "anchors": anchors,
            "bias": bias if factors else None,
            "mask": mask,
            "key_lengths": arguments.key_lengths,
            "partial": partial,
            "lse": lse,
            "scale": float(arguments.scale),
            "softcap": None if arguments.softcap is None else float(arguments.softcap),
            "keys": keys,
            "window": window,
            "heads": heads,
            "rows": rows,
            "query_batch": query.stride(0),
            "query_head": query.stride(1),
            "key_batch": key_strides[0] // unit,
            "key_head": key_strides[1] // unit,
            "key_step": key_strides[2] // unit,
            "value_batch": value_strides[0] // unit,
            "value_head": value_strides[1] // unit,
            "value_step": value_strides[2] // unit,
            "anchors_batch": 0 if anchors is None else anchors.stride(0),
            "bias_batch": _batch_stride(bias),
            "mask_batch": mask_strides[0],
            "mask_head": mask_strides[1],
            "mask_step": mask_strides[3],
            "UNIT": unit,
            "GROUP": group,
            "HEAD_SIZE": head_size,
            "VALUE_SIZE": value_size,
            "HEAD_MASK": head_mask,
            "PRECISION": "interpreted" if _interpreted() else setting.precision,
            "MAX_SPLITS": most,
            "MIN_KEYS": MIN_KEYS,
            "BLOCK_HEADS": BLOCK_HEADS,
            "BLOCK_KEYS": setting.block_keys,
            "BLOCK_SIZE": block_size,
            "BLOCK_VALUE": block_value,
        },
        {"num_warps": setting.warps, "num_stages": setting.stages, "enable_fp_fusion": True},
    )
    merge = _Launch(
        kernels.merge_kernel,
        (rows,),
        {
            "partial": partial,
            "lse": lse,
            "bias": None if factors else bias,
            "target": arguments.target_mass,
            "sinks": arguments.sinks,
            "out": out,
            "mass": mass,
            "heads": query_heads,
            "rows": rows,
            "splits": used,
            "bias_batch": _batch_stride(bias),
            "target_batch": _batch_stride(arguments.target_mass),
            "ANCHORED": anchors is not None,
            "FACTORS": factors,
            "EXACT": arguments.target_exact,
            "VALUE_SIZE": value_size,
            "MAX_SPLITS": _power_of_two(most),
            "BLOCK_SPLITS": BLOCK_SPLITS,
            "BLOCK_VALUE": block_value,
        },
        {"num_warps": 2, "num_stages": 2, "enable_fp_fusion": True},
    )
    return split, merge


_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.bool: "*u1",
    torch.int32: "*i32",
}


def _signature(
    launch: _Launch,
) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[list[Any]]]]:
    """Types, constants and attributes that a launch compiles with (pointers 16-byte aligned)."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.values[parameter.name]
        if value is None or parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    return signature, constants, attributes


@functools.cache
def _kernels() -> ModuleType:
    from radar_kernels.anchor_attention import _triton_kernels

    return _triton_kernels


@functools.cache
def _interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU in this process instead of compiling them."""
    if importlib.util.find_spec("triton") is None:
        return False
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(_kernels().split_kernel, InterpretedFunction)


@functools.cache
def _target(device: torch.device) -> str:
    if _interpreted():
        return "sm_90"
    if torch.version.hip is not None:
        return "gfx942"
    major = torch.cuda.get_device_capability(device)[0]
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")


def _padded(size: int) -> int:
    return max(64, _power_of_two(size))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _used_strides(tensor: Tensor) -> list[int]:
    """The strides, 0 where there is one entry: that stride may be any number and is never used."""
    return [
        0 if size == 1 else stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]


def _batch_stride(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0)
