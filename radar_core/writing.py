"""How a conversation is written into a prompt: blocks headed by sender and round, then a query."""

from __future__ import annotations

from collections.abc import Sequence

from radar_core.transcript import Message

__all__ = ["write_chat", "write_header", "write_history"]

Numbered = tuple[int, Message]


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


def write_chat(
    history: str, receiver: str, query: str, system: str | None = None
) -> list[dict[str, str]]:
    """Write the chat messages: the system prompt, if any, then history and query as the user's.

    Args:
        history: what stands before the query; ends in a blank line unless it is empty.
        receiver: name of the agent that will answer.
        query: what it has to do.
        system: text of the system message; None for none.

    Returns:
        Dicts with "role" and "content"; the last content begins with the history and ends with the
        query.
    """
    messages = [] if system is None else [{"role": "system", "content": system}]
    content = f"{history}Your task, {receiver}:\n{query}"
    return [*messages, {"role": "user", "content": content}]
