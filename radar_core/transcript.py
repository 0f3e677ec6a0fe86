"""Who said what, and when: the input of every selection."""

from __future__ import annotations

import difflib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radar_core.checks import is_whole

__all__ = ["Message", "Transcript"]

LAST_ROUND = 2**31 - 1
_LISTED_IDS = 8


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    Args:
        sender: name of the agent that wrote it; not empty.
        round: the round it was written in, counted from any start, at least 0.
        text: what was written; may be empty.

    Raises:
        ValueError: if a field has the wrong type or value.
    """

    sender: str
    round: int
    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.sender, str) or not self.sender.strip():
            raise ValueError(f"sender must be the name of an agent, got {self.sender!r}")
        if not isinstance(self.text, str):
            raise ValueError(f"text must be a str, got {type(self.text).__name__}")
        check_unicode("sender", self.sender)
        check_unicode("text", self.text)
        if not is_whole(self.round) or self.round < 0:
            raise ValueError(f"round must be a whole number >= 0, got {self.round!r}")
        if self.round > LAST_ROUND:
            raise ValueError(f"round must be at most {LAST_ROUND}, a larger one was given")


def check_unicode(name: str, text: str) -> None:
    """Raise ValueError if a text holds half a surrogate pair: JSON allows it, tokenizers do not."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} holds half a surrogate pair at character {error.start}; replace it"
        ) from None


class Transcript:
    """An append-only list of messages, oldest first.

    Args:
        messages: messages to start with; their rounds count as given.

    Raises:
        ValueError: if an item is no `Message`.
    """

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self._messages: list[Message] = []
        self._sent: Counter[str] = Counter()
        self._latest: dict[str, int] = {}
        self._given = 0
        for message in messages:
            if not isinstance(message, Message):
                raise ValueError(f"messages must hold Message objects, got {message!r}")
            self._add(message, given=True)

    def append(self, sender: str, text: str, round: int | None = None) -> Message:
        """Add a message at the end.

        Args:
            sender: name of the agent that wrote it.
            text: what was written.
            round: its round; None takes the number of earlier messages of the same sender, but
                at least one after that sender's latest round and the latest round given for any
                message before. (A plain turn number is no round: in a group chat it would decay
                everything away.)

        Returns:
            The message that was added.

        Raises:
            ValueError: if a value is unusable; nothing is added then.
        """
        given = round is not None
        message = Message(sender, round if round is not None else self._next_round(sender), text)
        self._add(message, given)
        return message

    def _next_round(self, sender: Any) -> int:
        if not isinstance(sender, str):
            return 0
        return max(self._sent[sender], self._latest.get(sender, -1) + 1, self._given)

    def _add(self, message: Message, given: bool) -> None:
        self._messages.append(message)
        self._sent[message.sender] += 1
        self._latest[message.sender] = max(self._latest.get(message.sender, 0), message.round)
        if given:
            self._given = max(self._given, message.round)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages, oldest first."""
        return tuple(self._messages)

    @property
    def senders(self) -> tuple[str, ...]:
        """The names of all senders, in the order of their first message."""
        return tuple(self._sent)

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[Message]:
        return iter(self.messages)

    def __repr__(self) -> str:
        return f"Transcript({len(self)} messages of {len(self._sent)} senders)"

    @classmethod
    def from_jsonl(
        cls, path: str | os.PathLike[str], conversation: str | int | None = None
    ) -> Transcript:
        """Read a conversation from a file of JSON lines.

        A line is one message, `{"sender", "text", "round"?}` or `{"role", "name"?, "content"}` (the
        sender is the name, or else the role; content is a string or a list of text parts), or one
        whole conversation, `{"messages": [...], "id"?}`. Other fields, a turn number among them,
        are ignored. Blank lines are skipped. The file may also be one JSON list of such objects.

        Args:
            path: the file, UTF-8 (a byte order mark is allowed).
            conversation: which conversation to take from a file that holds several: its "id", or
                for one without an id its place in the file, counted from 0.

        Returns:
            The transcript.

        Raises:
            ValueError: with file and line, if a line is no JSON, a field is missing or wrong, the
                file holds no message, or the conversation is not chosen,
                unknown or ambiguous.
            OSError: if the file cannot be read.
        """
        rows = list(_rows(Path(path)))
        if not rows:
            raise ValueError(f"{path} holds no messages: expected one JSON object a line")
        whole = ["messages" in row for _, row in rows]
        if not any(whole):
            if conversation is not None:
                raise ValueError(
                    f"conversation {conversation!r} was asked for, but {path} holds the messages "
                    "of a single conversation; leave it out"
                )
            return cls._from_records(rows, f"{path}:")
        if not all(whole):
            line = rows[whole.index(not whole[0])][0]
            raise ValueError(
                f"{path}:{line}: some lines are whole conversations (with 'messages') and others "
                "are single messages; a file holds one kind"
            )
        line, row = _choose(path, rows, conversation)
        records = row["messages"]
        if not isinstance(records, list) or not records:
            raise ValueError(f"{path}:{line}: 'messages' must be a list of at least one message")
        return cls._from_records(enumerate(records), f"{path}:{line}: message ")

    @classmethod
    def _from_records(cls, records: Iterable[tuple[int, Any]], where: str) -> Transcript:
        transcript = cls()
        for place, record in records:
            try:
                transcript.append(**_message_fields(record))
            except ValueError as error:
                raise ValueError(f"{where}{place}: {error}") from None
        return transcript


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}:{number}: not UTF-8: {error.reason}") from None
    if text.lstrip().startswith("["):
        yield from enumerate(_array(path, text))
        return
    # Not splitlines(): JSON strings may hold U+2028 and its kin unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}:{number}: not JSON: {error.msg} at column {error.colno}; expected one "
                "JSON object a line, or a list of them as the whole file"
            ) from None
        except RecursionError:
            raise ValueError(f"{path}:{number}: the JSON is nested too deeply") from None
        except ValueError as error:  # a number with thousands of digits
            raise ValueError(f"{path}:{number}: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(
                f"{path}:{number}: expected a JSON object, got {type(row).__name__} (one message "
                "or one conversation a line)"
            )
        yield number, row


def _array(path: Path, text: str) -> list[dict[str, Any]]:
    """Read a file that is one JSON list of messages or conversations."""
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}:{error.lineno}: not JSON: {error.msg} at column {error.colno}"
        ) from None
    except RecursionError:
        raise ValueError(f"{path}: the JSON is nested too deeply") from None
    except ValueError as error:  # a number with thousands of digits
        raise ValueError(f"{path}: {error}") from None
    for place, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(
                f"{path}: item {place} of the list is a {type(row).__name__}; expected a message "
                "or a conversation"
            )
    return rows


def _choose(
    path: str | os.PathLike[str],
    rows: Sequence[tuple[int, dict[str, Any]]],
    conversation: str | int | None,
) -> tuple[int, dict[str, Any]]:
    names = [str(row.get("id", place)) for place, (_, row) in enumerate(rows)]
    if conversation is None:
        if len(rows) == 1:
            return rows[0]
        raise ValueError(
            f"{path} holds {len(rows)} conversations; choose one with conversation=: "
            + _listed(names)
        )
    matches = [place for place, name in enumerate(names) if name == str(conversation)]
    if len(matches) > 1:
        lines = ", ".join(str(rows[place][0]) for place in matches)
        raise ValueError(f"conversation {conversation!r} is on several lines of {path}: {lines}")
    if not matches:
        close = difflib.get_close_matches(str(conversation), names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise ValueError(
            f"{path} holds no conversation {conversation!r}{hint} It holds: {_listed(names)}"
        )
    return rows[matches[0]]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _LISTED_IDS
    return ", ".join(names[:_LISTED_IDS]) + (f" and {more} more" if more > 0 else "")


def _message_fields(record: Any) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise ValueError(f"a message must be a JSON object, got {type(record).__name__}")
    if "sender" in record:
        sender_field, text_field = "sender", "text"
        sender = record["sender"]
    elif "role" in record:
        sender_field, text_field = "role", "content"
        sender = record.get("name") or record["role"]
    else:
        raise ValueError(
            "a message needs 'sender' and 'text', or 'role' and 'content'; got the fields "
            + (", ".join(sorted(record)) or "none")
        )
    if text_field not in record:
        raise ValueError(f"a message with {sender_field!r} needs {text_field!r}")
    return {
        "sender": sender,
        "text": _content_text(record[text_field]) if text_field == "content" else record["text"],
        "round": record.get("round"),
    }


def _content_text(content: Any) -> Any:
    if content is None:  # an assistant message that only calls tools
        return ""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise ValueError(f"content parts must be text, got {json.dumps(part)[:80]}")
        texts.append(text)
    return "".join(texts)
