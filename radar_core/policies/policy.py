"""What every policy is given and what it returns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from radar_core.anchors import Anchor
from radar_core.methods import Method
from radar_core.topology import Topology
from radar_core.transcript import Transcript

__all__ = ["Ask", "Context", "Policy", "Turn"]

Ask = Callable[[Sequence[Mapping[str, str]], int], Awaitable[str]]


@dataclass(frozen=True)
class Turn:
    """An agent's turn to speak.

    Args:
        receiver: name of the agent that will speak.
        task: the question or task that the discussion is about.
        query: what this agent has to do now; often the task and an instruction.
        round: its round.
        transcript: everything said so far, by everybody.
        topology: who talks to whom.
        roles: the role of every agent, by name.
        system: the agent's system prompt; None for none.
        stage: the stage of the work, such as "plan" or "decide"; None if it has no stages.
    """

    receiver: str
    task: str
    query: str
    round: int
    transcript: Transcript
    topology: Topology
    roles: Mapping[str, str] = field(default_factory=dict)
    system: str | None = None
    stage: str | None = None


@dataclass(frozen=True)
class Context:
    """What an agent is shown and what of it is anchored.

    Args:
        messages: dicts with "role" and "content" for a chat template.
        anchors: spans of the messages' contents to steer towards; none steers nothing.
        method: the steering method for the anchors; None leaves the choice to the model's own.
        seconds: time that choosing took, model calls left out.
        selector: what chose the anchors. If it read the prompt with the very model that answers,
            as `Attention` does, the answer can go on from that.
    """

    messages: Sequence[Mapping[str, str]]
    anchors: Sequence[Anchor] = ()
    method: Method | None = None
    seconds: float = 0.0
    selector: Any = field(default=None, compare=False)


class Policy(Protocol):
    """Decides what an agent is shown. The same turn always gives the same context."""

    async def context(self, turn: Turn, ask: Ask) -> Context:
        """Write the receiver's prompt.

        Args:
            turn: whose turn it is and what was said before.
            ask: `await ask(messages, max_new_tokens)` has the discussion's model answer a prompt of
                the policy's own (a summary, say); such calls are logged and counted as the
                policy's.

        Returns:
            The prompt and its anchors.
        """
        ...
