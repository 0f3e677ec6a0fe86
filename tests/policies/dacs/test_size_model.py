"""The published size model, and the builder held against it."""

from __future__ import annotations

import numpy as np
import pytest

from radar_core.policies.dacs import ContextBuilder, FocusContext, Registry, SteeringRequest
from radar_core.policies.dacs.size_model import (
    efficiency_ratio,
    flat_size,
    focus_size,
    registry_size,
)
from radar_core.policies.dacs.tokens import TokenCounter
from tests.policies.dacs.support import Words

AGENTS = np.array([3, 5, 10])
PUBLISHED = np.array([561, 633, 816])


def line(agents, sizes):
    """Slope, intercept and R² of a least-squares line."""
    slope, intercept = np.polyfit(agents, sizes, 1)
    rest = sizes - (slope * agents + intercept)
    return slope, intercept, 1 - (rest**2).sum() / ((sizes - sizes.mean()) ** 2).sum()


def test_the_formulas():
    assert registry_size(10, 25) == 250
    assert focus_size(10, 500, 25) == 725
    assert flat_size(10, 500) == 5000
    assert efficiency_ratio(10, 500, 25) == 5000 / 750


def test_the_ratio_grows_towards_focus_over_entry():
    ratios = [efficiency_ratio(agents, 500, 25) for agents in (1, 3, 10, 100, 10**6)]
    assert ratios == sorted(ratios)
    assert ratios[-1] == pytest.approx(500 / 25, rel=1e-4)
    assert max(ratios) < 500 / 25


def test_the_ratio_as_published_counts_one_entry_more_than_the_sizes():
    assert efficiency_ratio(10, 500, 25) < flat_size(10, 500) / focus_size(10, 500, 25)


def test_the_published_sizes_are_linear_with_36_not_25_tokens_an_agent():
    """The text says +25.5 tokens an agent, which is (816 - 561) / 10, for 7 agents more."""
    slope, intercept, fit = line(AGENTS, PUBLISHED)
    assert fit > 0.99
    assert slope == pytest.approx((816 - 561) / 7, abs=0.1)
    assert (816 - 561) / 10 == 25.5
    focus = intercept + slope  # |C_focus| = |F| + (N - 1)·|r|
    assert 450 < focus < 550
    modelled = [focus_size(int(agents), focus, slope) for agents in AGENTS]
    assert modelled == pytest.approx(PUBLISHED, abs=1)


@pytest.mark.parametrize("agents", [0, -1, 2.5, True])
def test_a_number_of_agents_is_a_whole_number(agents):
    with pytest.raises(ValueError, match="whole number"):
        registry_size(agents, 25)


def built(tokenizer, agents, summary):
    registry = Registry(tokenizer)
    for number in range(agents):
        registry.register(f"agent-{number:02}", "Sort the incoming mail by street")
        registry.update(f"agent-{number:02}", summary=summary)
    request = SteeringRequest("agent-00", "Which box do I take next?", "Boxes are full. " * 60)
    context = FocusContext("agent-00", "Sort the incoming mail by street", request)
    builder = ContextBuilder(tokenizer, 10_000)
    return builder.build("focus", "agent-00", [context], registry.entries)


def test_the_builder_grows_by_exactly_one_entry_an_agent():
    sizes = np.array([built(Words(), agents, "Halfway").tokens for agents in range(2, 40)])
    entry = TokenCounter(Words()).count(
        "- agent-01 | RUNNING LOW | task: Sort the incoming mail by street | last: Halfway\n"
    )
    assert set(np.diff(sizes)) == {entry}


def test_in_the_models_own_tokens_the_builder_has_the_published_shape(smollm2):
    """Entries of about 25 tokens and F of about 500: linear, 25 tokens an agent."""
    agents = np.arange(3, 21)
    contexts = [built(smollm2.tokenizer, int(number), "Half") for number in agents]
    sizes = np.array([context.tokens for context in contexts])
    slope, intercept, fit = line(agents, sizes)
    assert fit > 0.99
    assert slope == pytest.approx(25.5, abs=2.5)
    focus = TokenCounter(smollm2.tokenizer).count(contexts[0].text[: contexts[0].focus[1]])
    assert intercept + slope == pytest.approx(focus, abs=12)  # the header of the others
