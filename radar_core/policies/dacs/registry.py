"""The registry R: one short entry for every agent, which is all that the orchestrator always sees.

Source: DACS, arXiv 2604.07911, section 3.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from radar_core.policies.dacs.log import EventLog, timestamp
from radar_core.policies.dacs.tokens import TokenCounter
from radar_core.policies.tokens import Tokenizer
from radar_core.transcript import check_unicode

__all__ = [
    "MAX_ID_TOKENS",
    "MAX_SUMMARY_TOKENS",
    "MAX_TASK_TOKENS",
    "Registry",
    "RegistryEntry",
    "Status",
    "Urgency",
]

logger = logging.getLogger("radar_core")

MAX_TASK_TOKENS = 50
MAX_SUMMARY_TOKENS = 100
MAX_ID_TOKENS = 16  # so that an entry stays under 200 tokens and a context's frame under its budget


class _OneOf(StrEnum):
    """Names, of which an unknown one is refused by naming all of them."""

    @classmethod
    def _missing_(cls, value: object) -> Self:
        known = ", ".join(cls)
        raise ValueError(f"{cls.__name__.lower()} is {value!r}; expected one of {known}")


class Status(_OneOf):
    """What an agent is doing."""

    RUNNING = "RUNNING"
    BLOCKED = "BLOCKED"
    WAITING_STEERING = "WAITING_STEERING"
    COMPLETE = "COMPLETE"
    FAILED = "FAILED"

    @property
    def ended(self) -> bool:
        """Whether the agent does nothing any more."""
        return self in (Status.COMPLETE, Status.FAILED)


class Urgency(_OneOf):
    """How much an agent needs an answer.

    HIGH is blocked and may interrupt another agent's focus session; MEDIUM waits its turn; LOW is
    answered when nothing more urgent waits.
    """

    LOW = "LOW"
    MEDIUM = "MEDIUM"
    HIGH = "HIGH"

    @property
    def rank(self) -> int:
        """0 for LOW, 1 for MEDIUM, 2 for HIGH."""
        return (Urgency.LOW, Urgency.MEDIUM, Urgency.HIGH).index(self)


@dataclass(frozen=True)
class RegistryEntry:
    """What the orchestrator always knows about an agent.

    Args:
        agent_id: the agent's name, at most 16 tokens.
        task: what it does, one line of at most 50 tokens; never changes.
        status: what it is doing.
        summary: its last output in one line of at most 100 tokens; "" before the first.
        urgency: of its last heartbeat or of its most urgent request.
        pending: whether a request of it has left the queue and is not answered yet.
        last_updated: ISO 8601 in UTC with milliseconds.
    """

    agent_id: str
    task: str
    status: Status = Status.RUNNING
    summary: str = ""
    urgency: Urgency = Urgency.LOW
    pending: bool = False
    last_updated: str = ""


class Registry:
    """The entries of all agents, in the order in which they registered.

    Texts become one line each: runs of blanks and line ends turn into single spaces, so that no
    agent's text can look like another agent's line.

    Args:
        tokenizer: the model's own; see `TokenCounter`.
        log: gets REGISTRY_UPDATE and REGISTRY_TRUNCATION events; None for none.
    """

    def __init__(self, tokenizer: Tokenizer, log: EventLog | None = None) -> None:
        self._counter = TokenCounter(tokenizer)
        self._log = log
        self._entries: dict[str, RegistryEntry] = {}

    def __contains__(self, agent_id: object) -> bool:
        return agent_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> tuple[RegistryEntry, ...]:
        """All entries, in the order of registration."""
        return tuple(self._entries.values())

    def entry(self, agent_id: str) -> RegistryEntry:
        """Return an agent's entry.

        Args:
            agent_id: the agent's name.

        Returns:
            Its entry.

        Raises:
            ValueError: no such agent is registered.
        """
        if agent_id not in self._entries:
            known = ", ".join(map(repr, self._entries)) or "none"
            raise ValueError(f"no agent {agent_id!r} is registered; registered are: {known}")
        return self._entries[agent_id]

    def others(self, agent_id: str) -> tuple[RegistryEntry, ...]:
        """Return R without an agent's own entry, in the order of registration."""
        self.entry(agent_id)
        return tuple(entry for entry in self.entries if entry.agent_id != agent_id)

    def register(self, agent_id: str, task: str) -> RegistryEntry:
        """Add an agent, running, with low urgency.

        Args:
            agent_id: its name: one line without blanks around it, at most 16 tokens, not yet taken.
            task: what it does; at most 50 tokens.

        Returns:
            Its entry.

        Raises:
            ValueError: a text is no str, blank, or over its limit (a task is never cut: it is what
                every decision is about), or the name is taken.
        """
        if agent_id in self._entries:
            raise ValueError(f"agent {agent_id!r} is registered already")
        if not isinstance(agent_id, str) or not agent_id or _one_line(agent_id) != agent_id:
            raise ValueError(
                f"agent_id is {agent_id!r}; expected a name in one line, without blanks around it"
            )
        if not isinstance(task, str) or not task.strip():
            raise ValueError(f"the task of {agent_id!r} is {task!r}; expected a text")
        check_unicode("task", task)
        task = _one_line(task)
        self._check_limit("agent_id", agent_id, MAX_ID_TOKENS)
        self._check_limit(f"the task of {agent_id!r}", task, MAX_TASK_TOKENS)
        return self._store(RegistryEntry(agent_id, task))

    def update(
        self,
        agent_id: str,
        *,
        status: Status | str | None = None,
        summary: str | None = None,
        urgency: Urgency | str | None = None,
        pending: bool | None = None,
    ) -> RegistryEntry:
        """Take in what is new about an agent.

        Args:
            agent_id: its name.
            status: what it is doing now; None leaves it as it was, as everywhere here.
            summary: its last output; what exceeds 100 tokens is cut at the end, which is logged as
                REGISTRY_TRUNCATION.
            urgency: how much it needs an answer.
            pending: whether one of its requests is being answered.

        Returns:
            The new entry.

        Raises:
            ValueError: the agent is unknown or a value is none of its kind.
        """
        entry = self.entry(agent_id)
        if status is not None:
            entry = replace(entry, status=Status(status))
        if summary is not None:
            entry = replace(entry, summary=self._shortened(agent_id, summary))
        if urgency is not None:
            entry = replace(entry, urgency=Urgency(urgency))
        if pending is not None:
            entry = replace(entry, pending=pending)
        return self._store(entry)

    def _shortened(self, agent_id: str, summary: str) -> str:
        if not isinstance(summary, str):
            raise ValueError(f"the summary of {agent_id!r} is {summary!r}; expected a str")
        check_unicode("summary", summary)
        summary = _one_line(summary)
        tokens = self._counter.count(summary)
        if tokens <= MAX_SUMMARY_TOKENS:
            return summary
        shorter = self._counter.beginning(summary, MAX_SUMMARY_TOKENS)
        kept = self._counter.count(shorter)
        logger.info("the summary of %r had %d tokens; %d were kept", agent_id, tokens, kept)
        if self._log is not None:
            self._log.write(
                "REGISTRY_TRUNCATION", agent_id=agent_id, original_tokens=tokens, kept_tokens=kept
            )
        return shorter

    def _check_limit(self, name: str, text: str, limit: int) -> None:
        check_unicode(name, text)
        tokens = self._counter.count(text)
        if tokens > limit:
            raise ValueError(f"{name} has {tokens} tokens; at most {limit} are allowed: shorten it")

    def _store(self, entry: RegistryEntry) -> RegistryEntry:
        entry = replace(entry, last_updated=timestamp())
        self._entries[entry.agent_id] = entry
        if self._log is not None:
            self._log.write(
                "REGISTRY_UPDATE",
                agent_id=entry.agent_id,
                status=entry.status,
                urgency=entry.urgency,
                summary=entry.summary,
                pending=entry.pending,
            )
        return entry


def _one_line(text: str) -> str:
    return " ".join(text.split())
