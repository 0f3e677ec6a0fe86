"""Checks of plain values that all of Radar's Python layer shares; True and False are no numbers."""

from __future__ import annotations

from typing import Any, TypeGuard

__all__ = ["check_has", "check_whole", "is_number", "is_whole"]


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is an int or a float."""
    return isinstance(value, int | float) and not isinstance(value, bool)


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
