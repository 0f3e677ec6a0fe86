"""Policies and what they hold can be copied and sent to other processes."""

from __future__ import annotations

import asyncio
import copy
import pickle

import numpy as np
import pytest

from radar_core.policies import AgentRadarPolicy, Compaction, RCRRouter
from radar_core.relevance import Dense, Relevance
from tests.policies.turns import HashedWords, context, turn

SAID = [
    ("far", 0, "The budget is 40 euros. The venue is large."),
    ("near", 0, "Lunch is booked."),
]
COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize(
    "policy",
    [
        AgentRadarPolicy(HashedWords(), top_k=1),
        RCRRouter(HashedWords(), hard=False, base_budget=40),
        Compaction(keep_last=1, threshold=400),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_a_copied_policy_writes_the_same_prompts(policy, way):
    before = context(policy, turn(SAID))
    copied = COPIES[way](policy)
    after = context(copied, turn(SAID))
    assert (after.messages, after.anchors) == (before.messages, before.anchors)


@pytest.mark.parametrize("way", COPIES)
def test_copied_relevance_embeds_the_same_and_remembers_nothing(way):
    relevance = Relevance(HashedWords(), language="de")
    vectors = relevance.embed(["ein Satz", "noch einer"])
    copied = COPIES[way](Dense(relevance, title=True))
    assert copied.title and copied.language == "de"
    assert "0 texts embedded" in repr(copied)
    np.testing.assert_array_equal(copied.relevance.embed(["ein Satz", "noch einer"]), vectors)


def test_an_encoder_that_ends_an_iteration_leaves_nobody_waiting():
    class Ending:
        def encode(self, texts):
            raise StopIteration

    async def waited(policy):
        await asyncio.wait_for(policy.context(turn(SAID), None), 10)

    for policy in (AgentRadarPolicy(Ending()), RCRRouter(Ending())):
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            asyncio.run(waited(policy))
