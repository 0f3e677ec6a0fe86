"""Two rows through the layers of Qwen2.5-0.5B and its output layer, against one of torch's.

Every call reads another layer's weights, as in a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.tasks import DTYPES, FLOOR, Bar, Build, Contender, Growth, Task, close_to
from radar_kernels import native
from radar_kernels.linear_rows import linear_rows

LAYERS = ((896, 896), (896, 4864), (4864, 896))
HEAD = (896, 151936)
LAYERS_BYTES = 160 << 20
BOTH = ("fp32", "bf16")
TOLERANCE = {"bf16": 1e-2, "fp32": 1e-5}

BARS = (
    Bar("linear", "896x151936", ("fp32",), "radar-cpp", "torch-1-row", 0.7),
    Bar("linear", "896x151936", ("bf16",), "radar-cpp", "torch-1-row", 0.8),
    Bar("linear", "", BOTH, "radar-cpp", "torch-1-row", 1.0),
    Bar("linear", "", BOTH, "radar-cpp", FLOOR, 1.5, 1.1),
)


def plan(dtypes: Sequence[str] = BOTH, quick: bool = False) -> list[Build]:
    """Plan the tasks.

    Args:
        dtypes: "fp32", "bf16".
        quick: the smallest layer only.

    Returns:
        Builders of the tasks.
    """
    sizes = LAYERS[:1] if quick else (*LAYERS, HEAD)
    return [partial(task, size, dtype) for size in sizes for dtype in dtypes]


def growth(dtype: str, quick: bool = False) -> list[Growth]:
    """Plan the same work at growing sizes.

    Args:
        dtype: "fp32" or "bf16".
        quick: few and small sizes.

    Returns:
        The output layer against the vocabulary.
    """
    sizes = (256, 512) if quick else (8192, 32768, 65536, 151936)
    points = [(size, partial(task, (896, size), dtype)) for size in sizes]
    return [Growth("two rows through an output layer of 896 inputs", "vocabulary", points)]


def task(size: tuple[int, int], dtype: str) -> Task:
    """Build the task of one layer.

    Args:
        size: inputs and outputs.
        dtype: "fp32" or "bf16".

    Returns:
        The task; "torch-1-row" is what an unsteered step does.
    """
    inputs, outputs = size
    draw = torch.Generator().manual_seed(0)
    bytes_of_one = inputs * outputs * DTYPES[dtype].itemsize
    count = min(24, max(1, LAYERS_BYTES // bytes_of_one))
    weights = [torch.randn(outputs, inputs, generator=draw).to(DTYPES[dtype]) for _ in range(count)]
    rows = torch.randn(2, inputs, generator=draw).to(DTYPES[dtype])
    one = rows[:1].clone()
    expected = rows.double() @ weights[0].double().mT

    def contender(call: Callable[[int], Tensor], expected: Tensor) -> Contender:
        return Contender(call, close_to(expected, TOLERANCE[dtype]))

    found = {
        "torch-1-row": contender(lambda copy: linear(one, weights[copy]), expected[:1]),
        "torch": contender(lambda copy: linear(rows, weights[copy]), expected),
    }
    if native.absent() is None:
        found["radar-cpp"] = contender(lambda copy: linear_rows(rows, weights[copy]), expected)
        found["radar-cpp-1-row"] = contender(
            lambda copy: linear_rows(one, weights[copy]), expected[:1]
        )
    return Task("linear", f"{inputs}x{outputs} rows=2", dtype, found, count, bytes_of_one)
