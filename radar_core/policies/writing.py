"""How policies write what was said into a prompt: the format of `AgentRadar.prompt`."""

from __future__ import annotations

from collections.abc import Sequence

from radar_core.policies.policy import Turn
from radar_core.transcript import Message

__all__ = ["audible", "write_chat", "write_header", "write_history"]

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


def write_header(sender: str, round: int, receiver: str | None, *more: str) -> str:
    """Write the line above a message.

    Args:
        sender: name of the agent that wrote it.
        round: its round.
        receiver: name of the agent that reads it; None for nobody in particular.
        *more: what else the line says.

    Returns:
        Such as "[critic, round 1]" and a line feed.
    """
    who = f"{sender} (you)" if sender == receiver else sender
    return f"[{', '.join([who, f'round {round}', *more])}]\n"


def write_history(
    shown: Sequence[Numbered], receiver: str | None, opening: str = "The conversation so far:"
) -> tuple[str, dict[int, int]]:
    """Write messages in full, one block each.

    Args:
        shown: (index in the transcript, message) of each message, in order.
        receiver: name of the agent that reads them; None for nobody in particular.
        opening: the line above them.

    Returns:
        The text, empty without messages; and where in it each message's text begins, by index.
    """
    text = f"{opening}\n\n" if shown else ""
    begins: dict[int, int] = {}
    for index, message in shown:
        text += write_header(message.sender, message.round, receiver)
        begins[index] = len(text)
        text += f"{message.text}\n\n" if message.text.strip() else "\n"
    return text, begins


def write_chat(turn: Turn, history: str) -> list[dict[str, str]]:
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
    messages = [] if turn.system is None else [{"role": "system", "content": turn.system}]
    content = f"{history}Your task, {turn.receiver}:\n{turn.query}"
    return [*messages, {"role": "user", "content": content}]
