"""Blending and drawing on GPUs, in Triton: no sort, and nothing that the host waits for.

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

from radar_kernels.logit_blend.arguments import BlendArguments, SampleArguments

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
# Tokens of one program, and the maxima it leaves for the search of the k-th largest.
TILE = 1024
GROUPS = 16
# Numbers that the one program of a row reads at a time.
BLOCK = 2048
_OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}
_ROW_OPTIONS = {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": False}


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


def unsupported(arguments: BlendArguments | SampleArguments) -> str | None:
    """Says why a call cannot be served by this backend.

    Args:
        arguments: the validated call of either operator.

    Returns:
        The reason, or None if ``blend`` or ``sample`` can serve it.
    """
    full, masked = arguments.full, arguments.masked
    if (reason := absent()) is not None:
        return reason
    if full.device.type != ("cpu" if _interpreted() else "cuda"):
        return f"full is on {full.device}, and the Triton kernels run on GPUs"
    for name, logits in (("full", full), ("masked", masked)):
        if logits is not None and logits.dtype not in DTYPES:
            return f"{name} is {logits.dtype}, and the Triton kernels take 16 and 32 bit floats"
    if full.shape[1] >= 2**31 - TILE:
        return f"full has {full.shape[1]} tokens, and the Triton kernels count them in 32 bits"
    if not _interpreted() and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(full.device)
        if capability < (8, 0):
            return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    return None


def blend(arguments: BlendArguments) -> Tensor:
    """Runs a call of ``blend_logits`` that ``unsupported`` accepts.

    Args:
        arguments: the validated call.

    Returns:
        Float32 ``[B, V]``.
    """
    launches, out = _blend_launches(arguments)
    _run(launches, out)
    return out


def sample(arguments: SampleArguments) -> Tensor:
    """Runs a call of ``sample_logits`` that ``unsupported`` accepts.

    Args:
        arguments: the validated call.

    Returns:
        Int64 ``[B]``; -1 for a row without any logit above -inf.
    """
    launches, out = _sample_launches(arguments)
    _run(launches, out)
    return out


def compile_for(target: str, arguments: BlendArguments | SampleArguments) -> list[Any]:
    """Compiles the kernels of a call for a target; no GPU is needed.

    Args:
        target: "sm_80", "sm_90", "sm_100" or "gfx942".
        arguments: the call; only shapes, dtypes and strides matter, so meta tensors will do.

    Returns:
        Triton's compiled kernels in the order of their launch.

    Raises:
        ValueError: ``target`` is not one of the four.
        RuntimeError: Triton was imported with ``TRITON_INTERPRET=1`` and compiles nothing.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if target not in TARGETS:
        raise ValueError(f"target is {target!r}, expected one of {', '.join(TARGETS)}")
    if _interpreted():
        raise RuntimeError("TRITON_INTERPRET=1 is set: unset it to compile kernels")
    if target.startswith("sm_"):
        machine = GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    else:
        machine = GPUTarget("hip", target, 64)
    if isinstance(arguments, BlendArguments):
        launches, _ = _blend_launches(arguments)
    else:
        launches, _ = _sample_launches(arguments)
    return [
        triton.compile(
            ASTSource(launch.kernel, *_signature(launch)), target=machine, options=launch.options
        )
        for launch in launches
    ]


@dataclass(frozen=True, slots=True)
class _Launch:
    kernel: Any
    grid: tuple[int, ...]
    values: dict[str, Any]
    options: dict[str, Any]


def _run(launches: list[_Launch], out: Tensor) -> None:
    if out.numel() == 0:
        return
    with torch.cuda.device_of(out):
        for launch in launches:
            launch.kernel[launch.grid](**launch.values, **launch.options)


def _readable(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()


def _row_stride(logits: Tensor | None) -> int:
    return 0 if logits is None or logits.shape[0] == 1 else logits.stride(0)


def _prepare(
    full: Tensor,
    masked: Tensor | None,
    strength: Tensor | None,
    temperature: Tensor | None,
    keep_nan: bool,
) -> _Launch:
    rows, tokens = full.shape
    tiles = -(-tokens // TILE)

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=full.device)

    return _Launch(
        _kernels().prepare_kernel,
        (rows, tiles),
        {
            "full": full,
            "masked": masked,
            "strength": strength,
            "temperature": temperature,
            "warm": None if temperature is None else scratch(rows, tokens),
            "maxima": None if temperature is None else scratch(rows, tiles, GROUPS),
            "tile_maxima": scratch(rows, tiles),
            "tile_masses": scratch(rows, tiles, dtype=torch.float64),
            "tokens": tokens,
            "tiles": tiles,
            "full_stride": _row_stride(full),
            "masked_stride": _row_stride(masked),
            "KEEP_NAN": keep_nan,
            "TILE": TILE,
            "GROUPS": GROUPS,
        },
        _OPTIONS,
    )


def _blend_launches(arguments: BlendArguments) -> tuple[list[_Launch], Tensor]:
    full, masked = _readable(arguments.full), _readable(arguments.masked)
    out = torch.empty(full.shape, dtype=torch.float32, device=full.device)
    rows, tokens = full.shape
    tiles = -(-tokens // TILE)
    launches = []
    sums: dict[str, Any] = {"tile_maxima": None, "tile_masses": None}
    if arguments.modulated:
        prepare = _prepare(full, None, None, None, keep_nan=True)
        sums = {name: prepare.values[name] for name in sums}
        launches.append(prepare)
    values = {
        "full": full,
        "masked": masked,
        "strength": arguments.strength,
        "out": out,
        **sums,
        "tokens": tokens,
        "tiles": tiles,
        "full_stride": _row_stride(full),
        "masked_stride": _row_stride(masked),
        "TILE": TILE,
        "BLOCK": BLOCK,
    }
    launches.append(_Launch(_kernels().blend_kernel, (rows, tiles), values, _OPTIONS))
    return launches, out


def _sample_launches(arguments: SampleArguments) -> tuple[list[_Launch], Tensor]:
    kernels = _kernels()
    full = _readable(arguments.full)
    masked = None if arguments.masked is None else _readable(arguments.masked)
    device, (rows, tokens) = full.device, full.shape
    out = torch.empty(rows, dtype=torch.int64, device=device)
    strength = None if masked is None else arguments.strength
    temperature = arguments.temperature
    prepare = _prepare(full, masked, strength, temperature, keep_nan=False)
    warm, tile_maxima = prepare.values["warm"], prepare.values["tile_maxima"]
    tiles = prepare.values["tiles"]
    launches = [prepare]
    top_k, top_p, min_p = arguments.top_k, arguments.top_p, arguments.min_p
    floors = None
    if any(limit is not None for limit in (top_k, top_p, min_p)):
        floors = torch.empty(rows, dtype=torch.float32, device=device)
        values = {
            "warm": warm,
            "maxima": prepare.values["maxima"],
            "tile_maxima": tile_maxima,
            "tile_masses": prepare.values["tile_masses"],
            "top_k": top_k,
            "top_p": top_p,
            "log_min_p": None if min_p is None else min_p.log(),
            "temperature": temperature,
            "candidates": torch.empty_like(warm),
            "floors": floors,
            "tokens": tokens,
            "tiles": tiles,
            "TILE": TILE,
            "GROUPS": GROUPS,
            "BLOCK": BLOCK,
        }
        launches.append(_Launch(kernels.floor_kernel, (rows,), values, _ROW_OPTIONS))
    scores = torch.empty((rows, tiles), dtype=torch.float32, device=device)
    winners = torch.empty((rows, tiles), dtype=torch.int32, device=device)
    values = {
        "warm": warm,
        "tile_maxima": tile_maxima,
        "floors": floors,
        "temperature": temperature,
        "seed": arguments.seed,
        "offset": arguments.offset,
        "scores": scores,
        "winners": winners,
        "tokens": tokens,
        "tiles": tiles,
        "TILE": TILE,
    }
    launches.append(_Launch(kernels.draw_kernel, (rows, tiles), values, _OPTIONS))
    values = {"scores": scores, "winners": winners, "out": out, "tiles": tiles, "BLOCK": BLOCK}
    launches.append(_Launch(kernels.finish_kernel, (rows,), values, _OPTIONS))
    return launches, out


_POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
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
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "i32"
    return signature, constants, attributes


@functools.cache
def _kernels() -> ModuleType:
    from radar_kernels.logit_blend import _triton_kernels

    return _triton_kernels


@functools.cache
def _interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU in this process instead of compiling them."""
    if importlib.util.find_spec("triton") is None:
        return False
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(_kernels().prepare_kernel, InterpretedFunction)
