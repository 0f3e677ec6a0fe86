"""What agents ask of the orchestrator, what they get, and what it is shown for that."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from radar_core.policies.dacs.log import timestamp
from radar_core.policies.dacs.registry import Urgency
from radar_core.transcript import check_unicode

__all__ = ["Exchange", "FocusContext", "SteeringRequest", "SteeringResponse", "check_text"]


@dataclass(frozen=True)
class SteeringRequest:
    """An agent asks for a decision.

    Args:
        agent_id: who asks.
        question: what it wants to know; about 100 tokens at most by convention.
        relevant_context: what it has found out that the decision depends on; "" for nothing new.
        urgency: HIGH is blocked and may interrupt, MEDIUM waits, LOW waits for all others.
        blocking: whether the agent stands still until it is answered.
        request_id: a name that no other request has; a random one by default.
        timestamp: ISO 8601; now by default.

    Raises:
        ValueError: a text is no str or blank, the urgency is unknown, or it is HIGH and not
            blocking, or that is no bool.
    """

    agent_id: str
    question: str
    relevant_context: str = ""
    urgency: Urgency = Urgency.MEDIUM
    blocking: bool = True
    request_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    timestamp: str = field(default_factory=timestamp)

    def __post_init__(self) -> None:
        for name in ("agent_id", "question", "request_id"):
            check_text(name, getattr(self, name))
        check_text("relevant_context", self.relevant_context, blank=True)
        object.__setattr__(self, "urgency", Urgency(self.urgency))
        if not isinstance(self.blocking, bool):
            raise ValueError(f"blocking is {self.blocking!r}; expected True or False")
        if self.urgency is Urgency.HIGH and not self.blocking:
            raise ValueError(
                "a request of HIGH urgency comes from an agent that is blocked; a request that "
                "does not block is MEDIUM or LOW"
            )


@dataclass(frozen=True)
class SteeringResponse:
    """What the orchestrator decided.

    Args:
        request_id: the request that is answered.
        agent_id: who asked.
        text: the decision, or the default-path text if there is none.
        context_tokens: length of the last prompt it was made from, in tokens.
        mode: "focus", "flat", "fair_flat" or "soft".
        turns: how many model calls the session took.
        abandoned: why there is no decision ("time", "turns", "closed", or the error that the model
            failed with); None if there is one.
        timestamp: ISO 8601; now by default.
    """

    request_id: str
    agent_id: str
    text: str
    context_tokens: int
    mode: str
    turns: int = 1
    abandoned: str | None = None
    timestamp: str = field(default_factory=timestamp)


@dataclass(frozen=True)
class Exchange:
    """A question that was answered.

    Args:
        question: what the agent asked.
        urgency: how urgent it was.
        response: what it was told.
    """

    question: str
    urgency: Urgency
    response: str

    def __post_init__(self) -> None:
        check_text("question", self.question)
        check_text("response", self.response, blank=True)
        object.__setattr__(self, "urgency", Urgency(self.urgency))


@dataclass(frozen=True)
class FocusContext:
    """F(a_i): everything about one agent that a decision for it needs.

    Args:
        agent_id: the agent.
        task: what it does.
        request: what it asks; None if nothing, as for the other agents of a flat context.
        history: what it asked before and was told, oldest first.
        output: its last partial output, for agents whose request brings none.

    Raises:
        ValueError: a text is no str or blank, or the request is another agent's.
    """

    agent_id: str
    task: str
    request: SteeringRequest | None = None
    history: tuple[Exchange, ...] = ()
    output: str = ""

    def __post_init__(self) -> None:
        check_text("agent_id", self.agent_id)
        check_text("task", self.task)
        check_text("output", self.output, blank=True)
        object.__setattr__(self, "history", tuple(self.history))
        if self.request is not None and self.request.agent_id != self.agent_id:
            raise ValueError(
                f"the focus context of {self.agent_id!r} holds a request of "
                f"{self.request.agent_id!r}"
            )

    @property
    def recent_output(self) -> str:
        """What the agent found out last: its request's relevant context, else its output.

        It is shown once. The published implementation shows the same text twice, as recent output
        and as the request's context.
        """
        asked = "" if self.request is None else self.request.relevant_context
        return (asked if asked.strip() else self.output).strip()


def check_text(name: str, value: object, blank: bool = False) -> None:
    """Raise ValueError unless a value is a text that a model can be shown.

    Args:
        name: of the argument.
        value: its value.
        blank: whether it may be blank.
    """
    if not isinstance(value, str) or not (blank or value.strip()):
        raise ValueError(f"{name} is {value!r}; expected a str{' that is not blank' * (not blank)}")
    check_unicode(name, value)
