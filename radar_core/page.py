"""A conversation as one HTML page: sentences shaded by score, the chosen ones marked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radar_core.agent_radar import Chosen
from radar_core.relevance.score import ScoredSentence
from radar_core.topology import Topology
from radar_core.transcript import Transcript

__all__ = ["PageReply", "render_page", "write_page"]

_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class PageReply:
    """One reply to show beside others.

    Args:
        name: how it came about.
        text: the reply.
        figures: what was measured, by name, in the order to show.
    """

    name: str
    text: str
    figures: Mapping[str, str]


@dataclass(frozen=True)
class _Segment:
    """A piece of a message: a scored sentence, or what lies between sentences."""

    text: str
    sentence: ScoredSentence | None = None
    rank: int = 0


def render_page(
    transcript: Transcript,
    topology: Topology,
    chosen: Chosen,
    *,
    title: str = "Radar",
    notes: Sequence[str] = (),
    replies: Sequence[PageReply] = (),
) -> str:
    """Render a conversation and what was chosen in it.

    Args:
        transcript: the conversation.
        topology: who talks to whom; gives the hops.
        chosen: the selection to show.
        title: heading of the page.
        notes: sentences to print under the heading.
        replies: replies to compare, shown side by side at the end.

    Returns:
        One HTML document that loads nothing from anywhere; all texts are escaped, and control
        characters that HTML does not know are replaced.

    Raises:
        ImportError: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise ImportError(
            'the HTML page needs jinja2; run: pip install "radar-kernels[cli]"'
        ) from error
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    hops = topology.hops_to(chosen.receiver)
    best = max((item.score for item in chosen.candidates), default=0.0)
    ranks = {_key(item): rank for rank, item in enumerate(chosen.sentences, start=1)}
    by_message: dict[int, list[ScoredSentence]] = {}
    for item in chosen.candidates:
        by_message.setdefault(item.message_index, []).append(item)
    page = environment.get_template("page.html").render(
        title=title,
        notes=notes,
        chosen=chosen,
        best=best,
        hops=hops,
        listed=[*chosen.sentences, *chosen.nearest],
        senders=transcript.senders,
        messages=[
            {
                "sender": message.sender,
                "round": message.round,
                "distance": _distance(hops[message.sender], chosen.receiver),
                "segments": list(_segments(message.text, by_message.get(index, []), ranks)),
                "chosen": sum(item.selected for item in by_message.get(index, [])),
            }
            for index, message in enumerate(transcript)
        ],
        replies=replies,
        shade=lambda score: f"{max(score, 0.0) / best:.2f}" if best > 0 else "0",
    )
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", page)


def write_page(path: str | Path, *arguments: Any, **keywords: Any) -> Path:
    """Render a page as :func:`render_page` does and write it.

    Args:
        path: the file to write, UTF-8; its folder must exist.
        *arguments: of :func:`render_page`.
        **keywords: of :func:`render_page`.

    Returns:
        The path.

    Raises:
        OSError: the file cannot be written.
        ImportError: jinja2 is not installed.
    """
    page = render_page(*arguments, **keywords)
    target = Path(path)
    # JSON can hold half of a surrogate pair, which UTF-8 cannot.
    target.write_bytes(page.encode("utf-8", errors="replace"))
    return target


def _key(item: ScoredSentence) -> tuple[int, int]:
    return item.message_index, item.start


def _distance(hops: int, receiver: str) -> str:
    if hops < 0:
        return f"does not reach {receiver}"
    if hops == 0:
        return "own message"
    return f"{hops} hop{'s' * (hops > 1)} away"


def _segments(
    text: str, sentences: Sequence[ScoredSentence], ranks: Mapping[tuple[int, int], int]
) -> list[_Segment]:
    """Cut a message at its sentences, so that the segments join to the text again."""
    segments = []
    place = 0
    for item in sorted(sentences, key=lambda item: item.start):
        if item.start > place:
            segments.append(_Segment(text[place : item.start]))
        segments.append(_Segment(text[item.start : item.end], item, ranks.get(_key(item), 0)))
        place = item.end
    if place < len(text):
        segments.append(_Segment(text[place:]))
    return segments
