"""Agent-Radar: what an agent should attend to, from who said what, when, and how far away.

Source: Agent-Radar, arXiv 2605.30136, section 3.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from radar_core.anchors import Anchor
from radar_core.relevance import Relevance
from radar_core.relevance.score import (
    Decay,
    ScoredSentence,
    SelfPolicy,
    score_sentences,
    select_sentences,
)
from radar_core.topology import Topology
from radar_core.transcript import LAST_ROUND, Message, Transcript, check_unicode

__all__ = ["AgentRadar", "Chosen", "Prompt"]

DEFAULT_THRESHOLD = 0.65
_NEAREST = 5


@dataclass(frozen=True)
class Chosen:
    """What a receiver should attend to for one query.

    Args:
        receiver: name of the agent that reads.
        query: what it has to do.
        round: its round.
        candidates: every scored sentence, in the transcript's order.
        threshold: least score to be chosen; None for no limit.
        top_k: the most sentences to choose; None for all.
        query_anchored: whether the query is an anchor too.
        reachable: whether any other agent's messages reach the receiver.
    """

    receiver: str
    query: str
    round: int
    candidates: list[ScoredSentence] = field(repr=False)
    threshold: float | None
    top_k: int | None
    query_anchored: bool
    reachable: bool

    @property
    def sentences(self) -> list[ScoredSentence]:
        """The chosen sentences, best first."""
        return _best_first([item for item in self.candidates if item.selected])

    @property
    def nearest(self) -> list[ScoredSentence]:
        """The five best sentences that were not chosen; `lacked` says by how much."""
        return _best_first([item for item in self.candidates if not item.selected])[:_NEAREST]

    @property
    def rule(self) -> str:
        """What it takes to be chosen, in a few words."""
        most = "" if self.top_k is None else f"the best {self.top_k}"
        if self.threshold is None:
            return f"{most or 'all'}, without a threshold"
        return f"{most}{', ' * bool(most)}score at least {self.threshold:g}"

    @property
    def explanation(self) -> str:
        """A sentence or two for a person: what was chosen, or why nothing was."""
        chosen, count = len(self.sentences), len(self.candidates)
        if chosen:
            return (
                f"Chose {chosen} of {count} sentences that reach {self.receiver!r} ({self.rule})."
            )
        only = "only the query is anchored" if self.query_anchored else "nothing is anchored"
        if not self.candidates:
            alone = "" if self.reachable else f"No other agent can reach {self.receiver!r}. "
            return f"{alone}No sentence reaches {self.receiver!r} in round {self.round}, so {only}."
        best = self.nearest[0]
        return (
            f"None of the {count} sentences that reach {self.receiver!r} scores enough "
            f"({self.rule}), so {only}; the nearest scores {best.score:.3f} and lacks "
            f"{best.lacked:.3f}."
        )

    def __iter__(self) -> Iterator[ScoredSentence]:
        return iter(self.sentences)

    def __len__(self) -> int:
        return len(self.sentences)


@dataclass(frozen=True)
class Prompt:
    """Chat messages that hold the whole visible transcript, and what in them to steer towards.

    Args:
        messages: dicts with "role" and "content" for a chat template.
        anchors: spans of the messages' contents: the chosen sentences, best first, then the query.
        chosen: the selection behind the anchors.
    """

    messages: list[dict[str, str]]
    anchors: list[Anchor]
    chosen: Chosen


class AgentRadar:
    """Chooses the sentences of a multi-agent conversation that a receiver should attend to.

    A sentence is chosen if `cosine(sentence, query) * spatial_decay ** (hops - 1) *
    temporal_decay ** (round now - round then - 1)` reaches the threshold. Nothing is cut from the
    conversation.

    Args:
        topology: who talks to whom.
        encoder: a `Relevance`, or what one is made of; None is all-MiniLM-L6-v2.
        spatial_decay: factor per hop beyond the first, in (0, 1].
        temporal_decay: factor per round beyond the last one, in (0, 1].
        threshold: least score, -1 to 1; None is 0.65, the paper's, which often chooses nothing, or
            no limit if top_k is given (`radar_kernels.select_relevant` keeps its limit then).
        top_k: the most sentences to choose, best first; None for all. Alone it drops the
            threshold, so that there is always something to anchor.
        anchor_query: whether the query is an anchor too, as in the paper.
        self_policy: "clamp", "literal" or "exclude", for own and same-round sentences, whose
            exponents are negative; see `Decay`.

    Raises:
        ValueError: if a value is out of range.
    """

    def __init__(
        self,
        topology: Topology,
        encoder: Any = None,
        *,
        spatial_decay: float = 0.92,
        temporal_decay: float = 0.92,
        threshold: float | None = None,
        top_k: int | None = None,
        anchor_query: bool = True,
        self_policy: SelfPolicy = "clamp",
    ) -> None:
        if not isinstance(topology, Topology):
            raise ValueError(
                f"topology must be a Topology, got {type(topology).__name__}; build one with "
                "Topology.complete(names) or Topology.from_edges(pairs)"
            )
        if threshold is not None and not (
            isinstance(threshold, int | float) and -1 <= threshold <= 1
        ):
            raise ValueError(f"threshold must lie between -1 and 1, got {threshold!r}")
        if top_k is not None and (isinstance(top_k, bool) or int(top_k) != top_k or top_k < 1):
            raise ValueError(f"top_k must be a whole number of at least 1, got {top_k!r}")
        self.topology = topology
        self.relevance = encoder if isinstance(encoder, Relevance) else Relevance(encoder)
        self.decay = Decay(spatial_decay, temporal_decay, self_policy)
        self.threshold = DEFAULT_THRESHOLD if threshold is None and top_k is None else threshold
        self.top_k = top_k
        self.anchor_query = anchor_query
        self._transcript = Transcript()
        self._spans: dict[str, list[tuple[int, int]]] = {}

    @classmethod
    def paper(cls, topology: Topology, encoder: Any = None) -> AgentRadar:
        """Build one with the settings of the paper, whatever Radar's own defaults become.

        Both decays 0.92, threshold 0.65, the query anchored. The paper does not say what own and
        same-round sentences count; their exponents are clamped at 0 here.

        Args:
            topology: who talks to whom.
            encoder: a `Relevance`, or what one is made of; None is all-MiniLM-L6-v2, the paper's.

        Returns:
            The selector.
        """
        return cls(
            topology,
            encoder,
            spatial_decay=0.92,
            temporal_decay=0.92,
            threshold=0.65,
            anchor_query=True,
            self_policy="clamp",
        )

    def __repr__(self) -> str:
        return f"AgentRadar({self.topology!r}, {len(self._transcript)} messages observed)"

    @property
    def transcript(self) -> Transcript:
        """A copy of what was observed so far."""
        return copy.deepcopy(self._transcript)

    def observe(self, *, sender: str, text: str, round: int | None = None) -> Message:
        """Add a message to the conversation.

        Args:
            sender: name of the agent that wrote it.
            text: what it wrote.
            round: its round; None as in `Transcript.append`.

        Returns:
            The message.

        Raises:
            ValueError: if the sender is not in the topology or a value is unusable.
        """
        self.topology.check_agent(sender, "sender")
        return self._transcript.append(sender, text, round)

    def select(self, *, receiver: str, query: str, round: int | None = None) -> Chosen:
        """Choose the sentences that matter for a query.

        Only what the receiver can have read counts: messages of agents that reach it and its own,
        up to the given round.

        Args:
            receiver: name of the agent that will answer.
            query: what it has to do; not blank.
            round: its round; None is one after the latest round observed (0 before the first), so
                that nothing of the latest round has decayed.

        Returns:
            The selection. A receiver that nobody reaches or who speaks first, or a query that
            nothing fits, is no error: nothing is chosen then, and `explanation` says why.

        Raises:
            ValueError: if the receiver is unknown or a value is unusable.
        """
        hops, now = self._check(receiver, query, round)
        sentences = [
            ScoredSentence(
                message.text[start:end], message.sender, message.round, index, start, end
            )
            for index, message in self._visible(hops, now)
            for start, end in self._sentence_spans(message.text)
        ]
        candidates: list[ScoredSentence] = []
        if sentences:
            embeddings = self.relevance.embed([*(item.text for item in sentences), query])
            candidates = select_sentences(
                score_sentences(sentences, embeddings[:-1], embeddings[-1], hops, now, self.decay),
                self.threshold,
                self.top_k,
            )
        return Chosen(
            receiver,
            query,
            now,
            candidates,
            self.threshold,
            self.top_k,
            self.anchor_query,
            any(distance > 0 for distance in hops.values()),
        )

    def prompt(
        self, *, receiver: str, query: str, round: int | None = None, system: str | None = None
    ) -> Prompt:
        """Write the receiver's prompt, with the chosen sentences (and the query) as anchors.

        One user message holds every visible message in full, as blocks headed by sender and round,
        and the query after them; before the first message it holds the query alone.

        Args:
            receiver: name of the agent that will answer.
            query: what it has to do; not blank.
            round: as in `select`.
            system: text of a system message in front; None for none.

        Returns:
            The messages and their anchors.

        Raises:
            ValueError: as `select` does, or if `system` is no str.
        """
        if system is not None and not isinstance(system, str):
            raise ValueError(f"system must be a str or None, got {type(system).__name__}")
        chosen = self.select(receiver=receiver, query=query, round=round)
        content = ""
        begins: dict[int, int] = {}
        for index, message in self._visible(self.topology.hops_to(receiver), chosen.round):
            you = " (you)" if message.sender == receiver else ""
            content += f"[{message.sender}{you}, round {message.round}]\n"
            begins[index] = len(content)
            content += f"{message.text}\n\n"
        if content:
            content = (opening := "The conversation so far:\n\n") + content
            begins = {index: begin + len(opening) for index, begin in begins.items()}
        content += f"Your task, {receiver}:\n"
        spans = [
            (begins[item.message_index] + item.start, begins[item.message_index] + item.end)
            for item in chosen.sentences
        ]
        expected = [item.text for item in chosen.sentences]
        if self.anchor_query:
            spans.append((len(content), len(content) + len(query)))
            expected.append(query)
        content += query
        for (start, end), text in zip(spans, expected, strict=True):
            assert content[start:end] == text, (start, end, text)
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": content})
        last = len(messages) - 1
        return Prompt(messages, [Anchor(last, start, end) for start, end in spans], chosen)

    def _check(self, receiver: str, query: str, round: int | None) -> tuple[dict[str, int], int]:
        hops = self.topology.hops_to(receiver)
        if not isinstance(query, str) or not query.strip():
            raise ValueError(f"query must be a str that is not blank, got {query!r}")
        check_unicode("query", query)
        if round is None:
            return hops, 1 + max((message.round for message in self._transcript), default=-1)
        if isinstance(round, bool) or not isinstance(round, int) or round < 0:
            raise ValueError(f"round must be a whole number >= 0 or None, got {round!r}")
        if round > LAST_ROUND + 1:
            raise ValueError(f"round must be at most {LAST_ROUND + 1}, a larger one was given")
        return hops, round

    def _visible(self, hops: dict[str, int], now: int) -> list[tuple[int, Message]]:
        return [
            (index, message)
            for index, message in enumerate(self._transcript)
            if hops[message.sender] >= 0 and message.round <= now
        ]

    def _sentence_spans(self, text: str) -> list[tuple[int, int]]:
        if text not in self._spans:
            self._spans[text] = self.relevance.sentence_spans(text)
        return self._spans[text]


def _best_first(sentences: list[ScoredSentence]) -> list[ScoredSentence]:
    return sorted(sentences, key=lambda item: -item.score)
