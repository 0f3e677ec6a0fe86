"""The metrics of a log, counted by hand, and the published size model."""

import json

import pytest

from radar_core.policies.dacs.log import EventLog
from radar_core.policies.dacs.metrics import Decision, grade, measure, percentile_95
from radar_core.policies.dacs.size_model import (
    efficiency_ratio,
    flat_size,
    focus_size,
    registry_size,
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


def test_the_published_size_model():
    assert registry_size(4, 25) == 100
    # The published sizes lie on a line, of 36.4 tokens an agent (not the 25.5 that are published).
    for agents, measured in ((3, 561), (5, 633), (10, 816)):
        assert focus_size(agents, 488, 36.4) == pytest.approx(measured, abs=1)
    assert flat_size(10, 500) == 5000
    assert efficiency_ratio(10, 500, 25) == pytest.approx(10 * 500 / (500 + 10 * 25))
    ratios = [efficiency_ratio(n, 500, 25) for n in (1, 10, 100, 10**6)]
    assert ratios == sorted(ratios) and ratios[-1] == pytest.approx(500 / 25, rel=1e-3)
    with pytest.raises(ValueError, match="agents is 0"):
        focus_size(0, 1, 1)
