"""The metrics of a log, counted by hand, and the published size model."""

import json

import pytest

from radar_core.policies.dacs.log import EventLog
from radar_core.policies.dacs.metrics import (
    Decision,
    grade,
    measure,
    percentile_95,
    user_latencies,
    user_waits,
)


def events(*answers):
    log = EventLog()
    for number, (agent, text, tokens) in enumerate(answers):
        about = {"agent_id": agent, "request_id": str(number)}
        log.write("STEERING_REQUEST", **about)
        log.write("CONTEXT_BUILT", **about, mode="FOCUS", token_count=tokens)
        log.write("STEERING_RESPONSE", **about, text=text)
    log.write("CONTEXT_BUILT", mode="REGISTRY", token_count=10_000)
    return json.loads(json.dumps(log.events))


def test_metrics_counted_by_hand():
    decisions = {
        "oven": (Decision("Heat?", ("200", "two hundred")), Decision("Rack?", ("middle",))),
        "cellar": (Decision("Wine?", ("riesling",)),),
    }
    log = events(
        ("oven", "Two hundred degrees.", 100),
        ("oven", "The top one, with Riesling.", 200),
        ("cellar", "Take Riesling from the cellar, not the OVEN.", 600),
        ("cellar", "A request beyond the script.", 300),
    )
    graded = grade(log, decisions)
    assert [item.correct for item in graded] == [True, False, True]
    assert [item.foreign_keywords for item in graded] == [(), ("riesling",), ()]
    assert [item.foreign_ids for item in graded] == [(), (), ("oven",)]
    found = measure(log, decisions)
    assert (found.accuracy, found.decisions) == (pytest.approx(2 / 3), 3)
    # The two definitions of contamination disagree on which answers are contaminated.
    assert found.contamination_by_keywords == found.contamination_by_ids == pytest.approx(1 / 3)
    assert (found.context_tokens, found.context_tokens_p95) == (300, 600)
    assert percentile_95(list(range(100))) == 95 and percentile_95([]) is None
    assert measure([], decisions).accuracy is None


def test_requests_are_graded_in_the_order_in_which_they_were_asked():
    """An urgent second question that was answered first is still the second decision point."""
    log = EventLog()
    for request_id in ("first", "second"):
        log.write("STEERING_REQUEST", agent_id="oven", request_id=request_id)
    for request_id, text in (("second", "middle"), ("first", "200")):
        log.write("STEERING_RESPONSE", agent_id="oven", request_id=request_id, text=text)
    decisions = {"oven": (Decision("Heat?", ("200",)), Decision("Rack?", ("middle",)))}
    assert [item.correct for item in grade(log.events, decisions)] == [True, True]


def test_requests_without_an_answer_are_left_out():
    log = EventLog()
    log.write("STEERING_REQUEST", agent_id="oven", request_id="first")
    assert grade(log.events, {"oven": (Decision("Heat?", ("200",)),)}) == []


def test_the_users_latency_is_the_time_in_state_and_the_wait_all_of_it():
    moments = [
        ("USER_MESSAGE", 1.0, dict(message_id="user-1")),
        ("TRANSITION", 3.0, dict(to="USER")),
        ("USER_RESPONSE", 3.5, dict(message_id="user-1")),
        ("TRANSITION", 3.5, dict(to="REGISTRY")),
        ("TRANSITION", 5.0, dict(to="FOCUS")),
        ("USER_MESSAGE", 6.0, dict(message_id="user-2")),
    ]
    events = [dict(event=kind, seconds=seconds, **more) for kind, seconds, more in moments]
    assert user_latencies(events) == [500]
    assert user_waits(events) == [2500]
    found = measure(events, {})
    assert (found.user_latency_ms, found.user_wait_ms, found.decisions) == (500, 2500, 0)
