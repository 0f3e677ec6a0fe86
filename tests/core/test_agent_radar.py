"""Selection and prompts of Agent-Radar, end to end."""

import math
import re

import numpy as np
import pytest

from radar_core.agent_radar import AgentRadar
from radar_core.anchors import anchor_mask, anchor_spans, render_chat
from radar_core.embedded import load_encoder, load_tokenizer
from radar_core.relevance import Relevance
from radar_core.topology import Topology

QUERY = "What is the budget?"


class Scripted:
    """Gives a sentence the cosine to every query that it ends in, as in "Yes 0.7."."""

    def encode(self, texts):
        cosines = [
            1.0 if text == QUERY else float(re.findall(r"\d\.\d", text)[-1]) for text in texts
        ]
        return np.array([[cosine, math.sqrt(1 - cosine**2)] for cosine in cosines])


@pytest.fixture(scope="module")
def encoder():
    return load_encoder()


def chain(**arguments):
    return AgentRadar(Topology.chain(["far", "near", "solver", "after"]), Scripted(), **arguments)


def test_what_reaches_the_receiver_is_scored_by_similarity_hops_and_age():
    radar = chain()
    radar.observe(sender="far", text="Old and far 0.9. New 0.6.", round=0)
    radar.observe(sender="near", text="Near 0.8.", round=1)
    radar.observe(sender="solver", text="Own 0.7.", round=1)
    radar.observe(sender="after", text="Cannot be heard 1.0.", round=1)
    chosen = radar.select(receiver="solver", query=QUERY, round=2)
    factors = [(item.text, item.spatial, item.temporal) for item in chosen.candidates]
    assert factors == [
        ("Old and far 0.9.", 0.92, 0.92),
        ("New 0.6.", 0.92, 0.92),
        ("Near 0.8.", 1, 1),
        ("Own 0.7.", 1, 1),
    ]
    assert [item.text for item in chosen.sentences] == ["Near 0.8.", "Old and far 0.9.", "Own 0.7."]
    assert chosen.sentences[1].score == pytest.approx(0.9 * 0.92**2, rel=1e-5)
    assert chosen.explanation == "Chose 3 of 4 sentences that reach 'solver' (score at least 0.65)."
    assert len(chosen) == 3 and list(chosen) == chosen.sentences


def test_spans_point_into_the_messages_and_repeated_sentences_keep_their_own():
    radar = chain(threshold=-1)
    text = "  Same 0.7. Other 0.1.\n\nSame 0.7."
    radar.observe(sender="near", text=text)
    radar.observe(sender="near", text=text)
    candidates = radar.select(receiver="solver", query=QUERY).candidates
    assert [(item.message_index, item.start) for item in candidates] == [
        (0, 2), (0, 12), (0, 24), (1, 2), (1, 12), (1, 24)
    ]  # fmt: skip
    for item in candidates:
        assert text[item.start : item.end] == item.text


def test_messages_of_later_rounds_are_not_heard_yet():
    radar = chain()
    radar.observe(sender="near", text="Now 0.9.", round=1)
    radar.observe(sender="near", text="Later 0.9.", round=5)
    assert len(radar.select(receiver="solver", query=QUERY, round=1).candidates) == 1
    assert (
        "Later" not in radar.prompt(receiver="solver", query=QUERY, round=1).messages[0]["content"]
    )
    default = radar.select(receiver="solver", query=QUERY)
    assert default.round == 6
    assert [item.temporal for item in default.candidates] == [pytest.approx(0.92**4), 1]


@pytest.mark.parametrize(
    ("policy", "scores"),
    [("clamp", [0.6, 0.6]), ("literal", [0.6 / 0.92, 0.6 / 0.92**2]), ("exclude", [])],
)
def test_own_and_same_round_sentences(policy, scores):
    radar = chain(self_policy=policy, threshold=-1)
    radar.observe(sender="near", text="Same round 0.6.", round=2)
    radar.observe(sender="solver", text="Own 0.6.", round=2)
    candidates = radar.select(receiver="solver", query=QUERY, round=2).candidates
    assert [item.score for item in candidates] == pytest.approx(scores, rel=1e-5)


def test_nothing_above_the_threshold_is_said_and_the_nearest_are_shown():
    radar = chain()
    radar.observe(sender="near", text=" ".join(f"S{i} 0.{i}." for i in (1, 6, 3, 4, 5, 2)))
    chosen = radar.select(receiver="solver", query=QUERY)
    assert chosen.sentences == []
    assert [item.text for item in chosen.nearest] == [f"S{i} 0.{i}." for i in (6, 5, 4, 3, 2)]
    assert [item.lacked for item in chosen.nearest] == pytest.approx(
        [0.05, 0.15, 0.25, 0.35, 0.45], abs=1e-5
    )
    assert chosen.explanation == (
        "None of the 6 sentences that reach 'solver' scores enough (score at least 0.65), so only "
        "the query is anchored; the nearest scores 0.600 and lacks 0.050."
    )
    prompt = radar.prompt(receiver="solver", query=QUERY)
    assert len(prompt.anchors) == 1
    silent = chain(anchor_query=False)
    silent.observe(sender="near", text="S 0.1.")
    prompt = silent.prompt(receiver="solver", query=QUERY)
    assert prompt.anchors == []
    assert "so nothing is anchored" in prompt.chosen.explanation


def test_a_receiver_that_nobody_reaches_gets_its_query_only():
    radar = chain()
    radar.observe(sender="near", text="Near 0.9.")
    chosen = radar.select(receiver="far", query=QUERY)
    assert chosen.candidates == []
    assert chosen.explanation == (
        "No other agent can reach 'far'. No sentence reaches 'far' in round 1, so only the query "
        "is anchored."
    )
    prompt = radar.prompt(receiver="far", query=QUERY)
    (anchor,) = prompt.anchors
    content = prompt.messages[0]["content"]
    assert content[anchor.start : anchor.end] == QUERY
    assert "Near" not in content


def test_top_k_alone_has_no_threshold_and_together_both_hold():
    radar = chain(top_k=2)
    assert radar.threshold is None
    both = chain(top_k=2, threshold=0.65)
    for each in (radar, both):
        each.observe(sender="near", text="A 0.2. B 0.7. C 0.3.")
    assert [item.text for item in radar.select(receiver="solver", query=QUERY)] == [
        "B 0.7.",
        "C 0.3.",
    ]
    assert [item.text for item in both.select(receiver="solver", query=QUERY)] == ["B 0.7."]


def test_the_prompt_holds_every_visible_message_in_full_and_anchors_the_chosen_spans():
    radar = chain()
    texts = {"far": "A 0.9.\n\n```\nB 0.1.\n```  ", "near": "A 0.9. 😀 C 0.1.", "solver": "D 0.7."}
    for sender, text in texts.items():
        radar.observe(sender=sender, text=text, round=0)
    radar.observe(sender="after", text="E 0.9.", round=0)
    prompt = radar.prompt(receiver="solver", query=QUERY, system="Be brief.")
    system, user = prompt.messages
    assert system == {"role": "system", "content": "Be brief."}
    content = user["content"]
    for sender, text in texts.items():
        you = " (you)" if sender == "solver" else ""
        assert f"[{sender}{you}, round 0]\n{text}\n\n" in content
    assert "E 0.9." not in content
    assert content.endswith(f"\n\nYour task, solver:\n{QUERY}")
    assert {anchor.message for anchor in prompt.anchors} == {1}
    anchored = [content[anchor.start : anchor.end] for anchor in prompt.anchors]
    assert anchored == [*(item.text for item in prompt.chosen.sentences), QUERY]
    assert anchored[:2] == ["A 0.9.", "A 0.9."]
    near = content.index("[near")
    assert prompt.anchors[0].start > near > prompt.anchors[1].start  # the closer one scores more


def test_a_message_without_text_is_its_head_alone():
    radar = chain()
    for sender, text in (("far", ""), ("near", "Near 0.9."), ("far", " \n\n "), ("near", "0.7.\n")):
        radar.observe(sender=sender, text=text, round=1)
    prompt = radar.prompt(receiver="solver", query=QUERY)
    content = prompt.messages[0]["content"]
    assert content == (
        "The conversation so far:\n\n"
        "[far, round 1]\n\n"
        "[near, round 1]\nNear 0.9.\n\n"
        "[far, round 1]\n\n"
        "[near, round 1]\n0.7.\n\n\n"
        f"Your task, solver:\n{QUERY}"
    )
    anchored = [content[anchor.start : anchor.end] for anchor in prompt.anchors]
    assert anchored == ["Near 0.9.", "0.7.", QUERY]


def test_the_papers_settings():
    radar = AgentRadar.paper(Topology.complete(2), Scripted())
    assert (radar.decay.spatial_decay, radar.decay.temporal_decay) == (0.92, 0.92)
    assert (radar.threshold, radar.top_k, radar.anchor_query) == (0.65, None, True)


def test_real_sentences_are_found_and_end_up_as_tokens(encoder):
    tokenizer = load_tokenizer()
    radar = AgentRadar(
        Topology.layered([["planner", "critic"], ["solver"]]), encoder, threshold=0.5
    )
    radar.observe(
        sender="planner", text="The venue is in Oslo. The budget is 40,000 euros. 😀 Nice."
    )
    radar.observe(sender="critic", text="预算是四万欧元。I would rather talk about the weather.")
    prompt = radar.prompt(receiver="solver", query="How large is the budget?")
    assert [item.text for item in prompt.chosen] == ["The budget is 40,000 euros."]
    rendered = render_chat(tokenizer, prompt.messages)
    mask = anchor_mask(rendered, anchor_spans(rendered, prompt.anchors))
    ids = [token for token, anchored in zip(rendered.input_ids, mask, strict=True) if anchored]
    assert tokenizer.decode(ids) == " The budget is 40,000 euros.How large is the budget?"


def test_who_speaks_first_gets_the_query_alone():
    radar = chain()
    assert radar.select(receiver="solver", query=QUERY).round == 0
    prompt = radar.prompt(receiver="solver", query=QUERY)
    (message,), (anchor,) = prompt.messages, prompt.anchors
    assert message["content"] == f"Your task, solver:\n{QUERY}"
    assert message["content"][anchor.start : anchor.end] == QUERY
    assert prompt.chosen.candidates == [] and len(prompt.chosen) == 0
    assert "No sentence reaches 'solver' in round 0" in prompt.chosen.explanation


def test_the_copy_of_the_transcript_counts_rounds_on_as_the_original_does():
    radar = chain()
    for sender in ("near", "near", "far"):
        radar.observe(sender=sender, text="x")
    assert radar.transcript.append("solver", "y").round == 0
    assert radar.observe(sender="far", text="x").round == 1


def test_a_selector_says_what_it_holds():
    radar = chain()
    radar.observe(sender="near", text="Near 0.9.")
    assert repr(radar) == "AgentRadar(Topology(4 agents, 3 edges), 1 messages observed)"
    shown = repr(radar.select(receiver="solver", query=QUERY))
    assert "0.9" not in shown and "top_k=None" in shown
    assert repr(radar.relevance) == "Relevance(Scripted, 2 texts embedded)"


def test_encoders_may_be_shared():
    shared = Relevance(Scripted())
    assert AgentRadar(Topology.complete(2), shared).relevance is shared


def test_the_others_are_what_was_not_chosen():
    radar = chain(top_k=2)
    radar.observe(sender="near", text="A 0.9. B 0.1. C 0.2.")
    radar.observe(sender="near", text="D 0.8. E 0.3.")
    radar.observe(sender="far", text="F 0.0.")
    prompt = radar.prompt(receiver="solver", query=QUERY)
    content = prompt.messages[-1]["content"]
    texts = [content[anchor.start : anchor.end] for anchor in prompt.others]
    assert texts == ["B 0.1. C 0.2.", "E 0.3.", "F 0.0."]
    assert [item.text for item in prompt.chosen] == ["A 0.9.", "D 0.8."]


@pytest.mark.parametrize("threshold", [0.95, -1])
def test_there_are_no_others_where_none_or_all_are_chosen(threshold):
    radar = chain(threshold=threshold)
    radar.observe(sender="near", text="A 0.9. B 0.1.")
    assert radar.prompt(receiver="solver", query=QUERY).others == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"threshold": 1.5}, "threshold"),
        ({"threshold": "0.5"}, "threshold"),
        ({"threshold": float("nan")}, "threshold"),
        ({"threshold": True}, "threshold"),
        ({"top_k": True}, "top_k"),
        ({"spatial_decay": True}, "spatial_decay"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"spatial_decay": 0.0}, "spatial_decay"),
        ({"temporal_decay": 1.1}, "temporal_decay"),
        ({"self_policy": "boost"}, "self_policy"),
    ],
)
def test_settings_out_of_range_are_refused(arguments, named):
    with pytest.raises(ValueError, match=named):
        chain(**arguments)


def test_unusable_calls_are_refused_and_leave_nothing_behind():
    with pytest.raises(ValueError, match="topology must be a Topology, got list"):
        AgentRadar([("a", "b")], Scripted())
    radar = chain()
    with pytest.raises(ValueError, match=r"sender 'neer'.*did you mean 'near'"):
        radar.observe(sender="neer", text="x")
    with pytest.raises(ValueError, match="text must be a str"):
        radar.observe(sender="near", text=None)
    assert len(radar.transcript) == 0
    radar.observe(sender="near", text="A 0.9.")
    radar.transcript.append("near", "a copy")
    assert len(radar.transcript) == 1
    with pytest.raises(ValueError, match="receiver 'slover'"):
        radar.select(receiver="slover", query=QUERY)
    with pytest.raises(ValueError, match="query"):
        radar.select(receiver="solver", query=" ")
    with pytest.raises(ValueError, match="query holds half a surrogate pair"):
        radar.select(receiver="solver", query="x\ud83d")
    with pytest.raises(ValueError, match="round"):
        radar.select(receiver="solver", query=QUERY, round=-1)
    with pytest.raises(ValueError, match="round must be at most 2147483648"):
        radar.select(receiver="solver", query=QUERY, round=2**70)
    assert radar.select(receiver="solver", query=QUERY, round=2**31).round == 2**31
    with pytest.raises(ValueError, match="system"):
        radar.prompt(receiver="solver", query=QUERY, system=3)
