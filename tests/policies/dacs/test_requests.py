"""Requests, exchanges and focus contexts check what they are given."""

from __future__ import annotations

import pytest

from radar_core.policies.dacs import Exchange, FocusContext, SteeringRequest, Urgency


def test_requests_have_ids_of_their_own_and_a_time():
    first, second = (SteeringRequest("ann", "Which box?") for _ in range(2))
    assert first.request_id != second.request_id
    assert first.timestamp.endswith("Z")
    assert first.urgency is Urgency.MEDIUM and first.blocking


def test_urgency_may_be_a_string():
    assert SteeringRequest("ann", "Which box?", urgency="HIGH").urgency is Urgency.HIGH
    assert Exchange("Which box?", "LOW", "The red one.").urgency is Urgency.LOW


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(question=" "), "question"),
        (dict(agent_id=""), "agent_id"),
        (dict(question=None), "question"),
        (dict(relevant_context=None), "relevant_context"),
        (dict(urgency="SOON"), "SOON"),
        (dict(urgency="HIGH", blocking=False), "blocked"),
        (dict(blocking="no"), "blocking is 'no'; expected True or False"),
        (dict(question="\udc00"), "surrogate"),
    ],
)
def test_faulty_requests_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SteeringRequest(**{"agent_id": "ann", "question": "Which box?"} | fields)


def test_recent_output_is_the_requests_context_if_it_brings_one():
    request = SteeringRequest("ann", "Which box?", "Two boxes.")
    assert FocusContext("ann", "Sort", request, output="older").recent_output == "Two boxes."
    request = SteeringRequest("ann", "Which box?", " ")
    assert FocusContext("ann", "Sort", request, output="older").recent_output == "older"
    assert FocusContext("ann", "Sort", output="older").recent_output == "older"


def test_a_focus_context_holds_its_own_agents_request_only():
    with pytest.raises(ValueError, match="'ann' holds a request of 'bob'"):
        FocusContext("ann", "Sort", SteeringRequest("bob", "Which box?"))
    with pytest.raises(ValueError, match="task"):
        FocusContext("ann", "")
