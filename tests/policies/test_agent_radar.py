"""AgentRadar as a policy: same choice as the class, no leak between discussions, ablations."""

import asyncio
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radar_core.agent_radar import AgentRadar
from radar_core.anchors import anchor_spans, render_chat
from radar_core.embedded import load_encoder, load_tokenizer
from radar_core.methods import PASTA, SPA
from radar_core.policies import AgentRadarPolicy, FullContext
from radar_core.topology import Topology
from radar_core.transcript import Transcript
from tests.policies.turns import (
    AGENTS,
    QUERY,
    HashedWords,
    Scripted,
    anchored,
    context,
    no_model,
    turn,
)

# At round 2, solver hears near at 1 hop and far at 2; 0.68 * 0.92 is below the threshold of 0.65.
SAID = [
    ("far", 1, "Far and fresh 0.68."),
    ("near", 0, "Near and stale 0.68. Noise 0.20."),
    ("near", 1, "Near and fresh 0.68."),
    ("far", 0, "Far and stale 0.73."),
]
TURN = turn(SAID, round=2)


def test_it_chooses_what_the_class_chooses():
    radar = AgentRadar.paper(TURN.topology, Scripted())
    for message in TURN.transcript:
        radar.observe(sender=message.sender, text=message.text, round=message.round)
    prompt = radar.prompt(receiver="solver", query=QUERY, round=2)
    shown = context(AgentRadarPolicy.paper(Scripted()), TURN)
    assert shown.messages == prompt.messages
    assert shown.anchors == prompt.anchors
    assert anchored(shown) == ["Near and fresh 0.68.", QUERY]
    assert shown.method == SPA(strength=1.4)
    assert 0 < shown.seconds < 10


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("radar", {"Near and fresh 0.68."}),
        (
            "no-spatial-decay",
            {"Near and fresh 0.68.", "Far and fresh 0.68.", "Far and stale 0.73."},
        ),
        (
            "no-temporal-decay",
            {"Near and fresh 0.68.", "Near and stale 0.68.", "Far and stale 0.73."},
        ),
        (
            "no-decay",
            {
                "Near and fresh 0.68.",
                "Far and fresh 0.68.",
                "Near and stale 0.68.",
                "Far and stale 0.73.",
            },
        ),
    ],
)
def test_without_a_decay_just_the_sentences_it_held_back_are_added(name, expected):
    policies = AgentRadarPolicy.paper(Scripted()).ablations()
    shown = context(policies[name], TURN)
    assert set(anchored(shown)) == expected | {QUERY}
    assert shown.messages == context(policies["radar"], TURN).messages
    assert shown.method == SPA(strength=1.4)


def test_the_lexical_ablation_chooses_by_words_and_needs_no_encoder():
    class Unused:
        def encode(self, texts):
            raise AssertionError("the encoder was asked")

    said = [
        ("near", 1, "The budget is 40,000. Money is what it costs. Nobody knows the weather."),
    ]
    policy = replace(AgentRadarPolicy(Unused(), top_k=1), method=SPA(1.4)).ablations()["lexical"]
    shown = context(policy, turn(said))
    assert anchored(shown) == ["The budget is 40,000.", QUERY]


def test_appended_repeats_the_chosen_sentences_before_the_query_and_anchors_nothing():
    policies = AgentRadarPolicy.paper(Scripted()).ablations()
    shown = context(replace(policies["no-decay"], appended=True), TURN)
    full = context(FullContext(), TURN).messages[0]["content"]
    history, task = full.split("Your task, solver:")
    assert shown.messages[0]["content"] == (
        f"{history}What of it matters most to your task:\n\n"
        "[far, round 1]\nFar and fresh 0.68.\n\n"
        "[near, round 0]\nNear and stale 0.68.\n\n"
        "[near, round 1]\nNear and fresh 0.68.\n\n"
        "[far, round 0]\nFar and stale 0.73.\n\n"
        f"Your task, solver:{task}"
    )
    assert shown.anchors == () and shown.method is None and shown.seconds > 0
    nothing = context(policies["appended"], turn([("near", 1, "Noise 0.20.")]))
    assert nothing.messages == context(FullContext(), turn([("near", 1, "Noise 0.20.")])).messages


def test_appended_knows_a_query_that_looks_like_the_end_of_the_conversation():
    query = "Your task, solver:\nYour task, solver:\n"
    shown = context(AgentRadarPolicy(Scripted(), appended=True, top_k=1), turn(SAID, query=query))
    content = shown.messages[0]["content"]
    assert content.endswith(f".\n\nYour task, solver:\n{query}")
    assert content.count("Your task") == 3


def test_pasta_differs_in_the_method_alone():
    policies = AgentRadarPolicy.paper(Scripted()).ablations()
    pasta, plain = context(policies["pasta"], TURN), context(policies["radar"], TURN)
    assert pasta.method == PASTA(0.3)
    assert (pasta.messages, pasta.anchors) == (plain.messages, plain.anchors)


@pytest.mark.parametrize(
    "changes", [dict(threshold=2), dict(top_k=0), dict(spatial_decay=0), dict(self_policy="own")]
)
def test_unusable_settings_are_refused_when_it_is_built(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        AgentRadarPolicy(Scripted(), **changes)


TALK = st.lists(
    st.tuples(
        st.sampled_from(AGENTS),
        st.integers(0, 2),
        st.sampled_from(["A 0.66. B 0.9.", "C 0.7.", "D 0.8."]),
    ),
    max_size=5,
)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from(["one", "two", "three"]), TALK, st.sampled_from([0, 0, 1])),
        min_size=2,
        max_size=8,
    )
)
def test_discussions_through_one_policy_never_mix(steps):
    """Transcripts grow, shrink and differ at will; each turn is as by a policy of its own."""
    shared = AgentRadarPolicy(Scripted())
    said = {"one": [], "two": [], "three": []}
    topologies = [Topology.chain(AGENTS), Topology.complete(AGENTS)]
    for discussion, more, other in steps:
        kept = said[discussion][: 1 if other else None]
        said[discussion] = kept + more
        now = turn(said[discussion], topology=topologies[other])
        alone, together = context(AgentRadarPolicy(Scripted()), now), context(shared, now)
        assert together.messages == alone.messages
        assert together.anchors == alone.anchors


def test_many_turns_at_once_each_get_their_own():
    shared = AgentRadarPolicy(HashedWords(), top_k=2)
    draw = random.Random(0)
    turns = []
    for discussion in range(12):
        said = [
            (draw.choice(AGENTS[:3]), step // 3, f"Talk {discussion} says {draw.random()}. Budget!")
            for step in range(9)
        ]
        turns += [turn(said[:length]) for length in range(1, 10)]
    draw.shuffle(turns)

    async def all_at_once():
        return await asyncio.gather(*(shared.context(now, no_model) for now in turns))

    for now, shown in zip(turns, asyncio.run(all_at_once()), strict=True):
        alone = context(AgentRadarPolicy(HashedWords(), top_k=2), now)
        assert (shown.messages, shown.anchors) == (alone.messages, alone.anchors)


def test_a_discussion_that_grows_embeds_every_sentence_once():
    encoder = Scripted()
    policy = AgentRadarPolicy(encoder)
    for length in range(len(SAID) + 1):
        context(policy, turn(SAID[:length], round=2))
    assert sorted(encoder.encoded) == sorted({*encoder.encoded})
    assert {"Far and stale 0.73.", QUERY} < {*encoder.encoded}


def test_a_resumed_discussion_gets_the_same_prompt_from_the_real_encoder():
    encoder = load_encoder()
    said = [
        ("far", 0, "The bridge was built in 1932. It cost 40,000 pounds in all."),
        ("near", 0, "I like bridges. The budget for the bridge was 40,000 pounds."),
        ("far", 1, "So the answer is 40,000 pounds. Tomorrow it will rain."),
    ]
    talking = AgentRadarPolicy(encoder, threshold=0.4)
    for length in range(len(said) + 1):
        last = context(talking, turn(said[:length], round=2))
    resumed = context(AgentRadarPolicy(encoder, threshold=0.4), turn(said, round=2))
    assert resumed.anchors == last.anchors and resumed.messages == last.messages
    assert "The budget for the bridge was 40,000 pounds." in anchored(last)
    rendered = render_chat(load_tokenizer(), last.messages)
    spans = anchor_spans(rendered, last.anchors)
    assert [rendered.text[start:end] for start, end in spans] == anchored(last)


def test_the_transcript_may_go_on_after_a_turn():
    said = Transcript()
    policy = AgentRadarPolicy(Scripted())
    said.append("near", "First 0.90.", 0)
    before = context(policy, replace(TURN, transcript=said, round=1))
    said.append("near", "Second 0.90.", 1)
    after = context(policy, replace(TURN, transcript=said, round=2))
    assert anchored(before) == ["First 0.90.", QUERY]
    assert anchored(after) == ["Second 0.90.", "First 0.90.", QUERY]
