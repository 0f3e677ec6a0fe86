"""Agent-Radar as a policy: nothing is cut, what matters is anchored; and its ablations."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any

from radar_core.agent_radar import AgentRadar, Prompt
from radar_core.methods import PASTA, SPA, Method
from radar_core.policies.copying import Rebuilt
from radar_core.policies.policy import Ask, Context, Turn
from radar_core.policies.writing import write_turn
from radar_core.relevance import Relevance
from radar_core.relevance.lexical import Lexical
from radar_core.relevance.score import SelfPolicy
from radar_core.relevance.selector import Selector
from radar_core.threads import in_thread
from radar_core.topology import Topology
from radar_core.transcript import Message, Transcript
from radar_core.writing import write_header

__all__ = ["AgentRadarPolicy"]

_KEPT = 32  # conversations that are gone on with rather than read anew


@dataclass(frozen=True, eq=False)
class AgentRadarPolicy(Rebuilt):
    """Shows the whole conversation and anchors the sentences that matter to the receiver.

    The defaults are Radar's own; `paper` has the paper's. One object serves any number of
    discussions and threads at once: what it remembers are embeddings by text, and conversations,
    which are gone on with only by a transcript that begins with the very same messages.

    Args:
        encoder: a `Relevance`, or what one is made of; None is all-MiniLM-L6-v2.
        selector: compares sentences with the query in the encoder's place; None for the encoder.
        method: the steering method; None leaves it to the model's own.
        spatial_decay: factor per hop beyond the first, in (0, 1]; 1 switches it off.
        temporal_decay: factor per round beyond the last one, in (0, 1]; 1 switches it off.
        threshold: as in `AgentRadar`.
        top_k: as in `AgentRadar`.
        anchor_query: whether the query is an anchor too.
        self_policy: as in `AgentRadar`.
        appended: anchor nothing, but repeat the chosen sentences between the conversation and the
            query, in the conversation's order ("without attention steering" in the paper).

    Raises:
        ValueError: if a value is out of range.
    """

    encoder: Any = None
    selector: Selector | None = field(default=None, kw_only=True)
    method: Method | None = field(default=None, kw_only=True)
    spatial_decay: float = field(default=0.92, kw_only=True)
    temporal_decay: float = field(default=0.92, kw_only=True)
    threshold: float | None = field(default=None, kw_only=True)
    top_k: int | None = field(default=None, kw_only=True)
    anchor_query: bool = field(default=True, kw_only=True)
    self_policy: SelfPolicy = field(default="clamp", kw_only=True)
    appended: bool = field(default=False, kw_only=True)
    _readers: _Readers = field(init=False, repr=False, default_factory=lambda: _Readers())

    def __post_init__(self) -> None:
        if not isinstance(self.encoder, Relevance):  # one, so that what is embedded is shared
            object.__setattr__(self, "encoder", Relevance(self.encoder))
        self._reader(Topology([], ["anybody"]))  # raises for values out of range

    @classmethod
    def paper(cls, encoder: Any = None) -> AgentRadarPolicy:
        """Build one with the settings of the paper, whatever Radar's own defaults become.

        Both decays 0.92, threshold 0.65, the query anchored, SPA with the strength 1.4 of its
        released package (the paper names none).

        Args:
            encoder: a `Relevance`, or what one is made of; None is all-MiniLM-L6-v2, the paper's.

        Returns:
            The policy.
        """
        return cls(
            encoder,
            method=SPA(strength=1.4),
            spatial_decay=0.92,
            temporal_decay=0.92,
            threshold=0.65,
            anchor_query=True,
            self_policy="clamp",
        )

    def ablations(self) -> dict[str, AgentRadarPolicy]:
        """Build the variants of section 4.3 of the paper, each with one thing changed.

        Returns:
            By name: "radar" (itself), "no-spatial-decay", "no-temporal-decay", "no-decay",
            "lexical" (BM25 in place of the encoder, with the same threshold and top_k), "appended"
            (`appended=True`) and "pasta" (`PASTA(0.3)` as the method).
        """
        return {
            "radar": self,
            "no-spatial-decay": replace(self, spatial_decay=1.0),
            "no-temporal-decay": replace(self, temporal_decay=1.0),
            "no-decay": replace(self, spatial_decay=1.0, temporal_decay=1.0),
            "lexical": replace(self, selector=Lexical()),
            "appended": replace(self, appended=True),
            "pasta": replace(self, method=PASTA(0.3)),
        }

    async def context(self, turn: Turn, ask: Ask) -> Context:
        """Write the receiver's prompt; see `Policy.context`. Choosing runs in a thread of its own.

        Raises:
            ValueError: if an agent is not in the topology or a value is unusable.
        """
        said = Transcript(turn.transcript)  # the discussion may go on meanwhile
        return await in_thread(self._context, replace(turn, transcript=said))

    def _context(self, turn: Turn) -> Context:
        begun = time.perf_counter()
        prompt = self._prompt(turn)
        seconds = time.perf_counter() - begun
        if not self.appended:
            selector = prompt.chosen.selector
            return Context(prompt.messages, prompt.anchors, self.method, seconds, selector)
        return Context(_with_chosen_appended(turn, prompt), seconds=seconds)

    def _prompt(self, turn: Turn) -> Prompt:
        messages = turn.transcript.messages
        reader, read = self._readers.take(turn.topology, messages)
        if reader is None:
            reader = self._reader(turn.topology)
        for message in messages[read:]:
            reader.observe(sender=message.sender, text=message.text, round=message.round)
        prompt = reader.prompt(
            receiver=turn.receiver, query=turn.query, round=turn.round, system=turn.system
        )
        self._readers.put(reader, messages)
        return prompt

    def _reader(self, topology: Topology) -> AgentRadar:
        return AgentRadar(
            topology,
            self.encoder if self.selector is None else None,
            selector=self.selector,
            spatial_decay=self.spatial_decay,
            temporal_decay=self.temporal_decay,
            threshold=self.threshold,
            top_k=self.top_k,
            anchor_query=self.anchor_query,
            self_policy=self.self_policy,
        )


class _Readers:
    """Selectors that have read a conversation so far, the one used last at the end.

    Each is in the hands of one turn at a time. One that has read other messages than a transcript
    begins with is never used for it, so that conversations cannot mix.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[tuple[AgentRadar, tuple[Message, ...]]] = []

    def take(
        self, topology: Topology, messages: tuple[Message, ...]
    ) -> tuple[AgentRadar | None, int]:
        """Take the selector that has read most of a conversation, and how many messages it read."""
        with self._lock:
            fitting = [
                place
                for place, (reader, read) in enumerate(self._kept)
                if _same(reader.topology, topology) and messages[: len(read)] == read
            ]
            if not fitting:
                return None, 0
            reader, read = self._kept.pop(max(fitting, key=lambda at: len(self._kept[at][1])))
            return reader, len(read)

    def put(self, reader: AgentRadar, messages: tuple[Message, ...]) -> None:
        with self._lock:
            self._kept = [*self._kept, (reader, messages)][-_KEPT:]


def _same(one: Topology, other: Topology) -> bool:
    return one is other or (one.agents == other.agents and one.edges == other.edges)


def _with_chosen_appended(turn: Turn, prompt: Prompt) -> list[dict[str, str]]:
    without = write_turn(turn, "")[-1]["content"]
    history = prompt.messages[-1]["content"].removesuffix(without)
    chosen = sorted(prompt.chosen.sentences, key=lambda item: (item.message_index, item.start))
    if chosen:
        history += "What of it matters most to your task:\n\n"
    for item in chosen:
        history += f"{write_header(item.sender, item.round, turn.receiver)}{item.text}\n\n"
    return write_turn(turn, history)
