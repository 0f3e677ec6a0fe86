"""Copies of policies, which remember things that cannot be copied."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

__all__ = ["Rebuilt"]


class Rebuilt:
    """A dataclass that `copy.deepcopy` and `pickle` make anew from its arguments.

    What it has remembered, and the locks and functions it does that with, stay behind.
    """

    def __getstate__(self) -> dict[str, Any]:
        arguments = fields(self)  # type: ignore[arg-type]  # those that inherit are dataclasses
        return {one.name: getattr(self, one.name) for one in arguments if one.init}

    def __setstate__(self, state: dict[str, Any]) -> None:
        type(self).__init__(self, **state)
