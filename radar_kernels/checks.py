"""Checks of argument types that all operators share, so that a mistake is named, not met later."""

from numbers import Integral, Real

import torch
from torch import Tensor


def check_tensors(**given: object) -> None:
    """Checks that arguments are tensors.

    Args:
        given: the arguments by name.

    Raises:
        ValueError: one is no tensor.
    """
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is {_described(value)}; expected a torch.Tensor")


def check_number(name: str, given: object) -> None:
    """Checks that an argument is a real number; True and False are none.

    Args:
        name: of the argument.
        given: its value, which is no tensor.

    Raises:
        ValueError: it is no number.
    """
    # Most are plain floats; the abstract class, which numpy's belong to, is slow to ask.
    if not isinstance(given, float) and (isinstance(given, bool) or not isinstance(given, Real)):
        raise ValueError(f"{name} is {_described(given)}; expected a number or a tensor of them")


def check_numbers(name: str, given: object) -> None:
    """Checks that an argument is a real number or a tensor of them.

    Args:
        name: of the argument.
        given: its value.

    Raises:
        ValueError: it is neither.
    """
    if not isinstance(given, Tensor):
        check_number(name, given)
    elif given.dtype == torch.bool or given.is_complex():
        raise ValueError(f"{name} is a tensor of {given.dtype}; expected one of numbers")


def check_integer(name: str, given: object) -> None:
    """Checks that an argument is a whole number.

    Args:
        name: of the argument.
        given: its value, which is no tensor.

    Raises:
        ValueError: it is none.
    """
    if isinstance(given, bool) or not isinstance(given, Integral):
        raise ValueError(f"{name} is {_described(given)}; expected a whole number")


def _described(value: object) -> str:
    return f"{str(value)[:60]!r} ({type(value).__name__})"
