"""The selectors that experiments compare, by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from radar_core.recommended import recommended_selector
from radar_core.relevance import Attention, Dense, Lexical, Relevance, Selector

if TYPE_CHECKING:
    from radar_core.evaluation.command import Arguments

__all__ = ["available_selectors"]


def available_selectors(arguments: Arguments) -> dict[str, Callable[[], Selector]]:
    """Return what builds each selector that there is.

    They share an encoder's embeddings and a reading of the prompt, so that sentences are embedded
    and prompts read once.

    Args:
        arguments: of the command line, for its model, tokenizer and encoder.

    Returns:
        By name, a function that builds the selector.
    """
    relevance = Relevance(arguments.encoder)
    titled = Dense(relevance, title=True)

    @functools.cache
    def attention() -> Attention:
        return Attention(arguments.model, arguments.tokenizer)

    return {
        "dense": lambda: Dense(relevance),
        "dense-title": lambda: titled,
        "lexical": Lexical,
        "lexical-title": lambda: Lexical(title=True),
        "attention": attention,
        "combined": lambda: recommended_selector(attention(), titled),
    }
