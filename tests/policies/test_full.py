"""The whole conversation, in the very words of AgentRadar's prompt; or the neighbours' alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radar_core.agent_radar import AgentRadar
from radar_core.policies import FullContext
from radar_core.topology import Topology
from tests.policies.turns import AGENTS, QUERY, Scripted, context, turn

SAID = st.lists(
    st.tuples(st.sampled_from(AGENTS), st.integers(0, 3), st.text("ab .\n0é😀", max_size=30)),
    max_size=8,
)


@settings(deadline=None, max_examples=60)
@given(SAID, st.integers(0, 20), st.integers(0, 4), st.sampled_from([None, "You solve."]))
def test_the_whole_conversation_is_what_agent_radar_shows(said, seed, round, system):
    topology = Topology.random(AGENTS, seed=seed)
    now = turn(said, topology=topology, round=round, system=system)
    radar = AgentRadar(topology, Scripted())
    for message in now.transcript:
        radar.observe(sender=message.sender, text=message.text, round=message.round)
    prompt = radar.prompt(receiver="solver", query=QUERY, round=round, system=system)
    shown = context(FullContext(), now)
    assert shown.messages == prompt.messages
    assert shown.anchors == () and shown.method is None


def test_neighbours_only_shows_what_they_said_in_this_round_and_the_one_before():
    said = [
        ("near", 0, "Old."),
        ("far", 1, "Too far."),
        ("near", 1, "Last round."),
        ("solver", 1, "Own."),
        ("after", 1, "Unheard."),
        ("near", 2, "This round."),
        ("near", 3, "Not yet."),
    ]
    shown = context(FullContext(neighbours_only=True), turn(said, round=2))
    assert shown.messages == [
        {
            "role": "user",
            "content": "The conversation so far:\n\n[near, round 1]\nLast round.\n\n"
            "[near, round 2]\nThis round.\n\nYour task, solver:\nWhat is the budget?",
        }
    ]


def test_without_messages_the_query_stands_alone():
    for policy in (FullContext(), FullContext(neighbours_only=True)):
        shown = context(policy, turn([], system="You solve."))
        assert [message["content"] for message in shown.messages] == [
            "You solve.",
            f"Your task, solver:\n{QUERY}",
        ]


def test_unknown_agents_and_blank_queries_are_refused():
    with pytest.raises(ValueError, match="sender 'nobody' is not in the topology"):
        context(FullContext(), turn([("nobody", 0, "Hi.")]))
    with pytest.raises(ValueError, match="query must be a str that is not blank"):
        context(FullContext(), turn([], query=" "))
