"""Linear layers for the few rows of decoding on a CPU, each weight read once, at memory speed."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from radar_core.hooks.undo import Undo
from radar_kernels.linear_rows import linear_rows
from radar_kernels.linear_rows.cpp import MOST_ROWS, absent

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def serve_few_rows(modules: Iterable[nn.Module], undo: Undo) -> None:
    """Let plain linear layers among modules serve few rows by an operator that reads weights once.

    Two rows cost torch's own layer up to three times one, and one bfloat16 row several times the
    reading of its weights. Only layers that are exactly `nn.Linear`
    with a plain CPU weight are touched, and only if nothing else (such as accelerate's hooks) has
    replaced their `forward`; the weights stay as they are. Results agree to rounding.
    """
    if absent() is not None:
        return
    served = {
        module: types.MethodType(_forward, module)
        for module in modules
        if isinstance(module, nn.Linear) and _is_plain(module)
    }
    undo.add(_put_back, served)
    for module, forward in served.items():
        vars(module)["forward"] = forward  # as by setattr, which asks what else it might be


def _put_back(served: Mapping[nn.Linear, Any]) -> None:
    for module, forward in served.items():
        if vars(module).get("forward") is forward:
            del vars(module)["forward"]


def _is_plain(module: nn.Linear) -> bool:
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    weight: Any = module._parameters.get("weight")
    return (
        weight is not None
        and type(weight.data) is Tensor
        and weight.is_cpu
        and weight.dtype in _DTYPES
        and weight.is_contiguous()
    )


def _forward(module: nn.Linear, input: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return _traced(module, input)
    if input.numel() > MOST_ROWS * module.in_features or torch.is_autocast_enabled("cpu"):
        return nn.functional.linear(input, module.weight, module.bias)
    return linear_rows(input, module.weight, module.bias)


def _traced(module: nn.Linear, input: Tensor) -> Tensor:
    """Choose by what is known while tracing, so that no graph is added for few rows or many."""
    few = input.numel() <= MOST_ROWS * module.in_features
    if (
        statically_known_true(few)
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and input.dtype == module.weight.dtype
    ):
        return torch.ops.radar_cpp.linear_rows.default(input, module.weight, module.bias)
    return nn.functional.linear(input, module.weight, module.bias)
