"""Turns of a small discussion, and the real AgentRadar prompt to compare with."""

from __future__ import annotations

import asyncio
import math
import re
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from radar_core.policies import Context, Policy, Turn
from radar_core.topology import Topology
from radar_core.transcript import Message, Transcript

AGENTS = ("far", "near", "solver", "after")
QUERY = "What is the budget?"

Said = tuple[str, int, str]


class Scripted:
    """Gives a sentence the cosine to the query that it ends in, as in "Yes 0.70."."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, texts: list[str]) -> np.ndarray:
        self.encoded += texts
        cosines = [
            1.0 if text == QUERY else float((re.findall(r"\d\.\d+", text) or ["0.1"])[-1])
            for text in texts
        ]
        return np.array([[cosine, math.sqrt(max(0, 1 - cosine**2))] for cosine in cosines])


class HashedWords:
    """Embeds a text as its words, each at a place of its own: texts of any kind, at once."""

    def encode(self, texts: list[str]) -> np.ndarray:
        vectors = np.zeros((len(texts), 64), np.float32)
        for row, text in enumerate(texts):
            for word in text.casefold().split():
                vectors[row, zlib.crc32(word.encode()) % 64] += 1
        return vectors


def turn(said: Iterable[Said], **changes: Any) -> Turn:
    """Build a turn of "solver" in a chain of four agents; `said` has (sender, round, text)."""
    messages = [Message(sender, round, text) for sender, round, text in said]
    settings: dict[str, Any] = dict(
        receiver="solver",
        task=QUERY,
        query=QUERY,
        round=1 + max((message.round for message in messages), default=-1),
        transcript=Transcript(messages),
        topology=Topology.chain(AGENTS),
    )
    return Turn(**(settings | changes))


async def no_model(messages: Any, max_new_tokens: int) -> str:
    raise AssertionError("this policy needs no model")


def context(policy: Policy, turn: Turn, ask: Any = no_model) -> Context:
    return asyncio.run(policy.context(turn, ask))


def anchored(context: Context) -> list[str]:
    return [
        context.messages[anchor.message]["content"][anchor.start : anchor.end]
        for anchor in context.anchors
    ]
