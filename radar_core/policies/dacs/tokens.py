"""Counting tokens and cutting texts so that they fit, in the tokenizer's own count."""

from __future__ import annotations

from collections.abc import Callable, Sized

from radar_core.checks import check_whole
from radar_core.policies.tokens import Tokenizer, plain_counter

__all__ = ["EstimatedTokenizer", "TokenCounter", "largest"]


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
        tokenizer: as in `plain_counter`; `EstimatedTokenizer()` for a rough count.

    Raises:
        ValueError: `tokenizer` has no `encode`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.count = plain_counter(tokenizer)

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
