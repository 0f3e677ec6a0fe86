"""The selectors that experiments compare, by name."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from radar_core.recommended import recommended_selector
from radar_core.relevance import (
    Attention,
    Combined,
    Dense,
    Lexical,
    Reading,
    Relevance,
    Selector,
)

if TYPE_CHECKING:
    from radar_core.evaluation.command import Arguments

__all__ = ["Chance", "available_selectors"]


@dataclass(frozen=True)
class Chance:
    """A selector that looks at nothing: the control that every other one has to beat.

    Args:
        seed: of the draw, with the query, so that each question has one of its own.
    """

    seed: int = 0

    def similarities(self, reading: Reading) -> np.ndarray:
        """Draw evenly from 0 to 1; see `radar_core.relevance.Selector.similarities`."""
        draw = random.Random(f"{self.seed}/{reading.query}")
        return np.array([draw.random() for _ in reading.sentences], dtype=np.float32)


def available_selectors(arguments: Arguments) -> dict[str, Callable[[], Selector]]:
    """Return what builds each selector that there is.

    They share an encoder's embeddings and a reading of the prompt, so that sentences are embedded
    and prompts read once. Nothing is loaded before one is built.

    Args:
        arguments: of the command line, for its model, tokenizer, encoder and seed.

    Returns:
        By name, a function that builds the selector.
    """

    @functools.cache
    def relevance() -> Relevance:
        return Relevance(arguments.loaded.encoder)

    @functools.cache
    def titled() -> Dense:
        return Dense(relevance(), title=True)

    @functools.cache
    def attention() -> Attention:
        return Attention(arguments.loaded.model, arguments.loaded.tokenizer)

    return {
        "dense": lambda: Dense(relevance()),
        "dense-title": titled,
        "lexical": Lexical,
        "lexical-title": lambda: Lexical(title=True),
        "attention": attention,
        "combined": lambda: Combined([attention(), titled()]),
        "recommended": lambda: recommended_selector(attention(), titled()),
        "random": lambda: Chance(arguments.seed),
    }
