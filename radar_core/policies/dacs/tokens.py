"""Counting tokens and cutting texts so that they fit, in the tokenizer's own count."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sized
from typing import Any, Protocol

from radar_core.checks import check_whole

__all__ = ["EstimatedTokenizer", "TokenCounter", "Tokenizer", "largest"]


class Tokenizer(Protocol):
    """Whatever turns a text into tokens: a transformers tokenizer, say."""

    def encode(self, text: str) -> Sized:
        """Return the tokens of a text; only their number matters here."""
        ...


class EstimatedTokenizer:
    """Stands in for a model's tokenizer where there is none: one token for every few characters.

    An estimate: a budget counted with it is no guarantee for the model. Used only where asked for.

    Args:
        characters: how many characters make a token; English prose has about 4.

    Raises:
        ValueError: `characters` is no whole number of at least 1.
    """

    def __init__(self, characters: int = 4) -> None:
        check_whole("characters", characters, 1)
        self.characters = characters

    def encode(self, text: str) -> Sized:
        return range(-(-len(text) // self.characters))


class TokenCounter:
    """Counts a text's tokens without the special ones that a tokenizer may put around it.

    Args:
        tokenizer: has `encode(text)`; a transformers tokenizer is told to add no special tokens.

    Raises:
        ValueError: `tokenizer` has no `encode`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        encode = getattr(tokenizer, "encode", None)
        if isinstance(tokenizer, str) or not callable(encode):
            raise ValueError(
                f"tokenizer is a {type(tokenizer).__name__} without encode(text); pass the model's "
                "own tokenizer, or EstimatedTokenizer() for a rough count"
            )
        self._encode: Callable[..., Sized] = encode
        self._options = _plain_options(encode)

    def count(self, text: str) -> int:
        """Count a text's tokens.

        Args:
            text: any text; an empty one has none.

        Returns:
            Their number.
        """
        return len(self._encode(text, **self._options)) if text else 0

    def beginning(self, text: str, tokens: int) -> str:
        """Cut a text at its end.

        Whole characters are kept, so that no token is torn apart into one that cannot be read.

        Args:
            text: the text.
            tokens: how many tokens it may have, at least 0.

        Returns:
            The text, or a beginning of it that has at most that many tokens.
        """
        kept = largest(len(text), lambda length: self.count(text[:length]) <= tokens)
        return text[: kept or 0]


def largest(most: int, fits: Callable[[int], bool]) -> int | None:
    """Find how much of something fits.

    Args:
        most: the most there is, at least 0.
        fits: whether a number from 0 to `most` fits.

    Returns:
        `most` if that fits, else the largest number that bisection finds, which is one that was
        seen to fit even where `fits` is not monotone; None if not even 0 fits.
    """
    if fits(most):
        return most
    if most == 0 or not fits(0):
        return None
    low, high = 0, most  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _plain_options(encode: Callable[..., Any]) -> dict[str, bool]:
    try:
        parameters = inspect.signature(encode).parameters
    except (TypeError, ValueError):  # a builtin that does not say what it takes
        return {}
    return {"add_special_tokens": False} if "add_special_tokens" in parameters else {}
