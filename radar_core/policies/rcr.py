"""RCR-Router: each role is shown the part of a shared memory that fits its token budget.

Source: RCR-Router, arXiv 2508.04903. No code of it is public and the text leaves the scorer's
weights, the budgets and the rules of the memory open; what stands here for them is Radar's own
completion and marked so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from radar_core.anchors import Anchor
from radar_core.checks import check_whole, is_number
from radar_core.methods import Method
from radar_core.policies.copying import Rebuilt
from radar_core.policies.memory import Kind, MemoryItem, Piece, cut, remember
from radar_core.policies.policy import Ask, Context, Turn
from radar_core.policies.routing import choose, words_of
from radar_core.policies.tokens import token_counter
from radar_core.policies.writing import audible, write_turn
from radar_core.relevance import Relevance
from radar_core.threads import in_thread
from radar_core.transcript import Transcript
from radar_core.writing import write_history

__all__ = ["Importance", "RCRRouter", "RoleProfile", "Routed"]

logger = logging.getLogger("radar_core")

_LEAST_BUDGET = 16  # one character and its line feeds, in any tokenizer
_KEYWORD_SHARE, _MOST_KEYWORDS = 0.1, 0.5
_REMEMBERED = 4096


@dataclass(frozen=True)
class Importance:
    """Weights of the terms that make an item's importance; Radar's choice, the paper has none.

    `semantic * cosine(item, role and task) + role * role term + stage * stage term +
    recency * gamma ** (round now - round then)`

    The role term is 1 if the receiver's role works with items of this kind or the item's writer has
    the same role, and 0.1 more for each of the role's keywords in it, at most 0.5 more. The stage
    term is 1 if the item belongs to the turn's stage, 0.5 if that stage works with its kind, else
    0. Weights of 0 except for `recency` give the paper's "w/o IS" arm.

    Args:
        semantic: weight of the cosine; 0 embeds nothing.
        role: weight of the role term.
        stage: weight of the stage term.
        recency: weight of the recency term.
        gamma: factor on recency a round, in (0, 1].

    Raises:
        ValueError: if a value is out of range.
    """

    semantic: float = 1.0
    role: float = 0.6
    stage: float = 0.4
    recency: float = 0.3
    gamma: float = 0.9

    def __post_init__(self) -> None:
        for name in ("semantic", "role", "stage", "recency"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")
        if not is_number(self.gamma) or not 0 < self.gamma <= 1:
            raise ValueError(f"gamma must lie in (0, 1], got {self.gamma!r}")


@dataclass(frozen=True)
class RoleProfile:
    """What a role is given.

    Args:
        budget: tokens beyond the base budget.
        kinds: kinds of items that it works with.
        keywords: words that mark what matters to it, besides the words of its own name or
            description.

    Raises:
        ValueError: if the budget is no whole number >= 0.
    """

    budget: int
    kinds: tuple[Kind, ...] = ()
    keywords: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_whole("budget", self.budget, 0)


ROLES: Mapping[str, RoleProfile] = {
    "planner": RoleProfile(1536, ("plan",)),
    "searcher": RoleProfile(1024, ("evidence", "fact")),
    "recommender": RoleProfile(1280, ("answer", "evidence")),
}
"""The paper's three roles. The budgets beyond the base of 512 are those of a public
re-implementation; 2,048 in all, for a planner, is the paper's reference."""

STAGES: Mapping[str, tuple[Kind, ...]] = {
    "plan": ("plan", "fact"),
    "search": ("evidence", "fact", "plan"),
    "decide": ("answer", "evidence", "fact"),
}
"""The kinds of items that each stage works with."""


@dataclass(frozen=True)
class Routed:
    """What a receiver is given of the shared memory.

    Args:
        items: the routed items, in the transcript's order.
        text: the items as they are shown when nothing else is.
        tokens: length of `text`; at most `budget`.
        budget: the receiver's.
        memory: every item it could have been given, in the transcript's order.
        scores: the importance of each item of `memory`.
    """

    items: tuple[MemoryItem, ...]
    text: str
    tokens: int
    budget: int
    memory: tuple[MemoryItem, ...] = field(repr=False)
    scores: tuple[float, ...] = field(repr=False)


@dataclass(frozen=True, eq=False)
class RCRRouter(Rebuilt):
    """Routes to each agent the items of the shared memory that matter most to its role.

    The memory is folded from the transcript anew for every turn: what the receiver can have heard
    (its own messages and those of agents that reach it) is cut into items, and later items replace
    earlier ones about the same (`radar_core.policies.memory`), which is the paper's iterative
    feedback M_t -> route -> agents -> M_{t+1}; the discussion's rounds are its T. Items are taken
    by importance (of equals the newer round, then the earlier in the transcript) while they fit
    the budget; what does not fit, or says what a taken one says, is passed over. If the most
    important item is larger than the whole budget, its beginning fills it.

    Args:
        encoder: a `Relevance`, or what one is made of; None is all-MiniLM-L6-v2.
        hard: True shows the routed items only, as the paper does; False shows the whole
            conversation and anchors the same items in it.
        method: the steering method when not `hard`; None leaves it to the model's own.
        anchor_query: whether the query is an anchor too when not `hard`.
        importance: the weights of the score.
        base_budget: tokens that every role has.
        roles: what each role has; the first whose name is in an agent's role counts.
        default_role: what agents of other roles have, or of none.
        stages: kinds of items that each stage works with.
        item_tokens: the most tokens of an item that is made of several sentences.
        near_duplicate: what share of all their three-word sequences two items must have in common
            to say the same, in (0, 1].
        tokenizer: anything with `encode(text)`, such as the model's tokenizer; None estimates a
            token for every four bytes.

    Raises:
        ValueError: if a value is out of range.

    Formula: the routed set is the greedy answer to `max sum importance(m)` over sets of items with
    `sum tokens(m) <= base_budget + role budget`; headings of items count too.
    """

    encoder: Any = None
    hard: bool = field(default=True, kw_only=True)
    method: Method | None = field(default=None, kw_only=True)
    anchor_query: bool = field(default=False, kw_only=True)
    importance: Importance = field(default=Importance(), kw_only=True)
    base_budget: int = field(default=512, kw_only=True)
    roles: Mapping[str, RoleProfile] = field(default_factory=lambda: ROLES, kw_only=True)
    default_role: RoleProfile = field(default=RoleProfile(1536), kw_only=True)
    stages: Mapping[str, Sequence[Kind]] = field(default_factory=lambda: STAGES, kw_only=True)
    item_tokens: int = field(default=64, kw_only=True)
    near_duplicate: float = field(default=0.9, kw_only=True)
    tokenizer: Any = field(default=None, kw_only=True, repr=False)
    _count: Callable[[str], int] = field(init=False, repr=False)
    _cut: Callable[[str], tuple[Piece, ...]] = field(init=False, repr=False)
    _unknown_stages: set[str] = field(init=False, repr=False, default_factory=set)

    def __post_init__(self) -> None:
        check_whole("base_budget", self.base_budget, _LEAST_BUDGET)
        check_whole("item_tokens", self.item_tokens, 1)
        if not is_number(self.near_duplicate) or not 0 < self.near_duplicate <= 1:
            raise ValueError(f"near_duplicate must lie in (0, 1], got {self.near_duplicate!r}")
        relevance = self.encoder
        if not isinstance(relevance, Relevance):
            relevance = Relevance(relevance)
        count = token_counter(self.tokenizer)
        cut_text = lru_cache(maxsize=_REMEMBERED)(
            lambda text: cut(text, count, relevance.sentence_spans, self.item_tokens)
        )
        for name, value in (("encoder", relevance), ("_count", count), ("_cut", cut_text)):
            object.__setattr__(self, name, value)

    async def context(self, turn: Turn, ask: Ask) -> Context:
        """Write the receiver's prompt; see `Policy.context`. Routing runs in a thread of its own.

        Raises:
            ValueError: if an agent is not in the topology or a value is unusable.
        """
        turn = replace(turn, transcript=Transcript(turn.transcript))  # it may go on meanwhile
        routed, seconds = await in_thread(self._timed, turn)
        if self.hard:
            opening = "What of the conversation so far matters to you:\n\n" if routed.text else ""
            return Context(write_turn(turn, opening + routed.text), seconds=seconds)
        history, begins = write_history(audible(turn), turn.receiver)
        messages = write_turn(turn, history)
        spans = [
            (begins[index] + start, begins[index] + end)
            for index, start, end in (item.source for item in routed.items)
        ]
        if self.anchor_query:
            length = len(messages[-1]["content"])
            spans.append((length - len(turn.query), length))
        anchors = [Anchor(len(messages) - 1, start, end) for start, end in spans]
        return Context(messages, anchors, self.method, seconds)

    def route(self, turn: Turn) -> Routed:
        """Choose the items for a turn.

        Args:
            turn: whose turn it is and what was said before.

        Returns:
            The items, within the receiver's budget; none only if the memory holds none.

        Raises:
            ValueError: if an agent is not in the topology, or the budget does not hold a single
                character.
        """
        role = turn.roles.get(turn.receiver, "")
        profile = self._profile(role)
        budget = self.base_budget + profile.budget
        memory = remember(audible(turn), turn.roles, self._cut, self._count)
        scores = self._scores(turn, role, profile, memory)
        chosen = choose(memory, scores, budget, self.near_duplicate, turn.receiver, self._count)
        text = "".join(shown.text for shown in chosen)
        items = tuple(shown.item for shown in chosen)
        return Routed(items, text, self._count(text), budget, tuple(memory), tuple(scores))

    def _timed(self, turn: Turn) -> tuple[Routed, float]:
        begun = time.perf_counter()
        routed = self.route(turn)
        return routed, time.perf_counter() - begun

    def _profile(self, role: str) -> RoleProfile:
        words = set(words_of(role))
        return next(
            (profile for name, profile in self.roles.items() if words.issuperset(words_of(name))),
            self.default_role,
        )

    def _scores(
        self, turn: Turn, role: str, profile: RoleProfile, memory: Sequence[MemoryItem]
    ) -> list[float]:
        weights = self.importance
        keywords = {word for word in words_of(role) if len(word) > 3}
        keywords |= {word.casefold() for word in profile.keywords}
        cosines = np.zeros(len(memory), np.float32)
        if memory and weights.semantic:
            need = f"{role}: {turn.task}" if role else turn.task
            embeddings = self.encoder.embed([*(item.text for item in memory), need])
            cosines = embeddings[:-1] @ embeddings[-1]
        return [
            weights.semantic * float(cosine)
            + weights.role * _role_term(item, role, profile, keywords)
            + weights.stage * self._stage_term(item, turn.stage)
            + weights.recency * weights.gamma ** (turn.round - item.round)
            for item, cosine in zip(memory, cosines, strict=True)
        ]

    def _stage_term(self, item: MemoryItem, stage: str | None) -> float:
        if stage is None:
            return 0.0
        if stage not in self.stages and stage not in self._unknown_stages:
            self._unknown_stages.add(stage)
            logger.warning(
                "RCRRouter knows no stage %r (it knows %s), so items are routed without regard to "
                "it; name its kinds with stages= (said once)",
                stage,
                ", ".join(self.stages),
            )
        if item.stage == stage:
            return 1.0
        return 0.5 if item.kind in self.stages.get(stage, ()) else 0.0


def _role_term(item: MemoryItem, role: str, profile: RoleProfile, keywords: set[str]) -> float:
    fits = item.kind in profile.kinds or (bool(role) and item.role.casefold() == role.casefold())
    hits = len(keywords & set(words_of(item.text)))
    return float(fits) + min(_MOST_KEYWORDS, _KEYWORD_SHARE * hits)
