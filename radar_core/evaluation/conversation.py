"""A question with its paragraphs as a conversation: each article has an agent that reports it.

The agent that reports an article is named after it, and everybody's messages reach the solver.
"""

from __future__ import annotations

from dataclasses import dataclass

from radar_core.evaluation.items import Question
from radar_core.topology import Topology
from radar_core.transcript import Transcript

__all__ = ["SOLVER", "Reported", "report"]

SOLVER = "solver"
Span = tuple[int, int]


@dataclass(frozen=True)
class Reported:
    """A question as a conversation.

    Args:
        transcript: one message a paragraph, in the data set's order.
        topology: every reporter's messages reach the solver.
        gold: for each message the (start, end) of its supporting sentences.
    """

    transcript: Transcript
    topology: Topology
    gold: tuple[tuple[Span, ...], ...]

    def is_gold(self, message: int, start: int, end: int) -> bool:
        """Whether a span of a message is evidence: more than half of it is supporting."""
        shared = sum(
            max(0, min(end, stop) - max(start, begin)) for begin, stop in self.gold[message]
        )
        return 2 * shared > end - start


def report(question: Question) -> Reported:
    """Turn a question's paragraphs into messages.

    Args:
        question: the question.

    Returns:
        The conversation. A title that occurs twice is one agent that speaks twice.
    """
    transcript = Transcript()
    gold: list[tuple[Span, ...]] = []
    for paragraph in question.paragraphs:
        text = ""
        spans: list[Span] = []
        for index, sentence in enumerate(paragraph.sentences):
            sentence = sentence.strip()
            text += " " * bool(text and sentence)
            if index in paragraph.supporting:
                spans.append((len(text), len(text) + len(sentence)))
            text += sentence
        transcript.append(_name(paragraph.title), text)
        gold.append(tuple(spans))
    reporters = list(transcript.senders)
    edges = [(reporter, SOLVER) for reporter in reporters]
    return Reported(transcript, Topology(edges, [*reporters, SOLVER]), tuple(gold))


def _name(title: str) -> str:
    title = title.strip() or "untitled"
    return f"{title} (article)" if title == SOLVER else title
