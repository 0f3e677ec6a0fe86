"""Selectors: dense, lexical and combined, alone and with Agent-Radar's decays and limits."""

import logging
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radar_core.agent_radar import AgentRadar
from radar_core.anchors import Anchor
from radar_core.relevance import (
    Combined,
    Dense,
    Lexical,
    Mentions,
    Reading,
    Relevance,
    ScoredSentence,
    Selector,
)
from radar_core.topology import Topology

QUERY = "What is the budget?"
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"]


def reading(query, *texts, titles=None):
    sentences = [
        ScoredSentence(text, "a", 0, index, 0, len(text)) for index, text in enumerate(texts)
    ]
    return Reading(
        sentences, query, [], [], Anchor(0, 0, 1), ["a"] * len(texts) if titles is None else titles
    )


class Fixed:
    """Gives the similarities that it was told to, and keeps what it was given to read."""

    def __init__(self, *similarities):
        self.result = list(similarities)
        self.readings = []

    def similarities(self, reading):
        self.readings.append(reading)
        return np.array(self.result, dtype=np.float32)


class Lengths:
    """Embeds a text as its length."""

    def __init__(self):
        self.asked = []

    def encode(self, texts):
        self.asked += texts
        return [[len(text), 10.0] for text in texts]


# --- dense ---


def test_dense_similarities_are_cosines_with_the_query():
    selector = Dense(Lengths())
    found = selector.similarities(reading("x" * 10, "y" * 10, "z" * 40))
    assert found.dtype == np.float32
    assert found == pytest.approx([1, (400 + 100) / math.hypot(10, 10) / math.hypot(40, 10)])


def test_titles_go_in_front_of_the_sentences_but_not_of_the_query():
    encoder = Lengths()
    selector = Dense(encoder, title=True)
    selector.similarities(reading("q", "one", "two", titles=["First", "Second"]))
    assert encoder.asked == ["First: one", "Second: two", "q"]
    assert repr(selector) == "Dense(Relevance(Lengths, 3 texts embedded), title=True)"


def test_dense_takes_a_relevance_and_shares_its_language():
    relevance = Relevance(Lengths(), language="de")
    assert Dense(relevance).relevance is relevance
    assert Dense(relevance).language == "de"


def test_the_sender_in_front_tells_sentences_apart_with_the_real_encoder():
    texts = "The hall holds ninety people.", "The hall holds ninety people."
    asked = reading("What did the mechanic say?", *texts, titles=["mechanic", "treasurer"])
    without, with_titles = Dense().similarities(asked), Dense(title=True).similarities(asked)
    assert without[0] == without[1]
    assert with_titles[0] > with_titles[1] + 0.1


# --- lexical ---


def bm25(query, documents):
    """Lucene's BM25 by its formula, in float64."""
    length = sum(map(len, documents)) / len(documents)
    scores = []
    for words in documents:
        score = 0.0
        for word in query:
            having = sum(word in other for other in documents)
            rarity = math.log(1 + (len(documents) - having + 0.5) / (having + 0.5))
            count = words.count(word)
            score += rarity * count / (count + 1.5 * (1 - 0.75 + 0.75 * len(words) / length))
        scores.append(score)
    return scores


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(WORDS), max_size=8), min_size=1, max_size=8),
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=6),
)
def test_lexical_similarity_is_bm25_over_the_querys_own(sentences, query):
    texts = [" ".join(words).title() + "." for words in sentences]
    found = Lexical().similarities(reading(" ".join(query), *texts))
    *scores, own = bm25(query, [*sentences, query])
    assert found.dtype == np.float32 and found.shape == (len(texts),)
    assert found == pytest.approx([min(1, score / own) for score in scores], rel=1e-5, abs=1e-7)
    for words, similarity in zip(sentences, found, strict=True):
        assert 0 <= similarity <= 1
        assert (similarity == 0) == (not Counter(words) & Counter(query))
        assert sorted(words) != sorted(query) or similarity == pytest.approx(1)


def test_words_count_without_case_function_words_and_single_letters():
    lexical = Lexical()
    found = lexical.similarities(
        reading(
            "What is the Budget for 5?",
            "BUDGET",
            "What is the time for a walk?",
            "Room 5, room 6.",
            "The budgets.",
        )
    )
    assert found[0] > 0 and found[2] > 0
    assert found[1] == found[3] == 0
    assert repr(lexical) == "Lexical('en', title=False)"


def test_scripts_without_blanks_are_compared_by_character():
    found = Lexical("zh").similarities(reading("预算是多少?", "预算四万欧元。", "今天天气很好。"))
    assert found[0] > found[1] == 0


@pytest.mark.parametrize("query", ["...", "What is the", "   ", "a"])
def test_queries_without_a_word_that_counts_are_similar_to_nothing(query, capfd):
    found = Lexical().similarities(reading(query, "What is the budget?", "...", ""))
    assert found.tolist() == [0, 0, 0]
    assert Lexical().similarities(reading("budget", "...", "", "no")).tolist() == [0, 0, 0]
    assert capfd.readouterr() == ("", "")


def test_a_title_counts_as_part_of_the_sentence_if_asked():
    asked = reading(
        "the mechanic's note", "It is done.", "It is late.", titles=["mechanic", "host"]
    )
    assert Lexical().similarities(asked).tolist() == [0, 0]
    first, second = Lexical(title=True).similarities(asked)
    assert first > second == 0


def test_languages_have_their_own_function_words_and_unknown_ones_say_that_they_have_none(caplog):
    asked = reading("Was ist der Preis?", "Der Preis steht fest.", "Was ist der Grund?")
    with caplog.at_level(logging.DEBUG):
        assert Lexical("de").similarities(asked)[1] == 0
        assert caplog.records == []
        assert Lexical("xx").similarities(asked)[1] > 0
    (record,) = caplog.records
    assert record.name == "radar_core" and "no function words of language 'xx'" in record.message
    with pytest.raises(ValueError, match="language must be a code"):
        Lexical(None)


def test_without_bm25s_lexical_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bm25s", None)
    with pytest.raises(
        ImportError, match=r'needs bm25s; run: pip install "radar-kernels\[agents\]"'
    ):
        Lexical()


# --- combined ---

TEXTS = ["s"] * 5


def combine(selectors, by, texts=TEXTS):
    return Combined(selectors, by=by).similarities(reading("q", *texts))


def test_values_are_compared_in_standard_deviations():
    values = np.array([0.1, 0.2, 0.3, 0.4, 0.9])
    standard = np.tanh((values - values.mean()) / values.std() / 3)
    assert combine({Fixed(*values): 2.0}, "value") == pytest.approx(standard)
    opposite = combine([(Fixed(*values), 3), (Fixed(*-values), 1)], "value")
    assert opposite == pytest.approx(standard * 0.5, abs=1e-6)


def test_ranks_are_fused_by_their_reciprocals_and_equals_share_theirs():
    found = combine([(Fixed(0.9, 0.1, 0.5, 0.5, -0.3), 1)], "rank")
    assert found == pytest.approx([1, 61 / 64, 61 / 62.5, 61 / 62.5, 61 / 65])
    both = combine({Fixed(5, 4, 3, 2, 1): 1, Fixed(1, 2, 3, 4, 5): 3}, "rank")
    assert both == pytest.approx(
        [(1 * 61 / (60 + rank) + 3 * 61 / (66 - rank)) / 4 for rank in range(1, 6)]
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-20, 20), st.integers(-20, 20)), min_size=1, max_size=30),
    st.floats(0.01, 1),
    st.sampled_from(["value", "rank"]),
)
def test_scale_and_offset_of_a_selector_make_no_difference(pairs, scale, by):
    first, second = np.array(pairs).T / 20
    texts = ["s"] * len(pairs)
    plain = combine([(Fixed(*first), 1), (Fixed(*second), 2)], by, texts)
    moved = combine([(Fixed(*first * scale + 0.3), 1), (Fixed(*second), 2)], by, texts)
    assert plain.dtype == np.float32
    assert np.isfinite(plain).all() and (np.abs(plain) <= 1).all()
    np.testing.assert_allclose(plain, moved, atol=2e-4)


def test_a_selector_that_tells_nothing_apart_leaves_the_order_to_the_others():
    same, telling = Fixed(0.7, 0.7, 0.7, 0.7, 0.7), Fixed(0.1, 0.5, 0.3, 0.2, 0.4)
    for by in ("value", "rank"):
        order = np.argsort(combine([(same, 5), (telling, 1)], by))
        assert order.tolist() == [0, 3, 2, 4, 1]
    assert combine([(same, 1)], "value").tolist() == [0] * 5


def test_combinations_may_be_combined_and_say_what_they_hold():
    inner = Combined([(Lexical("de"), 1)], by="rank")
    outer = Combined([(Fixed(0.1), 1), (inner, 0.5)])
    assert isinstance(outer, Selector)
    assert outer.language == "de" and Combined([(Fixed(), 1)]).language == "en"
    assert repr(outer).endswith(
        "1), (Combined([(Lexical('de', title=False), 1)], by='rank'), 0.5)], by='value')"
    )


@pytest.mark.parametrize(
    ("selectors", "options", "message"),
    [
        ([], {}, "at least one selector"),
        ([(Fixed(), 0)], {}, "above 0, got 0"),
        ([(Fixed(), math.inf)], {}, "finite number"),
        ([(Fixed(), True)], {}, "got True"),
        ([(Fixed(), "1")], {}, "got '1'"),
        ([(Fixed(), 1, 2)], {}, "expected a selector or a pair"),
        ([("dense", 1)], {}, r"a selector is a str that has no similarities\(...\)"),
        ([Lexical], {}, "a selector is the class Lexical; expected an object"),
        ([(Fixed(), 1)], {"by": "sum"}, "by must be one of value, rank, got 'sum'"),
    ],
)
def test_unusable_combinations_are_refused(selectors, options, message):
    with pytest.raises(ValueError, match=message):
        Combined(selectors, **options)


@pytest.mark.parametrize("result", [[0.1], [0.1] * 4 + [math.nan]])
def test_similarities_that_cannot_be_combined_are_refused(result):
    with pytest.raises(ValueError, match="must return 5 finite similarities"):
        combine([(Fixed(*result), 1)], "value")


# --- with decays and limits ---


def chain(selector, **arguments):
    radar = AgentRadar(Topology.chain(["far", "near", "solver"]), selector=selector, **arguments)
    radar.observe(sender="far", text="The first one. The second one.", round=0)
    radar.observe(sender="near", text="  A third\none! ", round=1)
    radar.observe(sender="solver", text="My own one.", round=1)
    return radar


def test_decays_multiply_the_similarities_of_any_selector():
    radar = chain(Fixed(0.9, -0.5, 0.7, 0.6), threshold=0.65)
    chosen = radar.select(receiver="solver", query=QUERY, round=2)
    assert [item.similarity for item in chosen.candidates] == pytest.approx([0.9, -0.5, 0.7, 0.6])
    assert [item.cosine for item in chosen.candidates] == pytest.approx([0.9, -0.5, 0.7, 0.6])
    scores = [0.9 * 0.92**2, -0.5 * 0.92**2, 0.7, 0.6]
    assert [item.score for item in chosen.candidates] == pytest.approx(scores)
    assert [item.text for item in chosen] == ["The first one.", "A third\none!"]
    assert [item.lacked for item in chosen.candidates] == pytest.approx(
        [0, 0.65 - scores[1], 0, 0.65 - 0.6]
    )
    best = chain(Fixed(0.9, -0.5, 0.7, 0.6), top_k=1, spatial_decay=0.5)
    assert [item.text for item in best.select(receiver="solver", query=QUERY)] == ["A third\none!"]


def test_a_selector_reads_the_very_prompt_and_is_asked_once():
    selector = Fixed(0.9, 0.1, 0.7, 0.6)
    prompt = chain(selector).prompt(receiver="solver", query=QUERY, round=2, system="Be brief.")
    (read,) = selector.readings
    assert read.messages == prompt.messages and read.messages[0]["content"] == "Be brief."
    assert read.query == QUERY and list(read.titles) == ["far", "far", "near", "solver"]

    def text(place):
        return read.messages[place.message]["content"][place.start : place.end]

    assert [text(place) for place in read.places] == [item.text for item in read.sentences]
    assert text(read.query_place) == QUERY
    assert len(read.places) == 4 and read.places[1:3] == list(read.places)[1:3]
    assert read.places[-1] == list(read.places)[-1]
    assert prompt.anchors == [read.places[0], read.places[2], read.query_place]
    assert chain(selector).select(receiver="solver", query=QUERY).candidates
    assert selector.readings[1].messages == prompt.messages[1:]


def test_sentences_that_are_excluded_are_shown_but_not_compared():
    selector = Fixed(0.9, 0.1, 0.7)
    radar = chain(selector, self_policy="exclude")
    prompt = radar.prompt(receiver="solver", query=QUERY, round=2)
    assert "My own one." in prompt.messages[0]["content"]
    assert [item.sender for item in selector.readings[0].sentences] == ["far", "far", "near"]
    assert len(prompt.chosen.candidates) == 3


def test_lexical_and_combined_selection_find_the_sentence_that_shares_words():
    encoder = Relevance()
    for selector in (Lexical(), Combined({Dense(encoder): 1, Lexical(): 1}),
                     Combined({Dense(encoder): 1, Lexical(): 1}, by="rank")):  # fmt: skip
        radar = AgentRadar(Topology.chain(["near", "solver"]), selector=selector, top_k=1)
        radar.observe(sender="near", text="The venue is in Oslo. The budget is 40,000 euros. Nice.")
        (best,) = radar.select(receiver="solver", query=QUERY)
        assert best.text == "The budget is 40,000 euros."
        assert radar.relevance is None
    assert AgentRadar(Topology.complete(2), encoder).relevance is encoder
    assert AgentRadar(Topology.complete(2), selector=Dense(encoder)).relevance is encoder


def test_messages_are_cut_by_the_rules_of_the_selectors_language():
    text = "Die Kosten fallen am 3. Mai an. Gut."
    for language, count in (("en", 3), ("de", 2)):
        radar = AgentRadar(Topology.chain(["near", "solver"]), selector=Lexical(language), top_k=1)
        radar.observe(sender="near", text=text)
        assert len(radar.select(receiver="solver", query="Kosten?").candidates) == count


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([0.5], r"4 numbers from -1 to 1, got shape \(1,\)"),
        ([0.5, 0.5, 0.5, math.nan], "from nan"),
        ([0.5, 0.5, 0.5, 1.1], "to 1.1"),
        ([0.5, 0.5, -7, 1], "from -7"),
    ],
)
def test_similarities_out_of_range_are_refused_with_the_selectors_name(result, message):
    with pytest.raises(ValueError, match=f"Fixed.* must return one similarity.*{message}"):
        chain(Fixed(*result)).select(receiver="solver", query=QUERY)


def test_an_encoder_and_a_selector_or_no_selector_at_all_are_refused():
    with pytest.raises(ValueError, match=r"not both.*selector=Dense\(encoder\)"):
        AgentRadar(Topology.complete(2), Lengths(), selector=Dense())
    with pytest.raises(
        ValueError, match=r"a Lengths that has no similarities\(.*expected such as Dense\(encoder\)"
    ):
        AgentRadar(Topology.complete(2), selector=Lengths())


def test_selecting_as_the_conversation_grows_is_selecting_from_all_of_it_and_embeds_it_once():
    encoder = Lengths()
    radar = AgentRadar(Topology.complete(["a", "b", "c"]), encoder, threshold=0.9)
    said = [
        (name, turn, f"{name * turn} said {'so ' * (turn + place)}here. {'And more. ' * place}")
        for turn in range(1, 5)
        for place, name in enumerate("abc")
    ]
    for place, (sender, turn, text) in enumerate(said):
        radar.observe(sender=sender, round=turn, text=text)
        afresh = AgentRadar(Topology.complete(["a", "b", "c"]), Lengths(), threshold=0.9)
        for sender, turn, text in said[: place + 1]:
            afresh.observe(sender=sender, round=turn, text=text)
        for receiver in "ab":
            grown, whole = (
                each.prompt(receiver=receiver, query="What was said?") for each in (radar, afresh)
            )
            assert grown == whole
    assert len(encoder.asked) == len(set(encoder.asked))


def test_selectors_without_weights_count_alike():
    one, other = Fixed(0.1, 0.5), Fixed(0.9, 0.2)
    plain, weighed = Combined([one, other]), Combined([(one, 1), (other, 1)])
    assert plain.selectors == weighed.selectors


def test_whom_the_best_sentences_mention_is_raised():
    texts = [
        "Acme was founded by ann lee.",
        "It sells tea.",
        "She was born in Oslo.",
        "Annie left.",
    ]
    titles = ["Acme", "Acme", "Ann Lee (founder)", "Ann"]
    asked = reading("Where was the founder of Acme born?", *texts, titles=titles)
    found = Mentions(Fixed(0.9, 0.5, 0.1, 0.2), best=1, weight=0.5).similarities(asked)
    np.testing.assert_allclose(found, np.array([0.9, 0.5, 0.6, 0.7]) / 1.5, rtol=1e-6)
    titles[3] = "Annie"  # a title that stands in its own sentences alone
    asked = reading("Where was the founder of Acme born?", *texts, titles=titles)
    found = Mentions(Fixed(0.2, 0.1, 0.1, 0.9), best=1, weight=0.5).similarities(asked)
    np.testing.assert_allclose(found, np.array([0.2, 0.1, 0.1, 0.9]) / 1.5, rtol=1e-6)
    two = Mentions(Fixed(0.2, 0.1, 0.1, 0.9), best=2, weight=0.5).similarities(asked)
    assert two[2] == pytest.approx(0.6 / 1.5), "the second best mentions her"
    assert not Mentions(Fixed()).similarities(reading("q")).size


def test_mentions_pass_on_what_their_selector_has():
    assert Mentions(Lexical("de")).language == "de" and Mentions(Fixed()).language == "en"
    assert Mentions(Fixed()).cache_for([1, 2]) is None
    for arguments, message in (
        (dict(selector=Lexical), "the class Lexical"),
        (dict(best=0), "best must be a whole number"),
        (dict(weight=0), "weight must be a finite number above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Mentions(**(dict(selector=Fixed()) | arguments))
    with pytest.raises(ValueError, match="finite similarities"):
        Mentions(Fixed(math.nan)).similarities(reading("q", "one"))
