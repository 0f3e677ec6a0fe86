"""Key edits on GPUs, in Triton: a tile of keys without an anchor is only copied.

With ``TRITON_INTERPRET=1`` set before Triton is first imported the same kernel runs on CPU
tensors, slowly: for tests.
"""

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from radar_kernels import triton_launch
from radar_kernels.key_edit.arguments import KeyEditArguments
from radar_kernels.triton_launch import Launch, ceil_div, power_of_two

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCK_KEYS = 16
BLOCK_COLUMNS = 64
BLOCK_DEPTH = 32
LARGEST_RANK = 128
_OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}

absent = triton_launch.absent


@dataclass(frozen=True, slots=True)
class Configuration:
    """One pinned setting of the kernel.

    Args:
        target: "sm_80", "sm_90", "sm_100" or "gfx942".
        element_size: bytes of an element of a key: 2 or 4.
        block_rank: padded rank of the projection, 0 for a dense one.
    """

    target: str
    element_size: int
    block_rank: int


def configurations() -> list[Configuration]:
    """Lists every setting the launcher can choose.

    Returns:
        One ``Configuration`` for each target, element size and padded rank.
    """
    return [
        Configuration(target, element_size, rank)
        for target in triton_launch.TARGETS
        for element_size in (2, 4)
        for rank in (0, 16, 32, 64, LARGEST_RANK)
    ]


def compile_configuration(one: Configuration) -> list[Any]:
    """Compiles the kernel of a setting; no GPU is needed.

    Args:
        one: the setting.

    Returns:
        Triton's compiled kernel.
    """
    dtype = torch.bfloat16 if one.element_size == 2 else torch.float32

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rank = one.block_rank or 128
    call = KeyEditArguments(
        tensor(2, 4, 5000, 128, dtype=dtype),
        tensor(2, 5000, dtype=torch.bool),
        tensor(4, 128, rank),
        tensor(4, rank, 128) if one.block_rank else None,
        tensor(4),
    )
    launch = _launch(call, torch.empty_like(call.key))
    return [triton_launch.compile_launch(launch, one.target)]


def unsupported(arguments: KeyEditArguments) -> str | None:
    """Says why a call cannot be served by this backend.

    Args:
        arguments: the validated call.

    Returns:
        The reason, or None if ``run`` can serve it.
    """
    key = arguments.key
    if (reason := absent()) is not None:
        return reason
    if (reason := triton_launch.wrong_device("key", key)) is not None:
        return reason
    if key.dtype not in DTYPES:
        return f"key is {key.dtype}, and the Triton kernel takes float32, float16, bfloat16"
    if key.shape[3] > 1 and key.stride(3) != 1:
        return "the last dimension of key must be contiguous"
    if arguments.right is not None and arguments.left.shape[2] > LARGEST_RANK:
        return (
            f"the projection has rank {arguments.left.shape[2]}, and the Triton kernel holds "
            f"{LARGEST_RANK}"
        )
    if key.shape[2] > BLOCK_KEYS * 65535:
        return f"key has {key.shape[2]} keys, and the Triton kernel edits {BLOCK_KEYS * 65535}"
    return None


def run(arguments: KeyEditArguments) -> Tensor:
    """Edits the anchored keys, accumulating in float32.

    Args:
        arguments: a call that ``unsupported`` accepts.

    Returns:
        New keys, contiguous.
    """
    key = arguments.key
    out = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    if out.numel():
        triton_launch.run_all([_launch(arguments, out)], key.device)
    return out


def _launch(arguments: KeyEditArguments, out: Tensor) -> Launch:
    key, anchors, left, right = (
        arguments.key,
        arguments.anchors,
        arguments.left.contiguous(),
        arguments.right,
    )
    batch, heads, keys, size = key.shape
    unit = 16 // key.element_size()
    strides = triton_launch.used_strides(key)[:3]
    if any(stride % unit for stride in strides):
        unit = 1
    rank = left.shape[2]
    anchor_strides = triton_launch.used_strides(anchors)
    return Launch(
        _kernels().edit_kernel,
        (batch * heads, ceil_div(keys, BLOCK_KEYS)),
        {
            "key": key,
            "anchors": anchors,
            "left": left,
            "right": None if right is None else right.contiguous(),
            "gain": arguments.gain.contiguous(),
            "out": out,
            "keys": keys,
            "heads": heads,
            "key_batch": strides[0] // unit,
            "key_head": strides[1] // unit,
            "key_step": strides[2] // unit,
            "anchors_batch": anchor_strides[0],
            "anchors_step": anchor_strides[1],
            "UNIT": unit,
            "SIZE": size,
            "RANK": rank,
            "BLOCK_KEYS": BLOCK_KEYS,
            "BLOCK_COLUMNS": BLOCK_COLUMNS,
            "BLOCK_DEPTH": BLOCK_DEPTH,
            "BLOCK_RANK": 16 if right is None else max(16, power_of_two(max(1, rank))),
        },
        _OPTIONS,
    )


@functools.cache
def _kernels() -> ModuleType:
    from radar_kernels.key_edit import _triton_kernels

    return _triton_kernels
