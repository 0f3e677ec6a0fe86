"""How a discussion ends: a decider reads all, the last word counts, or the majority wins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from radar_core.discussion.agent import Agent, names_of
from radar_core.discussion.outcome import Spoken, Verdict

__all__ = ["ByLast", "ByMajority", "ByReference", "Decision", "Speak"]

Speak = Callable[[Agent, Sequence[Spoken]], Awaitable[Spoken]]

DECIDER = Agent(
    name="decider",
    role="decider",
    system="You read what a group has found out about a task and settle on one final answer.",
    instruction=(
        "Weigh the contributions above against each other, keep what is well supported, and give "
        "the final answer."
    ),
)


class Decision(Protocol):
    """Settles what the answer of a discussion is."""

    async def decide(self, last: Sequence[Spoken], speak: Speak) -> Verdict:
        """Decide.

        Args:
            last: what was said in the last round, in the schedule's order.
            speak: `await speak(agent, heard)` lets one more agent speak, who has heard this.

        Returns:
            The verdict.
        """
        ...


@dataclass(frozen=True)
class ByReference:
    """A decider reads what was said in the last round, and answers.

    AgentPrune and AgentDropout call this FinalRefer. The decider's prompt is written by its own
    policy, else by the discussion's.

    Args:
        decider: the agent that decides; none of the discussion's.

    Raises:
        ValueError: the decider is no `Agent`.
    """

    decider: Agent = field(default=DECIDER)

    def __post_init__(self) -> None:
        names_of([self.decider])

    async def decide(self, last: Sequence[Spoken], speak: Speak) -> Verdict:
        """Decide; see `Decision.decide`."""
        spoken = await speak(self.decider, last)
        return Verdict(spoken.text, spoken.text, spoken=spoken)


@dataclass(frozen=True)
class ByLast:
    """The last message is the answer."""

    async def decide(self, last: Sequence[Spoken], speak: Speak) -> Verdict:
        """Decide; see `Decision.decide`."""
        return Verdict(last[-1].text, last[-1].text)


@dataclass(frozen=True)
class ByMajority:
    """The last round's most frequent answer; of equally frequent ones, the first to get there.

    Args:
        parse: finds the answer in a message, in a form in which equal answers are equal str; None
            for none. An answer that cannot be parsed has no vote and never wins.

    Raises:
        ValueError: `parse` cannot be called.
    """

    parse: Callable[[str], str | None]

    def __post_init__(self) -> None:
        if not callable(self.parse):
            raise ValueError(
                f"parse is {self.parse!r}; expected a function from a message to the answer in it"
            )

    async def decide(self, last: Sequence[Spoken], speak: Speak) -> Verdict:
        """Decide; see `Decision.decide`.

        Raises:
            TypeError: `parse` returned something else than a str or None.
        """
        parsed = [(self._parsed(said), said.text) for said in last]
        votes: Counter[str] = Counter()
        winner, text = None, None
        for answer, said in parsed:
            if answer is None:
                continue
            votes[answer] += 1
            if winner is None or votes[answer] > votes[winner]:
                winner, text = answer, said
        unparsed = sum(answer is None for answer, _ in parsed)
        return Verdict(text, winner, dict(votes.most_common()), unparsed)

    def _parsed(self, said: Spoken) -> str | None:
        answer: Any = self.parse(said.text)
        if answer is not None and not isinstance(answer, str):
            raise TypeError(
                f"parse returned {answer!r} ({type(answer).__name__}) for what {said.agent} "
                f"said ({said.text[:60]!r}); expected a str, such as str(...) of it, or None if "
                "there is no answer"
            )
        return answer
