"""Selection by the model's own attention, and the reply that goes on from what it has read."""

import asyncio
import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radar_core import SPA, AgentRadar, Anchor, AttentionBias, Steered, Topology
from radar_core.anchors import RenderedPrompt
from radar_core.discussion import Agent, ByLast, Discussion, Request, SteeredModel
from radar_core.policies import AgentRadarPolicy
from radar_core.relevance import Combined, Lexical, ScoredSentence, sentence_spans
from radar_core.relevance.attention import Attention, token_sentences
from radar_core.relevance.selector import Reading, Selector
from radar_core.schedule import Schedule

FACTS = (
    "Ana leads the project. The budget is 40,000 euros. The venue holds 300 people. "
    "Catering has been booked for June. The mayor will give a speech."
)
QUERY = "How much money do we have?"


def reading(text=FACTS, query=QUERY, system=None):
    spans = sentence_spans(text)
    sentences = [ScoredSentence(text[start:end], "ana", 0, 0, start, end) for start, end in spans]
    messages = [] if system is None else [{"role": "system", "content": system}]
    last = len(messages)
    messages.append({"role": "user", "content": f"{text}\n\n{query}"})
    places = [Anchor(last, start, end) for start, end in spans]
    place = Anchor(last, len(text) + 2, len(text) + 2 + len(query))
    return Reading(sentences, query, messages, places, place, ["ana"] * len(spans))


@pytest.fixture(scope="module")
def attention(smollm2):
    return Attention(smollm2.model, smollm2.tokenizer)


def test_it_is_a_selector_that_finds_what_the_query_is_about(attention):
    assert isinstance(attention, Selector)
    found = attention.similarities(reading())
    assert found.dtype == np.float32 and found.shape == (5,)
    assert np.abs(found).max() == 1
    assert found.argmax() == 1
    assert attention.similarities(reading(query="Who will speak?")).argmax() == 4


def test_a_system_message_comes_first(attention):
    found = attention.similarities(reading(system="Answer in one word."))
    assert found.argmax() == 1


def test_nothing_to_compare(attention):
    empty = reading()
    empty = Reading([], empty.query, empty.messages, [], empty.query_place, [])
    assert attention.similarities(empty).shape == (0,)


def test_the_baseline_moves_nothing(smollm2):
    """A query that is the baseline itself gains nothing anywhere."""
    attention = Attention(smollm2.model, smollm2.tokenizer, baseline_query=QUERY)
    assert np.abs(attention.similarities(reading())).max() <= 1
    peaks, baseline = attention.peaks(reading())
    torch.testing.assert_close(peaks, baseline, atol=1e-5, rtol=0)


def test_chosen_layers_and_heads(smollm2):
    every = Attention(smollm2.model, smollm2.tokenizer, layers=range(30))
    peaks, baseline = (part.numpy() for part in every.peaks(reading()))
    gain = (peaks - baseline).sum(1)
    chosen = {4: [0, 2], -1: [8]}
    some = Attention(smollm2.model, smollm2.tokenizer, heads=chosen)
    expected = (gain[4, 0] + gain[4, 2] + gain[29, 8]) / 3
    found = some.similarities(reading())
    np.testing.assert_allclose(found, expected / np.abs(expected).max(), atol=1e-3)


def test_the_lowest_third_of_the_layers_is_left_out(attention, smollm2):
    upper = Attention(smollm2.model, smollm2.tokenizer, layers=range(10, 30))
    assert repr(attention) == repr(upper) == "Attention(LlamaForCausalLM, layers 10-29)"
    np.testing.assert_array_equal(attention.similarities(reading()), upper.similarities(reading()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": [30]}, "names 30, but this model has 30"),
        ({"heads": [9]}, "names 9, but this model has 9"),
        ({"layers": []}, "layers is empty"),
        ({"baseline_query": " "}, "baseline_query"),
    ],
)
def test_malformed_arguments(smollm2, arguments, message):
    with pytest.raises(ValueError, match=message):
        Attention(smollm2.model, smollm2.tokenizer, **arguments)


def test_swapped_arguments(smollm2):
    with pytest.raises(ValueError, match=r"expected Attention\(model, tokenizer\)"):
        Attention(smollm2.tokenizer, smollm2.model)


def test_a_query_in_front_of_the_sentences_is_refused(attention):
    turned = f"{QUERY}\n\n{FACTS}"
    spans = [(start + len(QUERY) + 2, end + len(QUERY) + 2) for start, end in sentence_spans(FACTS)]
    places = [Anchor(0, start, end) for start, end in spans]
    asking = Reading(
        reading().sentences,
        QUERY,
        [{"role": "user", "content": turned}],
        places,
        Anchor(0, 0, len(QUERY)),
        ["ana"] * 5,
    )
    with pytest.raises(ValueError, match="does not lie before the query"):
        attention.similarities(asking)


# -- tokens and sentences --------------------------------------------------------------------------


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=30),
    gaps=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=12),
)
def test_a_token_belongs_to_the_sentence_with_most_of_its_characters(lengths, gaps):
    text = "x" * sum(lengths)
    ends = np.cumsum(lengths).tolist()
    token_spans = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    spans, place = [], 0
    for gap, length in gaps:
        start, end = place + gap, min(place + gap + length, len(text))
        if start < end:
            spans.append((start, end))
        place = end
    rendered = RenderedPrompt(text, [0] * len(lengths), token_spans, [(0, len(text))], [text], [0])
    found = token_sentences(rendered, spans)
    for owner, (start, end) in zip(found.tolist(), token_spans, strict=True):
        shared = [max(0, min(end, stop) - max(start, begin)) for begin, stop in spans]
        if max(shared, default=0) == 0:
            assert owner == -1
        else:
            assert owner == shared.index(max(shared))


def test_borders_of_a_real_tokenizer(smollm2):
    from radar_core.anchors import anchor_spans, render_chat

    text = "Straße 5 ist frei. 東京は大きい。次の文。 🙂🙂 done."
    spans = sentence_spans(text, "de")
    rendered = render_chat(smollm2.tokenizer, [{"role": "user", "content": text}])
    placed = anchor_spans(rendered, [Anchor(0, start, end) for start, end in spans])
    owners = token_sentences(rendered, placed)
    for number, (start, end) in enumerate(placed):
        mine = [rendered.token_spans[token] for token in np.flatnonzero(owners == number)]
        assert min(begin for begin, _ in mine) >= start - 1  # the blank before it
        assert max(stop for _, stop in mine) <= end


# -- replies ---------------------------------------------------------------------------------------


def talk(selector):
    radar = AgentRadar(Topology([("ana", "ben"), ("eva", "ben")]), selector=selector, top_k=1)
    radar.observe(sender="ana", text="The project is on time. The budget is 40,000 euros.")
    radar.observe(sender="eva", text="The venue holds 300 people. Lunch has been booked.")
    return radar


def lengths_of(model, call):
    """Return how many tokens every forward pass of a call is given, and what the call returns."""
    lengths = []

    def note(module, args, kwargs):
        lengths.append(kwargs["input_ids"].shape[1])

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        return lengths, call()
    finally:
        handle.remove()


@pytest.mark.parametrize("combined", [False, True])
@pytest.mark.parametrize(
    ("method", "kept"),
    [(AttentionBias(2.0, queries="generated"), 1), (SPA(1.4, branch="direct"), 1)],
    ids=["bias", "direct"],
)
def test_a_reply_goes_on_from_the_prompt_that_was_read(smollm2, method, kept, combined):
    attention = Attention(smollm2.model, smollm2.tokenizer)
    radar = talk(Combined([(attention, 1.0), (Lexical(), 1.0)]) if combined else attention)
    prompt = radar.prompt(receiver="ben", query="What is the budget?")
    assert [item.text for item in prompt.chosen] == ["The budget is 40,000 euros."]
    steered = Steered(smollm2.model, smollm2.tokenizer, method)
    options = dict(max_new_tokens=14, do_sample=False)
    lengths, reply = lengths_of(smollm2.model, lambda: steered.chat(prompt, **options))
    assert lengths[:2] == [
        1,
        kept,
    ]  # the last token that was read shows that it may be gone on from
    anew, fresh = lengths_of(
        smollm2.model, lambda: steered.chat(prompt.messages, prompt.anchors, **options)
    )
    assert anew[0] == fresh.usage.prompt_tokens
    assert reply == fresh and "40,000" in reply.text
    assert steered.report(2).layers  # which reads the prompt itself


def test_what_a_method_changes_is_read_under_it(smollm2):
    attention = Attention(smollm2.model, smollm2.tokenizer)
    prompt = talk(attention).prompt(receiver="ben", query="What is the budget?")
    steered = Steered(smollm2.model, smollm2.tokenizer, AttentionBias(2.0))
    options = dict(max_new_tokens=4, do_sample=False)
    lengths, reply = lengths_of(smollm2.model, lambda: steered.chat(prompt, **options))
    first = min(token for anchor in reply.anchors for token in anchor.tokens)
    assert lengths[0] == 1
    assert lengths[1] == reply.usage.prompt_tokens - first > 1
    assert reply == steered.chat(prompt.messages, prompt.anchors, **options)


def test_an_agent_goes_on_from_what_its_policy_read(smollm2):
    class Forgetful(AgentRadarPolicy):
        async def context(self, turn, ask):
            return replace(await super().context(turn, ask), selector=None)

    def talked(kind):
        policy = kind(
            selector=Attention(smollm2.model, smollm2.tokenizer),
            method=AttentionBias(2.0, queries="generated"),
            top_k=1,
        )
        discussion = Discussion(
            [Agent("ana", "planner"), Agent("ben", "solver")],
            Schedule.chain(["ana", "ben"]),
            SteeredModel(smollm2.model, smollm2.tokenizer),
            policy,
            rounds=1,
            decision=ByLast(),
            max_new_tokens=8,
        )
        return lengths_of(smollm2.model, lambda: asyncio.run(discussion.run("Name a color.")))

    (lengths, outcome), (anew, fresh) = talked(AgentRadarPolicy), talked(Forgetful)
    assert [said.answer.text for said in outcome.spoken] == [
        said.answer.text for said in fresh.spoken
    ]
    assert outcome.spoken[1].answer.anchor_tokens > 0
    # All but the last token, and one to see that the model is still the same.
    assert sum(anew) - sum(lengths) == outcome.spoken[1].answer.prompt_tokens - 1 - 1


def test_neither_a_reply_nor_a_selection_goes_on_from_what_another_model_read(smollm2):
    model = copy.deepcopy(smollm2.model)
    attention = Attention(model, smollm2.tokenizer)
    radar = talk(attention)
    query = "What is the budget?"
    prompt = radar.prompt(receiver="ben", query=query)
    for layer in model.model.layers[:4]:
        layer.mlp.down_proj.weight.data.mul_(1.6)  # which torch does not count as a change
    method = AttentionBias(2.0, queries="generated")
    asked = Request(prompt.messages, 14, prompt.anchors, method)
    answering = SteeredModel(model, smollm2.tokenizer)
    replies = [
        asyncio.run(answering(replace(asked, selector=selector))).text
        for selector in (attention, None)
    ]
    assert replies[0] == replies[1]
    again = radar.select(receiver="ben", query=query)
    fresh = talk(Attention(model, smollm2.tokenizer)).select(receiver="ben", query=query)
    assert [item.similarity for item in again.candidates] == pytest.approx(
        [item.similarity for item in fresh.candidates], abs=1e-5
    )


def test_another_model_reads_for_itself(smollm2):
    other = copy.deepcopy(smollm2.model)
    attention = Attention(other, smollm2.tokenizer)
    prompt = talk(attention).prompt(receiver="ben", query="What is the budget?")
    steered = Steered(smollm2.model, smollm2.tokenizer, AttentionBias(2.0, queries="generated"))
    lengths, reply = lengths_of(
        smollm2.model, lambda: steered.chat(prompt, max_new_tokens=2, do_sample=False)
    )
    assert lengths[0] == reply.usage.prompt_tokens


def test_of_the_next_turn_only_what_is_new_is_read(smollm2):
    attention = Attention(smollm2.model, smollm2.tokenizer)
    radar = talk(attention)
    query = "What is the budget?"
    lengths, _ = lengths_of(smollm2.model, lambda: radar.select(receiver="ben", query=query))
    radar.observe(sender="ana", text="Correction: the budget is 50,000 euros.")
    more, chosen = lengths_of(smollm2.model, lambda: radar.select(receiver="ben", query=query))
    assert sum(more) < sum(lengths) / 2
    fresh = talk(Attention(smollm2.model, smollm2.tokenizer))
    fresh.observe(sender="ana", text="Correction: the budget is 50,000 euros.")
    expected = fresh.select(receiver="ben", query=query)
    assert [item.similarity for item in chosen.candidates] == pytest.approx(
        [item.similarity for item in expected.candidates], abs=1e-3
    )
