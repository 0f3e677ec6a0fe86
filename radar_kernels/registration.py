"""Registration of the public operators under ``torch.ops.radar``."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Record = TypeVar("Record")
_library = torch.library.Library("radar", "DEF")


def register(schema: str, implementation: Callable, fake: Callable) -> None:
    """Define ``radar::<schema>`` for every device, with its shape function.

    The operators have no autograd formula: calls that need gradients stay plain PyTorch.

    Args:
        schema: operator schema without the namespace, ``"name(Tensor x) -> Tensor"``.
        implementation: called with real tensors; must return fresh tensors.
        fake: called with fake tensors; returns empty ones of the right shape and dtype.
    """
    name = schema.split("(", 1)[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"radar::{name}", fake, lib=_library)


def unpack(record: type[Record], arguments: tuple[Any, ...]) -> tuple[Record, str | None]:
    """Reads what a registered operator was called with.

    Args:
        record: dataclass with slots whose first fields the operator takes in this order.
        arguments: all of them, then the backend where it is not the default.

    Returns:
        The record and the backend.
    """
    count = len(record.__slots__)  # type: ignore[attr-defined]
    return record(*arguments[:count]), arguments[count] if len(arguments) > count else None


def token_major(out: Tensor) -> Tensor:
    """Gives attention outputs one memory layout, whatever computed them.

    Args:
        out: ``[B, H, q, D]``.

    Returns:
        The same values stored as ``[B, q, H, D]``, which models reshape without a copy.
    """
    return out.transpose(1, 2).contiguous().transpose(1, 2)
