"""Tokenizers without a model, and models that answer from a script."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from radar_core.discussion.model import Answer, Request


class Words:
    """A token is a word, or a single other character; no token spans a line end."""

    def encode(self, text: str) -> list[str]:
        return re.findall(r"\w+|\W", text)


class Characters:
    """A token is a character, so that frames are long."""

    def encode(self, text: str) -> list[str]:
        return list(text)


class Parity:
    """Not monotone: of an odd number of characters each counts, of an even one only a third."""

    def encode(self, text: str) -> range:
        return range(len(text) if len(text) % 2 else len(text) // 3)


class Scripted:
    """Answers at once by a function of the prompt, and remembers what it was asked."""

    def __init__(self, answer: Callable[[str], str] = lambda prompt: "Do it."):
        self.answer = answer
        self.requests: list[Request] = []

    @property
    def prompts(self) -> list[str]:
        return [request.messages[-1]["content"] for request in self.requests]

    async def __call__(self, request: Request) -> Answer:
        self.requests.append(request)
        return Answer(self.answer(self.prompts[-1]))


class Held(Scripted):
    """Answers a call only when the test releases it."""

    def __init__(self):
        super().__init__()
        self.calls: list[asyncio.Future[str]] = []

    async def __call__(self, request: Request) -> Answer:
        self.requests.append(request)
        self.calls.append(asyncio.get_running_loop().create_future())
        return Answer(await self.calls[-1])

    def release(self, call: int, text: str = "Do it.") -> None:
        self.calls[call].set_result(text)


async def settle(turns: int = 12) -> None:
    """Let everything run that can run."""
    for _ in range(turns):
        await asyncio.sleep(0)


def asking(prompt: str) -> str:
    """Who asks, from the prompt alone."""
    return re.search(r"^(?:## In focus: agent|# All agents.* by agent) (\S+)$", prompt, re.M)[1]
