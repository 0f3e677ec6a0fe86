"""The instruction sets of this machine that the C++ operators can run on, and choosing one."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from radar_kernels import native

NAMES = ("amx", "avx512_bf16", "avx512", "avx2", "baseline")
SETS = [
    name
    for name in NAMES
    if native.absent() is None and torch.ops.radar_cpp.has_instruction_set(name)
]


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Run the C++ operators on one instruction set inside a `with` block."""
    before = torch.ops.radar_cpp.instruction_set()
    torch.ops.radar_cpp.use_instruction_set(name)
    try:
        yield
    finally:
        torch.ops.radar_cpp.use_instruction_set(before)
