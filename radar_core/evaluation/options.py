"""The values of an experiment's own options, as they are typed."""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["names", "number", "whole_number", "yes_or_no"]


def whole_number(name: str, text: str, least: int = 1) -> int:
    """Read a number of things.

    Args:
        name: of the option.
        text: its value as typed.
        least: the smallest that is allowed.

    Raises:
        ValueError: it is none, or smaller.
    """
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"--set: {name} is {text!r}; expected a whole number of at least {least}")
    return int(text)


def number(name: str, text: str) -> float:
    """Read a number; see `whole_number`."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--set: {name} is {text!r}; expected a number") from None


def yes_or_no(name: str, text: str) -> bool:
    """Read yes or no; see `whole_number`."""
    if text not in ("yes", "no"):
        raise ValueError(f"--set: {name} is {text!r}; expected yes or no")
    return text == "yes"


def names(name: str, text: str, known: Collection[str]) -> list[str]:
    """Read names, with commas between them, or "all".

    Args:
        name: of the option.
        text: its value as typed.
        known: every name that there is.

    Returns:
        The names in their order, each once.

    Raises:
        ValueError: one is unknown, or there is none.
    """
    wanted = [part.strip() for part in text.split(",") if part.strip()]
    if wanted == ["all"]:
        return list(known)
    unknown = [part for part in wanted if part not in known]
    if unknown or not wanted:
        what = ", ".join(map(repr, unknown)) or "empty"
        raise ValueError(
            f"--set: {name} is {what}; expected some of {', '.join(known)}, by commas, or all"
        )
    return list(dict.fromkeys(wanted))
