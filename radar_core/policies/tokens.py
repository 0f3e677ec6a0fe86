"""Counting tokens for budgets."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

__all__ = ["token_counter"]

_BYTES_A_TOKEN = 4
_REMEMBERED = 16_384


def token_counter(tokenizer: Any = None) -> Callable[[str], int]:
    """Build a function that counts the tokens of a text and remembers what it counted.

    Args:
        tokenizer: anything with `encode(text)` that returns something with a length, such as a
            transformers tokenizer, which is asked to add no special tokens; None estimates one
            token for every four bytes of UTF-8, rounded up.

    Returns:
        The function, from str to int; many threads may call it.

    Raises:
        ValueError: if the tokenizer has no `encode`.
    """
    if tokenizer is None:
        return lambda text: -(-len(text.encode()) // _BYTES_A_TOKEN)
    if isinstance(tokenizer, str) or not callable(getattr(tokenizer, "encode", None)):
        raise ValueError(
            "tokenizer must have encode(text), as transformers tokenizers have, or be None for an "
            f"estimate, got {type(tokenizer).__name__}"
        )
    settings: dict[str, Any] = {"add_special_tokens": False}
    try:
        tokenizer.encode("a", **settings)
    except TypeError:  # it knows no such argument
        settings = {}

    @lru_cache(maxsize=_REMEMBERED)
    def count(text: str) -> int:
        return len(tokenizer.encode(text, **settings))

    return count
