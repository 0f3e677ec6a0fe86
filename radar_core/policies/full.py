"""Everything that was said, or what one's neighbours said last."""

from __future__ import annotations

from dataclasses import dataclass

from radar_core.policies.policy import Ask, Context, Turn
from radar_core.policies.writing import audible, write_turn
from radar_core.writing import write_history

__all__ = ["FullContext"]


@dataclass(frozen=True)
class FullContext:
    """Shows the whole conversation and anchors nothing.

    Args:
        neighbours_only: show only what agents with an edge to the receiver said in this round and
            in the one before (without the receiver's own messages), as the prompts of AgentPrune
            do; False shows its own messages and those of every agent that reaches it, in full.
    """

    neighbours_only: bool = False

    async def context(self, turn: Turn, ask: Ask) -> Context:
        """Write the receiver's prompt; see `Policy.context`.

        Raises:
            ValueError: if an agent is not in the topology or the query is blank.
        """
        shown = audible(turn)
        if self.neighbours_only:
            hops = turn.topology.hops_to(turn.receiver)
            shown = [
                (index, message)
                for index, message in shown
                if hops[message.sender] == 1 and message.round >= turn.round - 1
            ]
        history, _ = write_history(shown, turn.receiver)
        return Context(write_turn(turn, history))
