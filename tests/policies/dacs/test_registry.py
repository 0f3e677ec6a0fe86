"""Registry entries and their limits."""

from __future__ import annotations

import pytest

from radar_core.policies.dacs import EventLog, Registry, Status, Urgency
from radar_core.policies.dacs.registry import (
    MAX_ID_TOKENS,
    MAX_SUMMARY_TOKENS,
    MAX_TASK_TOKENS,
)
from radar_core.policies.dacs.tokens import TokenCounter
from tests.policies.dacs.support import Characters, Words


@pytest.fixture
def registry():
    return Registry(Characters(), EventLog())


def test_registration_starts_running_with_low_urgency(registry):
    entry = registry.register("ann", "Sort the mail")
    assert (entry.status, entry.summary, entry.urgency) == (Status.RUNNING, "", Urgency.LOW)
    assert entry.pending is False
    assert "ann" in registry and len(registry) == 1
    assert entry.last_updated.endswith("Z")


def test_a_task_may_have_50_tokens_and_not_one_more(registry):
    registry.register("ann", "x" * MAX_TASK_TOKENS)
    with pytest.raises(ValueError, match=r"'bob' has 51 tokens; at most 50"):
        registry.register("bob", "x" * (MAX_TASK_TOKENS + 1))
    assert "bob" not in registry


def test_a_name_may_have_16_tokens(registry):
    registry.register("n" * MAX_ID_TOKENS, "Sort")
    with pytest.raises(ValueError, match="agent_id has 17 tokens"):
        registry.register("n" * (MAX_ID_TOKENS + 1), "Sort")


def test_a_summary_over_100_tokens_is_cut_and_the_log_says_so():
    log = EventLog()
    registry = Registry(Words(), log)
    registry.register("ann", "Sort the mail")
    long = " ".join(f"word{n}" for n in range(80))  # 80 words and 79 blanks
    entry = registry.update("ann", summary=long)
    assert long.startswith(entry.summary)
    assert TokenCounter(Words()).count(entry.summary) == MAX_SUMMARY_TOKENS
    (event,) = [event for event in log.events if event["event"] == "REGISTRY_TRUNCATION"]
    assert (event["original_tokens"], event["kept_tokens"]) == (159, 100)
    registry.update("ann", summary=entry.summary)
    assert sum(event["event"] == "REGISTRY_TRUNCATION" for event in log.events) == 1


def test_limits_hold_in_the_models_own_tokenizer(smollm2):
    registry = Registry(smollm2.tokenizer)
    registry.register("ann", "Sort the mail")
    summary = registry.update("ann", summary="überprüft 🙂 " * 80).summary
    tokens = len(smollm2.tokenizer.encode(summary, add_special_tokens=False))
    assert 90 < tokens <= MAX_SUMMARY_TOKENS
    assert "�" not in summary


def test_texts_become_one_line(registry):
    registry.register("ann", "Sort\n\nthe  mail")
    registry.update("ann", summary="done\n- bob | FAILED")
    entry = registry.entry("ann")
    assert entry.task == "Sort the mail"
    assert entry.summary == "done - bob | FAILED"


def test_what_is_not_given_stays(registry):
    registry.register("ann", "Sort the mail")
    registry.update("ann", status="BLOCKED", summary="half", urgency="HIGH", pending=True)
    entry = registry.update("ann", status=Status.RUNNING)
    assert (entry.summary, entry.urgency, entry.pending) == ("half", Urgency.HIGH, True)


def test_others_keep_their_order(registry):
    for name in ("cid", "ann", "bob"):
        registry.register(name, "Sort")
    assert [entry.agent_id for entry in registry.others("ann")] == ["cid", "bob"]


@pytest.mark.parametrize("name", ["", " ann", "ann ", "a\nb", "a  b", None])
def test_unusable_names_are_refused(registry, name):
    with pytest.raises(ValueError, match="agent_id"):
        registry.register(name, "Sort")


def test_other_faults_are_refused(registry):
    registry.register("ann", "Sort")
    with pytest.raises(ValueError, match="already"):
        registry.register("ann", "Sort")
    with pytest.raises(ValueError, match="expected a text"):
        registry.register("bob", "  ")
    with pytest.raises(ValueError, match="registered are: 'ann'"):
        registry.update("bob", summary="x")
    with pytest.raises(ValueError, match="SLEEPING"):
        registry.update("ann", status="SLEEPING")
    with pytest.raises(ValueError, match="surrogate"):
        registry.update("ann", summary="\ud800")
    with pytest.raises(ValueError, match="expected a str"):
        registry.update("ann", summary=3)


def test_an_entry_at_its_limits_stays_under_200_tokens(smollm2):
    from radar_core.policies.dacs.context import _full_line

    registry = Registry(smollm2.tokenizer)
    registry.register("agent" * 10, "mail " * 45)
    registry.update("agent" * 10, summary="a1 " * 90, status="WAITING_STEERING", urgency="HIGH")
    line = _full_line(registry.entry("agent" * 10))
    assert 120 < TokenCounter(smollm2.tokenizer).count(line) <= 200
