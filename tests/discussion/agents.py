"""Agents and models for tests of discussions."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from radar_core.discussion import Agent, Answer
from radar_core.policies.policy import Context


def agents(*names: str) -> list[Agent]:
    return [Agent(name, f"role of {name}", f"You are {name}.") for name in names]


@dataclass
class Recorder:
    """A model that writes down who asked what, and answers with the speaker and a number."""

    delay: dict[str, float] = field(default_factory=dict)
    before: tuple[str, ...] = ()  # who had been answered before, in another process say
    requests: list = field(default_factory=list)
    under_way: int = 0
    most_at_once: int = 0
    settings: dict = field(default_factory=lambda: {"name": "recorder"})

    async def __call__(self, request):
        self.requests.append(request)
        self.under_way += 1
        self.most_at_once = max(self.most_at_once, self.under_way)
        await asyncio.sleep(self.delay.get(request.speaker, 0))
        self.under_way -= 1
        text = f"{request.speaker} says {self.answer(request)}."
        return Answer(text, prompt_tokens=10, completion_tokens=3, seconds=0.5)

    def answer(self, request):
        asked = [*self.before, *(other.speaker for other in self.requests)]
        return asked.count(request.speaker)

    def prompt(self, speaker, number=0):
        mine = [request for request in self.requests if request.speaker == speaker]
        return mine[number].messages[-1]["content"]


@dataclass
class Watching:
    """A policy that keeps every turn it is given."""

    turns: list = field(default_factory=list)

    async def context(self, turn, ask):
        self.turns.append(turn)
        return Context([{"role": "user", "content": turn.query}], seconds=0.25)

    def heard(self, receiver, round):
        turn = next(one for one in self.turns if (one.receiver, one.round) == (receiver, round))
        return [(message.sender, message.round) for message in turn.transcript]


@dataclass
class Summing:
    """A policy that asks the model twice before every message."""

    _opening: str = "first of"

    async def context(self, turn, ask):
        first = await ask([{"role": "user", "content": f"{self._opening} {turn.receiver}"}], 8)
        second = await ask([{"role": "user", "content": f"second after {first}"}], 8)
        return Context([{"role": "user", "content": f"{second} {turn.query}"}])
