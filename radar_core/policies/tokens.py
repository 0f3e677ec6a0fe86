"""Counting tokens for budgets, in the tokenizer's own count."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sized
from functools import lru_cache
from typing import Any, Protocol

__all__ = ["Tokenizer", "plain_counter", "token_counter"]

_BYTES_A_TOKEN = 4
_REMEMBERED = 16_384


class Tokenizer(Protocol):
    """Whatever turns a text into tokens: a transformers tokenizer, say."""

    def encode(self, text: str) -> Sized:
        """Return the tokens of a text; only their number matters here."""
        ...


def token_counter(tokenizer: Tokenizer | None = None) -> Callable[[str], int]:
    """Build a function that counts the tokens of a text and remembers what it counted.

    Args:
        tokenizer: as in `plain_counter`; None estimates one token for every four bytes of UTF-8,
            rounded up.

    Returns:
        The function, from str to int; many threads may call it.

    Raises:
        ValueError: if the tokenizer has no `encode`.
    """
    if tokenizer is None:
        return lambda text: -(-len(text.encode()) // _BYTES_A_TOKEN)
    return lru_cache(maxsize=_REMEMBERED)(plain_counter(tokenizer))


def plain_counter(tokenizer: Tokenizer) -> Callable[[str], int]:
    """Build a function that counts the tokens of a text, without special ones around it.

    Args:
        tokenizer: has `encode(text)`; one that knows `add_special_tokens`, as those of transformers
            do, is told to add none.

    Returns:
        The function, from str to int; an empty text has no token.

    Raises:
        ValueError: if the tokenizer has no `encode`.
    """
    encode = getattr(tokenizer, "encode", None)
    if isinstance(tokenizer, str) or not callable(encode):
        raise ValueError(
            "tokenizer must have encode(text), as the model's own has, got "
            f"{type(tokenizer).__name__}; EstimatedTokenizer() gives a rough count"
        )
    options = _without_special_tokens(encode)
    return lambda text: len(encode(text, **options)) if text else 0


def _without_special_tokens(encode: Callable[..., Any]) -> dict[str, bool]:
    try:
        parameters = inspect.signature(encode).parameters
    except (TypeError, ValueError):  # a builtin that does not say what it takes
        return {}
    return {"add_special_tokens": False} if "add_special_tokens" in parameters else {}
