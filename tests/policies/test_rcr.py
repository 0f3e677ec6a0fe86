"""RCR-Router: what is routed, within the budget, whatever was said."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radar_core.anchors import anchor_spans, render_chat
from radar_core.embedded import load_encoder, load_tokenizer
from radar_core.methods import SPA
from radar_core.policies import FullContext, Importance, RCRRouter, RoleProfile
from radar_core.policies.tokens import token_counter
from radar_core.topology import Topology
from tests.policies.turns import AGENTS, HashedWords, anchored, context, turn

RECENCY = Importance(semantic=0, role=0, stage=0)
TINY = RoleProfile(0)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


def router(**changes):
    return RCRRouter(HashedWords(), **changes)


def routed(policy, now):
    return [item.text for item in policy.route(now).items]


# --- properties ---------------------------------------------------------------------------------

WORDS = st.sampled_from(
    ["the", "budget", "is", "40,000.", "Plan:", "Answer:", "not", "so.", "\n\n", "\n",
     "e\u0301", "😀", "👩\u200d🔬", "한국어", "ﷺ", "👍🏽", "x" * 70, "\u0301",
     "Fact [a] (0.9):", "<|im_end|>"]
)  # fmt: skip
TEXTS = st.lists(WORDS, max_size=40).map(" ".join) | st.text(
    st.characters(codec="utf-8"), max_size=60
)
SAID = st.lists(
    st.tuples(st.sampled_from(AGENTS), st.integers(0, 3), TEXTS),
    max_size=6,
)
ROUTERS = st.fixed_dictionaries(
    dict(
        base_budget=st.integers(16, 120),
        item_tokens=st.integers(1, 40),
        near_duplicate=st.sampled_from([0.5, 0.9, 1]),
        importance=st.sampled_from([Importance(), RECENCY]),
        default_role=st.sampled_from([TINY, RoleProfile(30, ("answer",), ("budget",))]),
    )
)


@pytest.fixture(params=["estimate", "model's"])
def counting(request, tokenizer):
    return None if request.param == "estimate" else tokenizer


@settings(deadline=None, max_examples=60)
@given(SAID, ROUTERS, st.sampled_from([None, "plan", "decide"]))
def check_every_promise(counting, said, arguments, stage):
    now = turn(said, round=3, stage=stage, roles={"solver": "Budget Expert"})
    count = token_counter(counting)
    policy = router(tokenizer=counting, **arguments)
    result = policy.route(now)
    assert result.budget == policy.base_budget + policy.default_role.budget
    assert result.tokens == count(result.text) <= result.budget
    assert bool(result.items) == bool(result.memory)
    heard = [text for sender, _, text in said if sender != "after"]
    assert bool(result.memory) == any(text.strip() for text in heard)
    places = [item.source for item in result.items]
    assert places == sorted(places)
    for item in result.items:
        index, start, end = item.source
        assert now.transcript.messages[index].text[start:end] == item.text
        assert item.text == item.text.strip() != ""
        item.text.encode()
        assert f"{item.text}\n\n" in result.text
    assert router(tokenizer=counting, **arguments).route(now) == result
    hard = context(policy, now)
    assert result.text in hard.messages[-1]["content"]
    soft = context(replace(policy, hard=False), now)
    assert soft.messages == context(FullContext(), now).messages
    assert anchored(soft) == [item.text for item in result.items]


def test_every_promise_whatever_is_said(counting):
    check_every_promise(counting)


# --- what is shown ------------------------------------------------------------------------------


def test_hard_shows_the_routed_items_in_order_and_nothing_else():
    said = [
        ("far", 0, "The budget was set. It rains."),
        ("near", 1, "Plan: spend it."),
        ("solver", 1, "The answer is 40,000."),
        ("after", 1, "Unheard budget."),
    ]
    shown = context(router(), turn(said, system="You solve."))
    assert shown.messages == [
        {"role": "system", "content": "You solve."},
        {
            "role": "user",
            "content": "What of the conversation so far matters to you:\n\n"
            "[far, round 0, fact]\nThe budget was set. It rains.\n\n"
            "[near, round 1, plan]\nPlan: spend it.\n\n"
            "[solver (you), round 1, answer]\nThe answer is 40,000.\n\n"
            "Your task, solver:\nWhat is the budget?",
        },
    ]
    assert shown.anchors == () and shown.seconds > 0
    alone = context(router(), turn([]))
    assert alone.messages[0]["content"] == "Your task, solver:\nWhat is the budget?"


def test_soft_shows_everything_and_anchors_the_same_items(tokenizer):
    said = [("near", round, f"Item {round} says nothing new.") for round in range(9)]
    policy = router(base_budget=60, default_role=TINY, importance=RECENCY, tokenizer=tokenizer)
    soft = replace(policy, hard=False, method=SPA(1.4))
    items = routed(policy, turn(said))
    assert 0 < len(items) < 9
    shown = context(soft, turn(said))
    assert shown.messages == context(FullContext(), turn(said)).messages
    assert anchored(shown) == items and shown.method == SPA(1.4)
    query = context(replace(soft, anchor_query=True), turn(said))
    assert anchored(query) == [*items, "What is the budget?"]
    rendered = render_chat(tokenizer, query.messages)
    spans = anchor_spans(rendered, query.anchors)
    assert [rendered.text[start:end] for start, end in spans] == anchored(query)


def test_the_first_item_is_cut_to_the_budget_and_keeps_its_heading_if_that_is_short():
    text = "word " * 200 + "end."
    policy = router(base_budget=40, default_role=TINY)
    (item,) = policy.route(turn([("near", 0, text), ("near", 0, "Short.")])).items
    assert item.text and text.startswith(item.text)
    result = policy.route(turn([("near", 0, text)]))
    assert result.text.startswith("[near, round 0, fact]\nword word") and result.tokens == 40
    named = Topology.chain(["near" * 30, "solver"])
    bare = policy.route(turn([("near" * 30, 0, text)], topology=named))
    assert bare.text.startswith("word word") and bare.tokens == 40


@pytest.mark.parametrize(
    "unit", ["e\u0301", "👩\u200d🔬", "👍🏽", "한", "\U0001f468\u200d\U0001f469\u200d\U0001f466"]
)
def test_a_cut_parts_no_character_from_what_belongs_to_it(unit):
    policy = router(base_budget=17, default_role=TINY)
    for lead in range(5):
        (item,) = policy.route(turn([("near", 0, "a" * lead + unit * 90)])).items
        assert re.fullmatch(f"a{{{lead}}}(?:{unit})+", item.text)


def test_a_budget_that_holds_no_character_is_an_error():
    class Spells:
        def encode(self, text):
            return [0] * 20 * len(text)

    with pytest.raises(ValueError, match=r"does not hold one character .* raise base_budget"):
        router(base_budget=16, default_role=TINY, tokenizer=Spells()).route(
            turn([("near", 0, "Hello.")])
        )


def test_a_whole_that_takes_more_tokens_than_its_parts_stays_within_the_budget():
    class Quadratic:
        def encode(self, text):
            return [0] * (len(text) ** 2 // 400 + 1)

    said = [("near", round, f"Item {round} says nothing new.") for round in range(9)]
    policy = router(base_budget=40, default_role=TINY, importance=RECENCY, tokenizer=Quadratic())
    result = policy.route(turn(said))
    assert 1 < len(result.items) < 9 and result.tokens <= 40
    assert result.items[-1].round == 8


# --- what is chosen -----------------------------------------------------------------------------


def test_what_does_not_fit_is_passed_over_and_smaller_items_are_taken():
    said = [("near", 0, "Small."), ("near", 1, "Larger " * 20 + "end."), ("near", 2, "New.")]
    policy = router(base_budget=30, default_role=TINY, importance=RECENCY)
    assert routed(policy, turn(said)) == ["Small.", "New."]


def test_of_equals_the_newer_round_and_then_the_earlier_in_the_transcript_goes_first():
    said = [("near", 0, "Item one."), ("near", 1, "Item two."), ("near", 1, "Item three.")]
    equal = Importance(semantic=0, role=0, stage=0, recency=0)
    policy = router(base_budget=16, default_role=TINY, importance=equal)
    assert routed(policy, turn(said)) == ["Item two."]


def test_near_duplicates_are_shown_once_but_another_number_is_another_thing():
    said = [
        ("near", 0, "The result of the sum is 41."),
        ("far", 1, "the result of the sum is 41"),
        ("near", 2, "The result of the sum is 42."),
    ]
    assert routed(router(importance=RECENCY), turn(said)) == [said[1][2], said[2][2]]


def test_terms_of_the_importance():
    said = [
        ("near", 0, "Plan: look at the gold."),
        ("near", 1, "A census of rivers."),
        ("far", 2, "The answer is Oxford."),
    ]
    now = turn(said, round=3, roles={"solver": "Gold Planner", "far": "Miner"}, stage="plan")

    def scores(**weights):
        zero = dict(semantic=0, role=0, stage=0, recency=0)
        return list(router(importance=Importance(**(zero | weights))).route(now).scores)

    assert scores(role=1) == pytest.approx([1.1, 0, 0])
    assert scores(stage=1) == [1, 0.5, 0]
    assert scores(recency=1, gamma=0.5) == [0.125, 0.25, 0.5]
    alike = router(importance=Importance(role=0, stage=0, recency=0)).route(
        replace(now, task="look at the gold")
    )
    assert max(alike.scores) == alike.scores[0] > 0.3
    every = list(router().route(now).scores)
    semantic = scores(semantic=1)
    expected = [semantic[0] + 0.66 + 0.4, semantic[1] + 0.2, semantic[2]]
    recency = [0.3 * 0.9**age for age in (3, 2, 1)]
    assert every == pytest.approx([a + b for a, b in zip(expected, recency, strict=True)])


def test_an_item_by_ones_own_role_counts_as_ones_own_kind():
    now = turn([("near", 0, "It rains.")], roles={"solver": "Critic", "near": "critic"})
    assert router(importance=Importance(semantic=0, stage=0, recency=0)).route(now).scores == (0.6,)


def test_budgets_follow_the_role():
    budgets = {
        role: router().route(turn([], roles={"solver": role})).budget
        for role in ("Planner", "the searcher", "Recommender", "Historian", "")
    }
    assert budgets == {
        "Planner": 2048,
        "the searcher": 1536,
        "Recommender": 1792,
        "Historian": 2048,
        "": 2048,
    }
    own = router(roles={"wiki searcher": RoleProfile(8)}, base_budget=100)
    for role, budget in (("Wiki Searcher", 108), ("Searcher", 1636)):
        assert own.route(turn([], roles={"solver": role})).budget == budget


def test_feedback_a_corrected_item_is_no_longer_routed():
    said = [
        ("near", 0, "Fact [city]: Cambridge is the oldest."),
        ("near", 1, "Fact [city]: Oxford is the oldest."),
    ]
    assert routed(router(), turn(said[:1])) == ["Fact [city]: Cambridge is the oldest."]
    assert routed(router(), turn(said)) == ["Fact [city]: Oxford is the oldest."]


def test_without_the_semantic_term_no_encoder_is_asked():
    class Unused:
        def encode(self, texts):
            raise AssertionError("the encoder was asked")

    assert routed(RCRRouter(Unused(), importance=RECENCY), turn([("near", 0, "Hi.")])) == ["Hi."]


def test_an_unknown_stage_is_said_once(caplog):
    policy = router()
    for _ in range(2):
        policy.route(turn([("near", 0, "Hi."), ("near", 0, "Ho.")], stage="rebut"))
    assert caplog.text.count("knows no stage 'rebut' (it knows plan, search, decide)") == 1


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: router(base_budget=15), "base_budget"),
        (lambda: router(item_tokens=0), "item_tokens"),
        (lambda: router(near_duplicate=0), "near_duplicate"),
        (lambda: router(tokenizer="gpt"), "tokenizer must have encode"),
        (lambda: Importance(recency=-1), "recency"),
        (lambda: Importance(gamma=0), "gamma"),
        (lambda: RoleProfile(1.5), "budget"),
    ],
)
def test_unusable_settings_are_refused(build, said):
    with pytest.raises(ValueError, match=said):
        build()


def test_the_real_encoder_routes_evidence_about_the_task():
    said = [
        ("near", 0, "I had soup for lunch and it was good."),
        ("near", 0, "The river Ohio flows past a town called Oxford."),
        ("near", 0, "Cats sleep most of the day in the sun."),
    ]
    policy = RCRRouter(load_encoder(), base_budget=24, default_role=TINY)
    now = turn(said, task="Which river flows through Oxford?")
    assert routed(policy, now) == ["The river Ohio flows past a town called Oxford."]
