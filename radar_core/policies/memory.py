"""The shared memory of RCR-Router: typed items, cut from messages and corrected by later ones.

Source: RCR-Router, arXiv 2508.04903 (items with role, stage and time; memory update with conflict
resolution). The paper leaves the rules open; all rules here are Radar's own and call no model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from radar_core.transcript import Message

__all__ = ["STRUCTURED_OUTPUT", "Kind", "MemoryItem", "Piece", "cut", "remember"]

Kind = Literal["plan", "fact", "evidence", "answer"]
Key = tuple[Kind, str, str]

STRUCTURED_OUTPUT = (
    "Begin each paragraph with what it is: 'Plan:', 'Fact:', 'Evidence:' or 'Answer:'. If it may "
    "be corrected later, name in brackets what it is about and how sure you are, from 0 to 1, as "
    "in 'Fact [population of Lyon] (0.8): ...'. A later paragraph with the same name replaces it."
)
"""What a role's prompt may ask for, so that kinds, names and confidence need not be guessed."""

STAGES: Mapping[Kind, str] = {
    "plan": "plan",
    "fact": "search",
    "evidence": "search",
    "answer": "decide",
}
"""The stage of the work that each kind of item belongs to."""

CONFIDENCE = 0.7  # of what nobody said how sure they are
MARGIN = 0.1  # how much surer the older of two must be to stay

_LABEL = re.compile(
    r"[-*#>_\s]*+(plan|fact|evidence|answer)\s*+(?:\[([^\]]+)\])?\s*+"
    r"(?:\((0(?:\.\d+)?|1(?:\.0+)?)\))?[*_\s]*+:",
    re.IGNORECASE,
)
_SIGNS: Mapping[Kind, re.Pattern[str]] = {
    "answer": re.compile(r"\\boxed\b|\banswer(?: is|\s{0,2}[:=])|\bI conclude\b", re.IGNORECASE),
    "plan": re.compile(
        r"^\W*+(?:step \d|first|second|then|next|finally)\b|\bsub-?(?:question|quer|task)|\bplan\b"
        r"|\b(?:we|you|I|let us|let's)(?: \w{1,20})? (?:should|must|need to|have to|will)\b",
        re.IGNORECASE,
    ),
    "evidence": re.compile(
        r"[\"“«][^\"”»]{3,400}[\"”»]|https?://|\[\d+\]|\baccording to\b"
        r"|\b(?:article|passage|paragraph|document|source|report|study)\b",
        re.IGNORECASE,
    ),
}


@dataclass(frozen=True)
class MemoryItem:
    """Something that the agents know together.

    Args:
        text: the words of the message, unchanged.
        kind: "plan", "fact", "evidence" or "answer".
        sender: name of the agent that wrote it.
        role: that agent's role; "" for none.
        stage: the stage of the work that its kind belongs to.
        round: the round it was written in.
        tokens: its length.
        source: (index of the message in the transcript, first character, one past the last).
        key: (kind, sender or "", name or ""): a later message's items with the same key replace it;
            None if nothing does.
        confidence: how sure its writer was, 0 to 1.
    """

    text: str
    kind: Kind
    sender: str
    role: str
    stage: str
    round: int
    tokens: int
    source: tuple[int, int, int]
    key: Key | None = None
    confidence: float = CONFIDENCE


@dataclass(frozen=True)
class Piece:
    """A part of a text that makes an item.

    Args:
        start: first character.
        end: one past the last character.
        kind: of the item.
        name: what it is about, if its writer said so.
        own: whether a writer has one thing of this kind, which its next one replaces (an answer, a
            plan), when it gave no name.
        confidence: how sure its writer was.
    """

    start: int
    end: int
    kind: Kind
    name: str | None = None
    own: bool = False
    confidence: float = CONFIDENCE


def cut(
    text: str,
    count: Callable[[str], int],
    sentence_spans: Callable[[str], Sequence[tuple[int, int]]],
    item_tokens: int,
) -> tuple[Piece, ...]:
    """Cut a message into items.

    Items never cross a blank line or a line that begins with a label ("Plan:", "Fact:",
    "Evidence:", "Answer:"; see `STRUCTURED_OUTPUT`). Within these bounds consecutive sentences go
    together while they have at most `item_tokens` tokens; a longer sentence is an item of its own.
    A label gives the kind up to the next blank line or label. Without one an item is an answer if
    it says "answer is", "answer:", "I conclude" or has a \\boxed result; else a plan if it begins
    with a step ("First", "Step 2"), names a plan or sub-question, or says what "we should" do; else
    evidence if it quotes, cites ("according to", [1], a link) or names an article, passage, source
    or the like; else a fact. (English only; other languages need labels to be more than facts.)

    Args:
        text: the message's text.
        count: counts tokens.
        sentence_spans: gives (start, end) of the sentences of a text.
        item_tokens: the most tokens of an item of several sentences.

    Returns:
        The pieces in order, without overlaps; none only for a blank text.
    """
    pieces: list[Piece] = []
    for begin, end, label in _sections(text):
        for start, stop in _grouped(text, begin, end, count, sentence_spans, item_tokens):
            pieces.append(_piece(start, stop, label, text))
    if not pieces and text.strip():  # such as a lone sign, which no sentence is made of
        start = len(text) - len(text.lstrip())
        pieces.append(Piece(start, len(text.rstrip()), "fact"))
    return tuple(pieces)


def remember(
    messages: Iterable[tuple[int, Message]],
    roles: Mapping[str, str],
    cut: Callable[[str], Sequence[Piece]],
    count: Callable[[str], int],
) -> list[MemoryItem]:
    """Fold messages into a shared memory, oldest first.

    Where a message has items with the key of items that the memory holds already, the newer ones
    stay, unless the older ones are surer by more than 0.1. An item's key is its kind with the name
    that its label gives in brackets; without a name, an answer, or a plan that is labelled as one,
    has its writer's name, so that an agent's new answer replaces its old one and nobody else's.

    Args:
        messages: (index in the transcript, message), in order.
        roles: the role of every agent, by name.
        cut: cuts a text into pieces.
        count: counts tokens.

    Returns:
        The items, in the transcript's order.
    """
    memory: list[MemoryItem] = []
    for index, message in messages:
        role = roles.get(message.sender, "")
        new = [_item(index, message, piece, role, count) for piece in cut(message.text)]
        memory = _update(memory, new)
    return memory


def _update(memory: list[MemoryItem], new: list[MemoryItem]) -> list[MemoryItem]:
    surest = _surest(new)
    held = _surest(item for item in memory if item.key in surest)
    refused = {key for key in held if round(held[key] - surest[key], 6) > MARGIN}
    replaced = held.keys() - refused
    return [item for item in memory if item.key not in replaced] + [
        item for item in new if item.key not in refused
    ]


def _surest(items: Iterable[MemoryItem]) -> dict[Key, float]:
    surest: dict[Key, float] = {}
    for item in items:
        if item.key is not None:
            surest[item.key] = max(item.confidence, surest.get(item.key, 0.0))
    return surest


def _item(
    index: int, message: Message, piece: Piece, role: str, count: Callable[[str], int]
) -> MemoryItem:
    text = message.text[piece.start : piece.end]
    key: Key | None = None
    if piece.name is not None:
        key = piece.kind, "", piece.name
    elif piece.own:
        key = piece.kind, message.sender, ""
    return MemoryItem(
        text,
        piece.kind,
        message.sender,
        role,
        STAGES[piece.kind],
        message.round,
        count(text),
        (index, piece.start, piece.end),
        key,
        piece.confidence,
    )


def _sections(text: str) -> Iterator[tuple[int, int, re.Match[str] | None]]:
    """Cut a text at blank lines and in front of labels: (start, end, label)."""
    begin: int | None = None
    label: re.Match[str] | None = None
    position = 0
    for line in text.splitlines(keepends=True):
        found = _LABEL.match(line)
        blank = not line.strip()
        if begin is not None and (found or (blank and not _bare(text[begin:position], label))):
            yield begin, position, label
            begin = None
        if begin is None and not blank:
            begin, label = position, found
        position += len(line)
    if begin is not None:
        yield begin, position, label


def _bare(section: str, label: re.Match[str] | None) -> bool:
    """Whether a section is a label alone, so that what it labels comes after the blank line."""
    return label is not None and section.strip(" \t\r\n*_") == label[0].strip(" \t\r\n*_")


def _grouped(
    text: str,
    begin: int,
    end: int,
    count: Callable[[str], int],
    sentence_spans: Callable[[str], Sequence[tuple[int, int]]],
    item_tokens: int,
) -> list[tuple[int, int]]:
    groups: list[tuple[int, int]] = []
    for start, stop in sentence_spans(text[begin:end]):
        start, stop = begin + start, begin + stop
        if groups and count(text[groups[-1][0] : stop]) <= item_tokens:
            groups[-1] = groups[-1][0], stop
        else:
            groups.append((start, stop))
    return groups


def _piece(start: int, end: int, label: re.Match[str] | None, text: str) -> Piece:
    if label is None:
        kind = _guess(text[start:end])
        return Piece(start, end, kind, own=kind == "answer")
    said = label[1].lower()
    kind = next(kind for kind in get_args(Kind) if kind == said)
    name = " ".join((label[2] or "").casefold().split())
    if name.isdecimal():  # "Evidence [2]" cites
        name = ""
    sure = CONFIDENCE if label[3] is None else float(label[3])
    return Piece(start, end, kind, name or None, kind in ("answer", "plan"), sure)


def _guess(text: str) -> Kind:
    return next((kind for kind, signs in _SIGNS.items() if signs.search(text)), "fact")
