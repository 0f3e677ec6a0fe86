"""Blending and drawing on GPUs, in Triton: no sort, and nothing that the host waits for.

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
from radar_kernels.logit_blend.arguments import BlendArguments, SampleArguments
from radar_kernels.triton_launch import Launch, compile_launch, run_all

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Tokens of one program, and the maxima it leaves for the search of the k-th largest.
TILE = 1024
GROUPS = 16
# Numbers that the one program of a row reads at a time.
BLOCK = 2048
_OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}
_ROW_OPTIONS = {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": False}


absent = triton_launch.absent


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
    if (reason := triton_launch.wrong_device("full", full)) is not None:
        return reason
    for name, logits in (("full", full), ("masked", masked)):
        if logits is not None and logits.dtype not in DTYPES:
            return f"{name} is {logits.dtype}, and the Triton kernels take 16 and 32 bit floats"
    if full.shape[1] >= 2**31 - TILE:
        return f"full has {full.shape[1]} tokens, and the Triton kernels count them in 32 bits"
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


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way the launcher can choose to launch.

    Args:
        target: one of ``triton_launch.TARGETS``.
        operator: "blend", "modulated" or "sample".
        dtype: of the logits.
        limits: which of top-k, top-p and min-p are there ("k", "p", "m").
    """

    target: str
    operator: str
    dtype: torch.dtype
    limits: str = ""


def configurations() -> list[Configuration]:
    """Lists every setting the launcher can choose.

    Returns:
        The settings of every target, with masked logits, the more demanding form.
    """
    return [
        Configuration(target, operator, dtype, limits)
        for target in triton_launch.TARGETS
        for dtype in DTYPES
        for operator, limits in (
            ("blend", ""),
            ("modulated", ""),
            ("sample", ""),
            ("sample", "k"),
            ("sample", "p"),
            ("sample", "kpm"),
        )
    ]


def compile_configuration(one: Configuration) -> list[Any]:
    """Compiles the kernels of a setting; no GPU is needed.

    Args:
        one: the setting.

    Returns:
        Triton's compiled kernels in the order of their launch.
    """

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    full, row, whole = tensor(8, 151_936, dtype=one.dtype), tensor(8), tensor(8, dtype=torch.int64)
    if one.operator == "sample":
        launches, _ = _sample_launches(
            SampleArguments(
                full,
                full,
                row,
                row,
                whole if "k" in one.limits else None,
                row if "p" in one.limits else None,
                row if "m" in one.limits else None,
                whole,
                whole,
            )
        )
    else:
        launches, _ = _blend_launches(BlendArguments(full, full, row, one.operator == "modulated"))
    return [compile_launch(launch, one.target) for launch in launches]


def _run(launches: list[Launch], out: Tensor) -> None:
    if out.numel():
        run_all(launches, out.device)


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
) -> Launch:
    rows, tokens = full.shape
    tiles = -(-tokens // TILE)

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=full.device)

    return Launch(
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


def _blend_launches(arguments: BlendArguments) -> tuple[list[Launch], Tensor]:
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
    launches.append(Launch(_kernels().blend_kernel, (rows, tiles), values, _OPTIONS))
    return launches, out


def _sample_launches(arguments: SampleArguments) -> tuple[list[Launch], Tensor]:
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
        launches.append(Launch(kernels.floor_kernel, (rows,), values, _ROW_OPTIONS))
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
    launches.append(Launch(kernels.draw_kernel, (rows, tiles), values, _OPTIONS))
    values = {"scores": scores, "winners": winners, "out": out, "tiles": tiles, "BLOCK": BLOCK}
    launches.append(Launch(kernels.finish_kernel, (rows,), values, _OPTIONS))
    return launches, out


@functools.cache
def _kernels() -> ModuleType:
    from radar_kernels.logit_blend import _triton_kernels

    return _triton_kernels
