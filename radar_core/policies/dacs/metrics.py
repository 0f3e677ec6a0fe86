"""What an event log says about how well agents were steered: M1, M2, M3 and the user's wait.

Source: DACS, arXiv 2604.07911, section 4. The paper and its code define contamination (M2)
differently; both are here, under names of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from radar_core.policies.dacs.log import Event

__all__ = [
    "Decision",
    "Graded",
    "Metrics",
    "contamination_by_ids",
    "contamination_by_keywords",
    "context_sizes",
    "grade",
    "measure",
    "percentile_95",
    "steering_accuracy",
    "user_latencies",
    "user_waits",
]

Decisions = Mapping[str, Sequence["Decision"]]


@dataclass(frozen=True)
class Decision:
    """A question with what its answer has to contain.

    Args:
        question: what the agent asks.
        keywords: any one of them, in whatever case, makes an answer correct.
    """

    question: str
    keywords: tuple[str, ...]


@dataclass(frozen=True)
class Graded:
    """An answer and what it contains.

    Args:
        agent_id: who was answered.
        decision: the decision point it answers.
        response: the answer.
        correct: whether it contains a keyword of the decision.
        foreign_keywords: keywords of other agents' decisions that it contains.
        foreign_ids: other agents' names that it contains.
    """

    agent_id: str
    decision: Decision
    response: str
    correct: bool
    foreign_keywords: tuple[str, ...]
    foreign_ids: tuple[str, ...]


@dataclass(frozen=True)
class Metrics:
    """The metrics of one run; None where there was nothing to measure.

    Args:
        accuracy: M1, share of answered decisions that are correct.
        decisions: how many decisions were answered.
        contamination_by_keywords: M2 as the paper defines it.
        contamination_by_ids: M2 as its code computes it.
        context_tokens: M3, mean length of the contexts built for requests.
        context_tokens_p95: their 95th percentile.
        user_latency_ms: mean time that answering a message of the user took.
        user_wait_ms: mean time from a message's arrival to its answer.
    """

    accuracy: float | None
    decisions: int
    contamination_by_keywords: float | None
    contamination_by_ids: float | None
    context_tokens: float | None
    context_tokens_p95: int | None
    user_latency_ms: float | None
    user_wait_ms: float | None


def measure(events: Sequence[Event], decisions: Decisions) -> Metrics:
    """Compute all metrics of one run.

    Args:
        events: the run's event log.
        decisions: for each agent its decision points, in the order in which it asks.

    Returns:
        The metrics.
    """
    graded = grade(events, decisions)
    sizes = context_sizes(events)
    return Metrics(
        steering_accuracy(graded),
        len(graded),
        contamination_by_keywords(graded),
        contamination_by_ids(graded),
        _mean(sizes),
        percentile_95(sizes),
        _mean(user_latencies(events)),
        _mean(user_waits(events)),
    )


def grade(events: Sequence[Event], decisions: Decisions) -> list[Graded]:
    """Match answers with decision points and look for keywords in them.

    The first request of an agent is its first decision point, and so on; the answer is the one to
    that request, so that an agent whose urgent request overtook another of its own is graded right.
    Requests without an answer yet, and those beyond an agent's decision points, are left out; the
    default-path text of an abandoned request counts as its answer.

    Args:
        events: the run's event log.
        decisions: for each agent its decision points, in the order in which it asks.

    Returns:
        The graded answers, in the order of the requests.
    """
    answers = {
        event["request_id"]: event["text"]
        for event in events
        if event["event"] == "STEERING_RESPONSE"
    }
    points = {agent_id: iter(points) for agent_id, points in decisions.items()}
    graded = []
    for event in events:
        if event["event"] != "STEERING_REQUEST":
            continue
        agent_id = event["agent_id"]
        decision = next(points.get(agent_id, iter(())), None)
        if decision is not None and event["request_id"] in answers:
            graded.append(_graded(agent_id, decision, answers[event["request_id"]], decisions))
    return graded


def steering_accuracy(graded: Sequence[Graded]) -> float | None:
    """M1: the share of answers that contain a keyword of their own decision.

    Args:
        graded: from `grade`.

    Returns:
        A share, or None if there are no answers.
    """
    return _mean([item.correct for item in graded])


def contamination_by_keywords(graded: Sequence[Graded]) -> float | None:
    """M2 as the paper defines it: the share of answers with a keyword of another agent's decision.

    Args:
        graded: from `grade`.

    Returns:
        A share, or None if there are no answers.
    """
    return _mean([bool(item.foreign_keywords) for item in graded])


def contamination_by_ids(graded: Sequence[Graded]) -> float | None:
    """M2 as the paper's code computes it: the share of answers with another agent's name in them.

    A name counts wherever it occurs, inside a longer word too, and in whatever case.

    Args:
        graded: from `grade`.

    Returns:
        A share, or None if there are no answers.
    """
    return _mean([bool(item.foreign_ids) for item in graded])


def context_sizes(events: Sequence[Event]) -> list[int]:
    """M3: the lengths of the contexts built for requests, in tokens.

    Args:
        events: a run's event log.

    Returns:
        One length for every context built, those for the user left out.
    """
    return [
        event["token_count"]
        for event in events
        if event["event"] == "CONTEXT_BUILT" and event["mode"] != "REGISTRY"
    ]


def percentile_95(values: Sequence[int]) -> int | None:
    """Return sorted[int(0.95 n)] as the published code does, or None of no values."""
    return sorted(values)[int(0.95 * len(values))] if values else None


def user_latencies(events: Sequence[Event]) -> list[float]:
    """How long answering the user took, from entering the USER state to leaving it.

    Args:
        events: a run's event log.

    Returns:
        Milliseconds, one for each time.
    """
    latencies, entered = [], None
    for event in events:
        if event["event"] != "TRANSITION":
            continue
        if entered is not None:
            latencies.append(1000 * (event["seconds"] - entered))
        entered = event["seconds"] if event["to"] == "USER" else None
    return latencies


def user_waits(events: Sequence[Event]) -> list[float]:
    """How long the user waited, from a message's arrival to its answer.

    Args:
        events: a run's event log.

    Returns:
        Milliseconds, one for each message that was answered.
    """
    arrived = {e["message_id"]: e["seconds"] for e in events if e["event"] == "USER_MESSAGE"}
    return [
        1000 * (event["seconds"] - arrived[event["message_id"]])
        for event in events
        if event["event"] == "USER_RESPONSE"
    ]


def _graded(agent_id: str, decision: Decision, response: str, decisions: Decisions) -> Graded:
    others = [name for name in decisions if name != agent_id]
    foreign = [word for name in others for point in decisions[name] for word in point.keywords]
    return Graded(
        agent_id,
        decision,
        response,
        bool(_contained(decision.keywords, response)),
        _contained(foreign, response),
        _contained(others, response),
    )


def _contained(words: Iterable[str], text: str) -> tuple[str, ...]:
    return tuple(word for word in words if word.lower() in text.lower())


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
