"""What of a turn policies write into a prompt; `radar_core.writing` has the format."""

from __future__ import annotations

from radar_core.policies.policy import Turn
from radar_core.transcript import Message
from radar_core.writing import write_chat

__all__ = ["audible", "write_turn"]

Numbered = tuple[int, Message]


def audible(turn: Turn) -> list[Numbered]:
    """List what the receiver can have heard: its own messages and those of agents that reach it.

    Args:
        turn: whose turn it is and what was said before.

    Returns:
        (index in the transcript, message) in the transcript's order; none of a later round.

    Raises:
        ValueError: if the receiver or a sender is not in the topology.
    """
    hops = turn.topology.hops_to(turn.receiver)
    for sender in turn.transcript.senders:
        turn.topology.check_agent(sender, "sender")
    return [
        (index, message)
        for index, message in enumerate(turn.transcript)
        if hops[message.sender] >= 0 and message.round <= turn.round
    ]


def write_turn(turn: Turn, history: str) -> list[dict[str, str]]:
    """Write the chat messages: the system prompt, if any, then history and query as the user's.

    Args:
        turn: whose turn it is.
        history: what stands before the query; ends in a blank line unless it is empty.

    Returns:
        Dicts with "role" and "content"; the last content begins with the history and ends with the
        query.

    Raises:
        ValueError: if the query is blank.
    """
    if not turn.query.strip():
        raise ValueError(f"query must be a str that is not blank, got {turn.query!r}")
    return write_chat(history, turn.receiver, turn.query, turn.system)
