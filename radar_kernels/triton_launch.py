"""What the Triton launchers share: launches as plain data, to run or to compile ahead of time.

Each operator's ``triton.py`` lists the settings its launcher can choose in ``configurations()``
and compiles one of them, in its most demanding form, with ``compile_configuration(one)``; tests and
``python -m benchmarks.compile_report`` find them by these names. Imports without Triton.
"""

import functools
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
# Bytes of shared memory a program may use. sm_80's settings also run on the other 8.x and the 12.x
# parts, which have less than an A100.
SHARED_BYTES = {"sm_80": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}

_POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.bool: "*u1",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch.

    Args:
        kernel: the ``triton.jit`` function.
        grid: number of programs on each axis.
        values: every parameter of the kernel by name.
        options: ``num_warps``, ``num_stages`` and other options of the compiler.
    """

    kernel: Any
    grid: tuple[int, ...]
    values: dict[str, Any]
    options: dict[str, Any]

    def __call__(self) -> None:
        """Launches the kernel on the current device's current stream."""
        self.kernel[self.grid](**self.values, **self.options)


@functools.cache
def interpreted() -> bool:
    """Says whether Triton interprets kernels on the CPU in this process.

    Returns:
        True if ``TRITON_INTERPRET=1`` was set when Triton was imported.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    import triton.language as language
    from triton.runtime.interpreter import InterpretedFunction

    # Triton's own functions were decorated when it was imported, as every kernel is.
    return isinstance(language.cdiv, InterpretedFunction)


@functools.cache
def absent() -> str | None:
    """Says why Triton cannot run on this machine at all.

    Returns:
        The reason, or None where Triton and a GPU (or Triton's interpreter) are present.
    """
    if importlib.util.find_spec("triton") is None:
        return 'triton is not installed (pip install "radar-kernels[triton]")'
    if interpreted() or torch.cuda.is_available():
        return None
    return "torch sees no CUDA or ROCm device"


def wrong_device(name: str, tensor: Tensor) -> str | None:
    """Says why kernels cannot run where a tensor lies.

    Args:
        name: of the tensor, for the reason.
        tensor: any tensor of the call.

    Returns:
        The reason, or None.
    """
    if tensor.device.type != ("cpu" if interpreted() else "cuda"):
        return f"{name} is on {tensor.device}, and the Triton kernels run on GPUs"
    if not interpreted() and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(tensor.device)
        if capability < (8, 0):
            return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    return None


@functools.cache
def target_of(device: torch.device) -> str:
    """Names the settings that suit a device.

    Args:
        device: where the kernels will run.

    Returns:
        One of ``TARGETS``; the interpreter counts as "sm_90".
    """
    if interpreted():
        return "sm_90"
    if torch.version.hip is not None:
        return "gfx942"
    major = torch.cuda.get_device_capability(device)[0]
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")


def run_all(launches: Iterable[Launch], device: torch.device) -> None:
    """Runs launches one after the other.

    Args:
        launches: what to run.
        device: where their tensors lie.
    """
    with torch.cuda.device(device if device.type == "cuda" else -1):
        for launch in launches:
            launch()


def compile_launch(launch: Launch, target: str) -> Any:
    """Compiles a kernel as a launch on a target would; no GPU is needed.

    Args:
        launch: its tensors may be meta tensors, only dtypes matter.
        target: one of ``TARGETS``.

    Returns:
        Triton's compiled kernel.

    Raises:
        ValueError: ``target`` is unknown.
        RuntimeError: Triton was imported with ``TRITON_INTERPRET=1`` and compiles nothing.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if target not in TARGETS:
        raise ValueError(f"target is {target!r}, expected one of {', '.join(TARGETS)}")
    if interpreted():
        raise RuntimeError("TRITON_INTERPRET=1 is set: unset it to compile kernels")
    if target.startswith("sm_"):
        machine = GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    else:
        machine = GPUTarget("hip", target, 64)
    source = ASTSource(launch.kernel, *signature(launch))
    return triton.compile(source, target=machine, options=launch.options)


def signature(
    launch: Launch,
) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[list[Any]]]]:
    """Types, constants and attributes that a launch compiles with (pointers 16-byte aligned).

    Args:
        launch: the launch; its integers must all be marked ``do_not_specialize``.

    Returns:
        What ``triton.compiler.ASTSource`` takes.
    """
    types, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.values[parameter.name]
        if value is None or parameter.is_constexpr:
            types[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, Tensor):
            types[parameter.name] = _POINTERS[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            types[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    return types, constants, attributes


def power_of_two(number: int) -> int:
    """Rounds up to a power of two.

    Args:
        number: at least 1.

    Returns:
        The smallest power of two that is not below it.
    """
    return 1 << (number - 1).bit_length()


def ceil_div(number: int, divisor: int) -> int:
    """Divides and rounds up.

    Args:
        number: the dividend.
        divisor: the divisor, positive.

    Returns:
        The quotient.
    """
    return -(-number // divisor)


def used_strides(tensor: Tensor) -> list[int]:
    """Strides of a tensor.

    Args:
        tensor: any tensor.

    Returns:
        The strides, 0 where there is one entry: that stride may be any number and is never used.
    """
    return [
        0 if size == 1 else stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
