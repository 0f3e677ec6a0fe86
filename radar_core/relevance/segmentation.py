"""Cutting messages into sentences without losing a character's place."""

from __future__ import annotations

import re
import sys
import unicodedata
from functools import lru_cache

__all__ = ["sentence_spans"]

_LABEL = re.compile(r"\W*(?:\d+(?:\.\d+)*|[A-Za-z]|[IVX]+)[.):\]]+")
_TITLE = re.compile(r"\b(?:Dr|Mr|Mrs|Ms|Prof|Vol|Fig|Eq|vs)\.$")
_LONGEST = 400  # characters; longer "sentences" that have several lines are code, logs or tables


def sentence_spans(text: str, language: str = "en") -> list[tuple[int, int]]:
    """Cut a text into sentences.

    Boundaries are sentencex's. What it leaves longer than 400 characters (code blocks, tables,
    logs) is cut at line ends too. Blanks around a sentence do not belong to it. Sentences without a
    letter, digit or pictograph (rules, code fences) are dropped. List labels ("1.", "A.", "II.")
    and what ends in a title ("Dr.") go together with what follows in the same paragraph. The
    cuts of the last 1,024 texts are remembered.

    Args:
        text: the text; may be empty.
        language: ISO 639-1 code whose abbreviations and stops apply; unknown ones use general
            rules.

    Returns:
        (start, end) of each sentence in `text`, in order, without overlaps.

    Raises:
        ImportError: if sentencex is not installed.
    """
    return list(_spans(text, language))


# A policy that sees the same conversation again with every turn cuts only what is new.
@lru_cache(maxsize=1024)
def _spans(text: str, language: str) -> tuple[tuple[int, int], ...]:
    try:
        from sentencex import get_sentence_boundaries
    except ImportError as error:
        raise ImportError(
            'cutting text into sentences needs sentencex; run: pip install "radar-kernels[agents]"'
        ) from error
    # One character for one character, so that places stay: sentencex 1.0 panics on blanks outside
    # ASCII between a capital letter and a stop.
    plain = text.translate(_plain_blanks())
    spans: list[tuple[int, int]] = []
    for boundary in get_sentence_boundaries(language, plain):
        span = boundary["start_index"], boundary["end_index"]
        long = span[1] - span[0] > _LONGEST
        spans += _lines(plain, *span) if long else [span]
    sentences: list[tuple[int, int]] = []
    for start, end in spans:
        if not _says_something(text[start:end]):
            continue
        if sentences and _goes_on(text, sentences[-1], start):
            start = sentences.pop()[0]
        sentences.append(_without_blanks(text, start, end))
    return tuple(sentences)


@lru_cache(maxsize=1)
def _plain_blanks() -> dict[int, str]:
    """Map every blank outside ASCII to a space, those that end a line to a line feed."""
    blanks = (chr(code) for code in range(sys.maxunicode + 1) if chr(code).isspace())
    table = {ord(blank): " " for blank in blanks if blank not in " \t\n\r"}
    return table | {ord(blank): "\n" for blank in "\v\f\x85\u2028\u2029"}


def _goes_on(text: str, sentence: tuple[int, int], following: int) -> bool:
    """Whether a "sentence" says nothing without the one that starts at `following`."""
    start, end = sentence
    same_paragraph = text.count("\n", end, following) < 2
    return same_paragraph and (
        _LABEL.fullmatch(text, start, end) is not None or _TITLE.search(text[start:end]) is not None
    )


def _says_something(text: str) -> bool:
    # "So" are other symbols: an emoji can be the whole answer.
    return any(character.isalnum() or unicodedata.category(character) == "So" for character in text)


def _lines(text: str, start: int, end: int) -> list[tuple[int, int]]:
    return [match.span() for match in re.compile(r"[^\n]+").finditer(text, start, end)]


def _without_blanks(text: str, start: int, end: int) -> tuple[int, int]:
    sentence = text[start:end]
    lead = len(sentence) - len(sentence.lstrip())
    return start + lead, start + len(sentence.rstrip())
