"""What the orchestrator's model is shown: written by fixed rules, and never over its budget.

Four ways to show a request: `focus` is DACS proper, F(a_i) in full and one line for every other
agent; `flat` shows the focus context of every agent and names the one that asks at the top, the
published baseline; `fair_flat` also repeats the request at the end; `soft` is the flat text again,
with F(a_i) as a span to steer towards.

What does not fit is left out in a fixed order; a context says what it left out (`reductions`).
In focus and for the user, of the agents' lines:

1. full lines;
2. compressed lines: agents that ended are one word, LOW ones their task, MEDIUM ones their status
   and task. Agents of HIGH urgency or that wait for steering are protected: their lines stay full;
3. dropped, the last one registered first within each: ended agents, then LOW, then MEDIUM ones;
4. protected lines shortened to status and task, then dropped: waiting ones, then HIGH ones;
5. a line that says that no agent is shown; then not even that.

F(a_i) comes first and is never cut while it fits the budget alone. (Published, it is never cut at
all: a longer one is an error.) If it does not fit, no other agent is shown, and of it goes, each as
far as needed: the oldest steering history, the beginning of the recent output, the end of the task,
the end of the question. In the flat contexts the other agents lose their steering histories first,
then their outputs, then go altogether, the last one registered first.

The budget counts the text built here, as in the publication: a system prompt, the chat template and
the answer come on top of it.

Source: DACS, arXiv 2604.07911, section 3; the text and everything after its second step are
Radar's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

from radar_core.checks import check_whole, is_whole
from radar_core.policies.dacs.registry import MAX_ID_TOKENS, RegistryEntry, Status, Urgency
from radar_core.policies.dacs.requests import Exchange, FocusContext
from radar_core.policies.dacs.tokens import TokenCounter, largest
from radar_core.policies.tokens import Tokenizer

__all__ = ["MODES", "BuiltContext", "ContextBuilder", "Mode"]

Mode = Literal["focus", "flat", "fair_flat", "soft"]
MODES: tuple[Mode, ...] = get_args(Mode)

_CUT = "…"
_QUESTION_TOKENS = 16  # what the least budget leaves for the question


@dataclass(frozen=True)
class BuiltContext:
    """A context for the orchestrator's model.

    Args:
        text: what the model is shown.
        mode: how it was built: a `Mode`, or "registry" for a message of the user.
        tokens: its length, in the tokenizer's own count.
        focus: the characters (start, end) of F(a_i) in the text; None for a message of the user.
        agents: how many agents it shows, the one in focus not counted.
        history_turns: how many earlier exchanges of the agent in focus it shows.
        reductions: what had to be left out, in order; empty if nothing.
    """

    text: str
    mode: Mode | Literal["registry"]
    tokens: int
    focus: tuple[int, int] | None
    agents: int
    history_turns: int
    reductions: tuple[str, ...] = ()


class ContextBuilder:
    """Builds contexts; the same arguments always give the same text.

    Args:
        tokenizer: the model's own; see `TokenCounter`.
        budget: the most tokens that a context may have. The least that is allowed is the frame of
            an empty request plus 64 tokens, for the agent's name (at most 16, three times) and for
            16 tokens of the question: about 110 with common tokenizers (`minimum_budget`).
        history: how many exchanges of an agent are shown at most, the last ones; K in the paper.

    Raises:
        ValueError: the budget is below the least one, or `history` is negative.
    """

    def __init__(self, tokenizer: Tokenizer, budget: int, history: int = 10) -> None:
        self._counter = TokenCounter(tokenizer)
        self.minimum_budget = self._minimum()
        if not is_whole(budget) or budget < self.minimum_budget:
            raise ValueError(
                f"budget is {budget!r}; expected a whole number of at least {self.minimum_budget} "
                "tokens, which is what a request's frame, a name and the start of a question take"
            )
        check_whole("history", history, 0)
        self.budget = budget
        self.history = history

    def build(
        self,
        mode: Mode,
        agent_id: str,
        contexts: Sequence[FocusContext],
        entries: Sequence[RegistryEntry],
    ) -> BuiltContext:
        """Show an agent's request in any of the modes.

        Args:
            mode: "focus", "flat", "fair_flat" or "soft".
            agent_id: the agent that asks.
            contexts: the focus contexts of all agents; "focus" needs that of the one that asks.
            entries: the registry entries of all agents; the flat modes show none.

        Returns:
            The context, at most `budget` tokens long.

        Raises:
            ValueError: the mode is unknown, or no context has that agent with a request.
        """
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}; expected one of {', '.join(map(repr, MODES))}")
        asking = [context for context in contexts if context.agent_id == agent_id]
        if len(asking) != 1 or asking[0].request is None:
            raise ValueError(f"expected one focus context of {agent_id!r}, with a request")
        if mode == "focus":
            others = [entry for entry in entries if entry.agent_id != agent_id]
            return self._focus(asking[0], others)
        return self._flat(mode, agent_id, contexts)

    def registry(self, entries: Sequence[RegistryEntry], message: str) -> BuiltContext:
        """Show a message of the user with the registry alone.

        Args:
            entries: the registry entries of all agents.
            message: what the user says.

        Returns:
            The context, at most `budget` tokens long.
        """
        tail = f"## Message from the user\n{message.strip()}"
        if self._fits(tail):
            text, shown, reductions = self._with_entries("", "Agents", entries, tail)
            return self._built(text, "registry", None, shown, 0, reductions)
        text = self._counter.beginning(tail, self.budget)
        return self._built(text, "registry", None, 0, 0, ["all agents", "end of the message"])

    def _focus(self, context: FocusContext, others: Sequence[RegistryEntry]) -> BuiltContext:
        whole = self._parts(context, "In focus: agent")
        parts, reductions = self._shrunk(whole, lambda parts: parts.text)
        if parts is None:
            return self._bare(context, "focus", reductions)
        text, shown = parts.text, 0
        if parts == whole:
            text, shown, reductions = self._with_entries(text, "Other agents", others, "")
        elif others:
            reductions = ["all agents", *reductions]
        turns = len(parts.history)
        return self._built(text, "focus", (0, len(parts.text)), shown, turns, reductions)

    def _flat(self, mode: Mode, agent_id: str, contexts: Sequence[FocusContext]) -> BuiltContext:
        whole = [self._parts(context, "Agent") for context in contexts]
        place = next(i for i, parts in enumerate(whole) if parts.agent_id == agent_id)
        fair = mode == "fair_flat"
        stages: list[tuple[str, list[_Parts]]] = [("", whole)]
        for name, less in (
            ("histories of the others", dict(history=())),
            ("outputs of the others", dict(history=(), output="")),
        ):
            others = [replace(parts, **less) for parts in whole]
            stages.append((name, [*others[:place], whole[place], *others[place + 1 :]]))
        reductions: list[str] = []
        before: list[_Parts] = []
        for name, blocks in stages:
            if blocks == before:
                continue  # there was nothing of the kind
            before = blocks
            reductions += [name] * bool(name)
            flat = _FlatText(blocks, place, fair)
            if self._fits(flat.text):
                return self._built_flat(mode, flat, reductions)

        def only(kept: int) -> _FlatText:
            chosen = [i for i in range(len(blocks)) if i != place][:kept]
            chosen = sorted([*chosen, place])
            return _FlatText([blocks[i] for i in chosen], chosen.index(place), fair)

        kept = largest(len(blocks) - 1, lambda kept: self._fits(only(kept).text))
        if kept is not None:
            dropped = f"{len(blocks) - 1 - kept} agents"
            return self._built_flat(mode, only(kept), [*reductions, dropped])
        reductions.append("all agents")
        cut, more = self._shrunk(whole[place], lambda parts: _FlatText([parts], 0, fair).text)
        if cut is None:
            return self._bare(contexts[place], mode, [*reductions, *more])
        return self._built_flat(mode, _FlatText([cut], 0, fair), [*reductions, *more])

    def _with_entries(
        self, before: str, title: str, entries: Sequence[RegistryEntry], after: str
    ) -> tuple[str, int, list[str]]:
        """Add the agents' lines between two texts, as many and as long as the budget allows."""
        dropped_first = sorted(
            range(len(entries)), key=lambda index: (_level(entries[index]), -index)
        )
        protected = sum(_protected(entry) for entry in entries)
        droppable = len(entries) - protected

        def text(write: Callable[[RegistryEntry], str], kept: int) -> str:
            shown = set(dropped_first[len(entries) - kept :])
            lines = [write(entry) for index, entry in enumerate(entries) if index in shown]
            return _joined(before, _section(title, lines, len(entries)), after)

        if self._fits(whole := text(_full_line, len(entries))):
            return whole, len(entries), []
        reductions = ["lines compressed"]
        kept = largest(droppable, lambda kept: self._fits(text(_compressed, protected + kept)))
        if kept is not None:
            reductions += [f"{droppable - kept} agents"] * (kept < droppable)
            return text(_compressed, protected + kept), protected + kept, reductions
        reductions += [f"{droppable} agents"] * bool(droppable) + ["protected lines shortened"]
        kept = largest(protected, lambda kept: self._fits(text(_shortened, kept)))
        if kept is not None:
            reductions += [f"{protected - kept} protected agents"] * (kept < protected)
            return text(_shortened, kept), kept, reductions
        return _joined(before, "", after), 0, ["all agents"]

    def _shrunk(
        self, parts: _Parts, text: Callable[[_Parts], str]
    ) -> tuple[_Parts | None, list[str]]:
        """Take from F(a_i) what does not fit, the least important first; None if nothing fits."""
        steps: list[tuple[str, int, Callable[[_Parts, int], _Parts]]] = [
            (
                "oldest steering history",
                len(parts.history),
                lambda parts, kept: replace(parts, history=_last(parts.history, kept)),
            ),
            (
                "beginning of the recent output",
                len(parts.output),
                lambda parts, kept: replace(parts, output=_ending(parts.output, kept)),
            ),
            (
                "end of the task",
                len(parts.task),
                lambda parts, kept: replace(parts, task=_beginning(parts.task, kept)),
            ),
            (
                "end of the question",
                len(parts.question),
                lambda parts, kept: replace(parts, question=_beginning(parts.question, kept)),
            ),
        ]
        if self._fits(text(parts)):
            return parts, []
        reductions: list[str] = []
        for name, most, cut in steps:
            kept = largest(most, partial(self._fits_cut, text, cut, parts))
            reductions += [name] * bool(most)
            parts = cut(parts, kept or 0)
            if kept is not None:
                return parts, reductions
        return None, reductions

    def _fits_cut(
        self,
        text: Callable[[_Parts], str],
        cut: Callable[[_Parts, int], _Parts],
        parts: _Parts,
        kept: int,
    ) -> bool:
        return self._fits(text(cut(parts, kept)))

    def _bare(self, context: FocusContext, mode: Mode, reductions: list[str]) -> BuiltContext:
        """What is left where not even the frame fits, as with a name far over its limit."""
        assert context.request is not None
        text = self._counter.beginning(context.request.question.strip(), self.budget)
        return self._built(text, mode, (0, len(text)), 0, 0, [*reductions, "the frame"])

    def _built_flat(self, mode: Mode, flat: _FlatText, reductions: Sequence[str]) -> BuiltContext:
        turns = len(flat.blocks[flat.place].history)
        return self._built(flat.text, mode, flat.focus, len(flat.blocks) - 1, turns, reductions)

    def _built(
        self,
        text: str,
        mode: Mode | Literal["registry"],
        focus: tuple[int, int] | None,
        agents: int,
        turns: int,
        reductions: Sequence[str],
    ) -> BuiltContext:
        tokens = self._counter.count(text)
        assert tokens <= self.budget, (tokens, self.budget)
        return BuiltContext(text, mode, tokens, focus, agents, turns, tuple(reductions))

    def _fits(self, text: str) -> bool:
        return self._counter.count(text) <= self.budget

    def _parts(self, context: FocusContext, title: str) -> _Parts:
        request = context.request
        return _Parts(
            title,
            context.agent_id,
            context.task.strip(),
            _last(context.history, self.history),
            context.recent_output,
            None if request is None else request.urgency,
            "" if request is None else request.question.strip(),
        )

    def _minimum(self) -> int:
        empty = _Parts("Agent", "", "", (), "", Urgency.MEDIUM, "")
        frame = _FlatText([empty], 0, fair=True).text
        return self._counter.count(frame) + 3 * MAX_ID_TOKENS + _QUESTION_TOKENS


@dataclass(frozen=True)
class _Parts:
    """A focus context as it is written, perhaps with less than there is."""

    title: str
    agent_id: str
    task: str
    history: tuple[Exchange, ...]
    output: str
    urgency: Urgency | None
    question: str

    @property
    def text(self) -> str:
        lines = [f"## {self.title} {self.agent_id}"]
        if self.task:
            lines.append(f"Task: {self.task}")
        if self.history:
            lines.append("Steering so far:")
        for number, exchange in enumerate(self.history, 1):
            lines.append(f"{number}. Asked [{exchange.urgency}]: {exchange.question.strip()}")
            lines.append(f"   Told: {exchange.response.strip()}")
        if self.output:
            lines.append(f"Recent output:\n{self.output}")
        if self.urgency is None:
            lines.append("Open request: none")
        else:
            lines.append(f"Open request [{self.urgency}]: {self.question}".rstrip())
        return "\n".join(lines)


@dataclass(frozen=True)
class _FlatText:
    """The focus contexts of several agents, one of which asks."""

    blocks: Sequence[_Parts]
    place: int
    fair: bool

    @property
    def text(self) -> str:
        asking = self.blocks[self.place]
        repeated = (
            f"## The request to answer now\nAgent {asking.agent_id} asks [{asking.urgency}]: "
            f"{asking.question}"
        )
        blocks = "\n\n---\n\n".join(block.text for block in self.blocks)
        return _joined(self._head, blocks, repeated.rstrip() if self.fair else "")

    @property
    def focus(self) -> tuple[int, int]:
        before = [*(block.text for block in self.blocks[: self.place]), ""]
        start = len(self._head) + len("\n\n") + len("\n\n---\n\n".join(before))
        return start, start + len(self.blocks[self.place].text)

    @property
    def _head(self) -> str:
        return f"# All agents. Steering is asked for by agent {self.blocks[self.place].agent_id}"


def _level(entry: RegistryEntry) -> int:
    """How long an agent's line is kept: the larger, the longer."""
    if entry.status.ended:
        return 0
    if entry.urgency is Urgency.HIGH:
        return 4
    if entry.status is Status.WAITING_STEERING:
        return 3
    return 1 + entry.urgency.rank


def _protected(entry: RegistryEntry) -> bool:
    return _level(entry) >= 3


def _full_line(entry: RegistryEntry) -> str:
    if entry.status.ended:
        return f"- {entry.agent_id} | {entry.status}"
    last = f" | last: {entry.summary}" * bool(entry.summary)
    return f"- {entry.agent_id} | {entry.status} {entry.urgency} | task: {entry.task}{last}"


def _compressed(entry: RegistryEntry) -> str:
    return _full_line(entry) if _protected(entry) else _shortened(entry)


def _shortened(entry: RegistryEntry) -> str:
    if entry.status.ended:
        return _full_line(entry)
    status = "" if _level(entry) == 1 else f" | {entry.status}"
    return f"- {entry.agent_id}{status} | task: {entry.task}"


def _section(title: str, lines: Sequence[str], agents: int) -> str:
    shown = f" ({len(lines) or 'none'} of {agents} shown)" * (len(lines) < agents)
    return "\n".join([f"## {title}{shown or ': none' * (not agents)}", *lines])


def _joined(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


def _last(history: tuple[Exchange, ...], kept: int) -> tuple[Exchange, ...]:
    return history[len(history) - min(kept, len(history)) :]


def _beginning(text: str, kept: int) -> str:
    return text if kept == len(text) else text[:kept].rstrip() + _CUT * bool(kept)


def _ending(text: str, kept: int) -> str:
    return text if kept == len(text) else _CUT * bool(kept) + text[len(text) - kept :].lstrip()
