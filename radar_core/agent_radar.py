"""Agent-Radar: what an agent should attend to, from who said what, when, and how far away.

Source: Agent-Radar, arXiv 2605.30136, section 3.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from radar_core.anchors import Anchor
from radar_core.checks import check_has, is_number, is_whole
from radar_core.relevance.dense import Dense, Relevance, cosines
from radar_core.relevance.score import (
    Decay,
    ScoredSentence,
    SelfPolicy,
    choose,
    decayed_cosines,
)
from radar_core.relevance.segmentation import sentence_spans
from radar_core.relevance.selector import Reading, Selector
from radar_core.topology import Topology
from radar_core.transcript import LAST_ROUND, Message, Transcript, check_unicode
from radar_core.writing import write_chat, write_history

__all__ = ["AgentRadar", "Chosen", "Prompt"]

DEFAULT_THRESHOLD = 0.65
_NEAREST = 5
_ROUNDING = 1e-5


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
        selector: what compared the sentences with the query.
    """

    receiver: str
    query: str
    round: int
    candidates: list[ScoredSentence] = field(repr=False)
    threshold: float | None
    top_k: int | None
    query_anchored: bool
    reachable: bool
    selector: Any = field(default=None, repr=False, compare=False)

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
        begins: where each visible message's text begins in the last of `messages`, by its index in
            the transcript.
    """

    messages: list[dict[str, str]]
    anchors: list[Anchor]
    chosen: Chosen
    begins: Mapping[int, int] = field(default_factory=dict, repr=False)

    @functools.cached_property
    def others(self) -> list[Anchor]:
        """Spans of the sentences that were not chosen, in the prompt's order.

        Those that follow each other in a message are one; there are none where nothing was chosen.
        """
        places = []
        runs = groupby(self.chosen.candidates, key=lambda item: (item.message_index, item.selected))
        for (index, selected), run in runs if len(self.chosen) else ():
            if not selected:
                sentences, begin = list(run), self.begins[index]
                span = begin + sentences[0].start, begin + sentences[-1].end
                places.append(Anchor(len(self.messages) - 1, *span))
        return places


class AgentRadar:
    """Chooses the sentences of a multi-agent conversation that a receiver should attend to.

    A sentence is chosen if `similarity(sentence, query) * spatial_decay ** (hops - 1) *
    temporal_decay ** (round now - round then - 1)` reaches the threshold. Nothing is cut from the
    conversation.

    Args:
        topology: who talks to whom.
        encoder: a `Relevance`, or what one is made of, for a `Dense` selector; None is
            all-MiniLM-L6-v2.
        selector: what compares sentences with the query, such as `Dense`, `Lexical` or `Combined`;
            None is `Dense(encoder)`, whose similarities are cosines. Similarities of other
            selectors have other scales, and other thresholds suit them.
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
        ValueError: if a value is out of range, or both an encoder and a selector are given.
    """

    def __init__(
        self,
        topology: Topology,
        encoder: Any = None,
        *,
        selector: Selector | None = None,
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
        if threshold is not None and not (is_number(threshold) and -1 <= threshold <= 1):
            raise ValueError(f"threshold must lie between -1 and 1, got {threshold!r}")
        if top_k is not None and (not is_whole(top_k) or top_k < 1):
            raise ValueError(f"top_k must be a whole number of at least 1, got {top_k!r}")
        self.topology = topology
        self.selector = _selector(encoder, selector)
        self.decay = Decay(spatial_decay, temporal_decay, self_policy)
        self.threshold = DEFAULT_THRESHOLD if threshold is None and top_k is None else threshold
        self.top_k = top_k
        self.anchor_query = anchor_query
        self._transcript = Transcript()
        self._cut: dict[int, list[ScoredSentence]] = {}

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
            selector=Dense(encoder),
            spatial_decay=0.92,
            temporal_decay=0.92,
            threshold=0.65,
            anchor_query=True,
            self_policy="clamp",
        )

    def __repr__(self) -> str:
        return f"AgentRadar({self.topology!r}, {len(self._transcript)} messages observed)"

    @property
    def relevance(self) -> Relevance | None:
        """The embeddings of a dense selector; None with any other."""
        return self.selector.relevance if isinstance(self.selector, Dense) else None

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
            ValueError: if the receiver is unknown, a value is unusable, or the selector returns
                anything else than one similarity a sentence, finite and at most 1 in size.
        """
        return self._choose(receiver, query, round, None)[1]

    def prompt(
        self, *, receiver: str, query: str, round: int | None = None, system: str | None = None
    ) -> Prompt:
        """Write the receiver's prompt, with anchors in it.

        One user message holds every visible message in full, as blocks headed by sender and round
        (a blank message is its head alone), and the query after them; before the first message it
        holds the query alone.

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
        layout, chosen = self._choose(receiver, query, round, system)
        anchors = [layout.place(item) for item in chosen.sentences]
        expected = [item.text for item in chosen.sentences]
        if self.anchor_query:
            anchors.append(layout.query_place)
            expected.append(query)
        content = layout.messages[-1]["content"]
        for anchor, text in zip(anchors, expected, strict=True):
            assert content[anchor.start : anchor.end] == text, (anchor, text)
        return Prompt(layout.messages, anchors, chosen, layout.begins)

    def _check(self, receiver: str, query: str, round: int | None) -> tuple[dict[str, int], int]:
        hops = self.topology.hops_to(receiver)
        if not isinstance(query, str) or not query.strip():
            raise ValueError(f"query must be a str that is not blank, got {query!r}")
        check_unicode("query", query)
        if round is None:
            return hops, 1 + max((message.round for message in self._transcript), default=-1)
        if not is_whole(round) or round < 0:
            raise ValueError(f"round must be a whole number >= 0 or None, got {round!r}")
        if round > LAST_ROUND + 1:
            raise ValueError(f"round must be at most {LAST_ROUND + 1}, a larger one was given")
        return hops, round

    def _choose(
        self, receiver: str, query: str, round: int | None, system: str | None
    ) -> tuple[_Layout, Chosen]:
        hops, now = self._check(receiver, query, round)
        visible = [
            (index, message)
            for index, message in enumerate(self._transcript)
            if hops[message.sender] >= 0 and message.round <= now
        ]
        layout = _lay_out(visible, receiver, query, system)
        chosen = Chosen(
            receiver,
            query,
            now,
            self._candidates(visible, layout, query, hops, now),
            self.threshold,
            self.top_k,
            self.anchor_query,
            any(distance > 0 for distance in hops.values()),
            self.selector,
        )
        return layout, chosen

    def _candidates(
        self,
        visible: list[tuple[int, Message]],
        layout: _Layout,
        query: str,
        hops: dict[str, int],
        now: int,
    ) -> list[ScoredSentence]:
        sentences: list[ScoredSentence] = []
        spatial: list[float] = []
        temporal: list[float] = []
        for index, message in visible:
            factors = self.decay.factors(hops[message.sender], message.round, now)
            if factors is not None:
                found = self._sentences(index, message)
                sentences += found
                spatial += [factors[0]] * len(found)
                temporal += [factors[1]] * len(found)
        if not sentences:
            return []
        reading = Reading(
            sentences,
            query,
            layout.messages,
            _Places(layout, sentences),
            layout.query_place,
            [sentence.sender for sentence in sentences],
        )
        if isinstance(self.selector, Dense):
            embeddings, asked = self.selector.embed(reading)
            similarities = cosines(embeddings, asked)
            scores = decayed_cosines(sentences, embeddings, asked, hops, now, self.decay)
        else:
            similarities = _checked(self.selector.similarities(reading), self.selector, reading)
            scores = similarities * np.array(spatial) * np.array(temporal)
        selected, lacked = choose(scores, self.threshold, self.top_k)
        rows = zip(
            sentences,
            similarities.tolist(),
            spatial,
            temporal,
            scores.tolist(),
            selected.tolist(),
            lacked.tolist(),
            strict=True,
        )
        return [
            ScoredSentence(
                item.text, item.sender, item.round, item.message_index, item.start, item.end, *row
            )
            for item, *row in rows
        ]

    def _sentences(self, index: int, message: Message) -> list[ScoredSentence]:
        """Cut a message into sentences, once in the life of this object."""
        if index not in self._cut:
            text = message.text
            self._cut[index] = [
                ScoredSentence(text[start:end], message.sender, message.round, index, start, end)
                for start, end in sentence_spans(text, getattr(self.selector, "language", "en"))
            ]
        return self._cut[index]


@dataclass(frozen=True)
class _Layout:
    """A receiver's prompt, before anything in it is chosen.

    Args:
        messages: the chat messages; the last one holds the conversation and the query.
        begins: where each visible message's text begins in it, by the message's index.
        query_place: where the query lies.
    """

    messages: list[dict[str, str]]
    begins: dict[int, int]
    query_place: Anchor

    def place(self, sentence: ScoredSentence) -> Anchor:
        """Return where a sentence lies."""
        begin = self.begins[sentence.message_index]
        return Anchor(len(self.messages) - 1, begin + sentence.start, begin + sentence.end)


class _Places(Sequence[Anchor]):
    """Where sentences lie in a prompt, each found when asked for: most selectors never ask."""

    def __init__(self, layout: _Layout, sentences: list[ScoredSentence]) -> None:
        self._layout = layout
        self._sentences = sentences

    def __len__(self) -> int:
        return len(self._sentences)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._layout.place(sentence) for sentence in self._sentences[index]]
        return self._layout.place(self._sentences[index])


def _lay_out(
    visible: list[tuple[int, Message]], receiver: str, query: str, system: str | None
) -> _Layout:
    history, begins = write_history(visible, receiver)
    messages = write_chat(history, receiver, query, system)
    last = len(messages) - 1
    length = len(messages[last]["content"])
    place = Anchor(last, length - len(query), length)
    return _Layout(messages, begins, place)


def _selector(encoder: Any, selector: Selector | None) -> Selector:
    if selector is None:
        return Dense(encoder)
    if encoder is not None:
        raise ValueError(
            "give an encoder or a selector, not both; an encoder goes into the selector, as in "
            "selector=Dense(encoder)"
        )
    check_has("selector", selector, "similarities", "Dense(encoder) or Lexical()")
    return selector


def _checked(similarities: Any, selector: Selector, reading: Reading) -> np.ndarray:
    found = np.asarray(similarities, dtype=np.float32)
    count = len(reading.sentences)
    if found.shape != (count,) or not (np.abs(found) <= 1 + _ROUNDING).all():
        raise ValueError(
            f"{selector!r} must return one similarity a sentence, {count} numbers from -1 to 1, "
            f"got shape {found.shape}"
            + (f" from {found.min()} to {found.max()}" if found.size else "")
        )
    return np.clip(found, -1, 1)


def _best_first(sentences: list[ScoredSentence]) -> list[ScoredSentence]:
    return sorted(sentences, key=lambda item: -item.score)
