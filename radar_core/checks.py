"""Checks of plain values that all of Radar's Python layer shares; True and False are no numbers."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

__all__ = [
    "check_has",
    "check_number",
    "check_seed",
    "check_whole",
    "is_finite",
    "is_number",
    "is_whole",
]


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is an int or a float."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: object) -> TypeGuard[float]:
    """Whether a value is an int or a float, and one that a float can hold."""
    try:
        return is_number(value) and math.isfinite(value)
    except OverflowError:  # an int of more than 308 digits
        return False


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is an int."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_whole(name: str, value: Any, least: int) -> None:
    """Check that a value is a whole number that is large enough.

    Args:
        name: of the argument.
        value: its value.
        least: the least it may be.

    Raises:
        ValueError: it is no whole number, or less.
    """
    if not is_whole(value) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def check_number(name: str, value: Any, least: float = 0.0) -> None:
    """Check that a value is a finite number that is large enough.

    Args:
        name: of the argument.
        value: its value.
        least: the least it may be.

    Raises:
        ValueError: it is no number, not finite, or less.
    """
    if not is_finite(value) or value < least:
        raise ValueError(f"{name} must be a number of at least {least:g} and finite, got {value!r}")


def check_seed(seed: Any) -> None:
    """Raise ValueError unless a seed, which may be negative, is one that torch can take."""
    if not is_whole(seed) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must be a whole number of at most 64 bits, got {seed!r}")


def check_has(name: str, value: Any, method: str, example: str) -> None:
    """Check that a value is an object that has a method; a class that has it will not do.

    Args:
        name: of the argument.
        value: its value.
        method: the method's name.
        example: what could stand there instead, such as "FullContext()".

    Raises:
        ValueError: it is a class, or has no such method.
    """
    if isinstance(value, type):
        raise ValueError(
            f"{name} is the class {value.__name__}; expected an object, such as {example}"
        )
    if not callable(getattr(value, method, None)):
        what = "cannot be called" if method == "__call__" else f"has no {method}(...)"
        raise ValueError(
            f"{name} is a {type(value).__name__} that {what}; expected such as {example}"
        )
