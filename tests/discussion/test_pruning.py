"""Learning which edges and agents a discussion can do without."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from radar_core.discussion import agent_dropout, agent_prune
from radar_core.discussion.learned_edges import LearnedEdges
from radar_core.discussion.settings import described
from radar_core.topology import Topology

NAMES = ["a", "b", "c", "d"]
COMPLETE = Topology.complete(NAMES)
# Edges of which the discussion profits, one of them against the order of the names.
USEFUL = {("a", "b"), ("d", "c")}
HARMFUL = {("a", "c"), ("b", "d"), ("a", "d")}
NOTHING = Topology([], NAMES)


def worth(edges):
    return sum(edge in USEFUL for edge in edges) - sum(edge in HARMFUL for edge in edges)


async def by_spatial(schedule, item):
    return worth(schedule.spatial.edges)


def prune(seed=0, spatial=COMPLETE, temporal=NOTHING, utility=by_spatial, **options):
    options = dict(iterations=20, batch_size=8, every=5, seed=seed) | options
    return asyncio.run(agent_prune(spatial, temporal, utility, ["item"], **options))


def test_useful_edges_stay_and_harmful_ones_go():
    kept = [set(prune(seed).schedule.spatial.edges) for seed in range(6)]
    useful = sum(len(USEFUL & edges) for edges in kept)
    harmful = sum(len(HARMFUL & edges) for edges in kept)
    # Pruning leaves 4 of 12 edges. By chance a third of the 12 useful and of the 18 harmful ones
    # would stay: the probability of so many and so few is below 1e-4.
    assert useful >= 11 and harmful <= 1


def test_temporal_edges_are_learned_too():
    async def by_temporal(schedule, item):
        return worth(schedule.temporal.edges)

    kept = [
        set(prune(seed, NOTHING, COMPLETE, by_temporal).schedule.temporal.edges)
        for seed in range(6)
    ]
    assert sum(len(USEFUL & edges) for edges in kept) >= 11
    assert sum(len(HARMFUL & edges) for edges in kept) <= 1


def test_a_baseline_tells_edges_apart_where_all_utilities_are_high():
    async def high(schedule, item):
        return 10 + worth(schedule.spatial.edges)

    def found(baseline):
        kept = [
            set(prune(seed, utility=high, baseline=baseline).schedule.spatial.edges)
            for seed in range(6)
        ]
        return sum(len(USEFUL & edges) - len(HARMFUL & edges) for edges in kept)

    assert found(True) >= 11 > found(False)


def test_the_same_seed_gives_the_same_result_and_another_one_another():
    one, again, other = prune(3), prune(3), prune(4)
    assert described(one) == described(again) and one.masks == again.masks
    assert one.utilities != other.utilities


def test_masks_never_grow_and_each_pruning_takes_a_quarter():
    pruned = prune(temporal=COMPLETE)
    for kind in (0, 1):
        sizes = [len(masks[kind]) for masks in pruned.masks]
        assert sizes == [12, 9, 7, 5, 4]
        assert all(
            one[kind] > other[kind]
            for one, other in zip(pruned.masks, pruned.masks[1:], strict=False)
        )
    assert set(pruned.schedule.spatial.edges) <= pruned.masks[-1][0]
    assert len(pruned.utilities) == 20


def test_every_graph_is_acyclic_within_a_round_and_nobody_sends_to_itself():
    seen = []

    async def look(schedule, item):
        schedule.spatial.order()  # raises where there is a cycle
        seen.append(schedule)
        return 1.0

    loops = Topology([*COMPLETE.edges, ("a", "a")], NAMES)
    pruned = prune(spatial=loops, temporal=loops, utility=look)
    pruned.schedule.spatial.order()
    assert len(seen) == 160
    edges = {edge for schedule in seen for edge in schedule.temporal.edges}
    assert edges == set(COMPLETE.edges)
    spatial = {edge for schedule in seen for edge in schedule.spatial.edges}
    assert spatial == set(COMPLETE.edges)


def test_a_low_rank_term_changes_what_is_learned_only_if_asked_for():
    async def nothing(schedule, item):
        return 0.0

    plain, low_rank = prune(utility=nothing), prune(utility=nothing, low_rank=1.0)
    assert plain.masks != low_rank.masks


def test_items_are_used_in_turn():
    seen = []

    async def look(schedule, item):
        seen.append(item)
        return 0.0

    asyncio.run(agent_prune(COMPLETE, NOTHING, look, [1, 2, 3], iterations=2, batch_size=4))
    assert seen == [1, 2, 3, 1, 2, 3, 1, 2]


def test_drawn_edges_have_the_probability_that_their_logits_say():
    edges = LearnedEdges(COMPLETE, 1, acyclic=False)
    with torch.no_grad():
        edges.logits[0, 0, 1] = 2.0
        edges.logits[0, 1, 0] = -1.0
    generator = torch.Generator().manual_seed(0)
    drawn = [edges.draw(generator)[0][0].edges for _ in range(2000)]
    for edge, logit in ((("a", "b"), 2.0), (("b", "a"), -1.0), (("c", "d"), 0.0)):
        expected = float(torch.tensor(logit).sigmoid())
        assert abs(sum(edge in one for one in drawn) / 2000 - expected) < 0.05


def test_log_probabilities_are_those_of_the_draw():
    pair = Topology([("a", "b"), ("b", "a")], ["a", "b"])
    edges = LearnedEdges(pair, 1, acyclic=True)
    with torch.no_grad():
        edges.logits[0, 0, 1] = 1.0
        edges.logits[0, 1, 0] = -2.0
    p, q = (float(torch.tensor(logit).sigmoid()) for logit in (1.0, -2.0))
    expected = {(("a", "b"),): p, (("b", "a"),): (1 - p) * q, (): (1 - p) * (1 - q)}
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(200):
        (drawn,), log_probability = edges.draw(generator)
        assert float(log_probability.detach().exp()) == pytest.approx(expected[drawn.edges])
        seen.add(drawn.edges)
    assert seen == set(expected)


def dropout(seed=0, spatial=COMPLETE, temporal=COMPLETE, utility=None, **options):
    options = dict(agent_batches=3, edge_batches=2, every=1, seed=seed) | options
    return asyncio.run(agent_dropout(spatial, temporal, utility, ["item"], **options))


async def without_c_then_a(rounds, item):
    """c is a nuisance in the first round, a in the second."""
    return 2.0 - ("c" not in rounds.silent[0]) - ("a" not in rounds.silent[1])


def test_agents_that_do_harm_drop_out_of_their_round():
    silent = [dropout(seed, utility=without_c_then_a).rounds.silent for seed in range(10)]
    # By chance each would be found in a quarter of 10 runs; 8 or more: below 5e-4.
    assert sum(first == {"c"} for first, _ in silent) >= 8
    assert sum(second == {"a"} for _, second in silent) >= 8


def test_agents_that_help_stay():
    async def with_b(rounds, item):
        return float(all("b" not in silent for silent in rounds.silent))

    silent = [dropout(seed, utility=with_b).rounds.silent for seed in range(10)]
    assert sum("b" in quiet for of_run in silent for quiet in of_run) <= 1


def test_useful_edges_outlast_harmful_ones_in_their_round():
    async def by_edges(rounds, item):
        first, second = (schedule.spatial.edges for schedule in rounds.schedules)
        return worth(first) + (("b", "a") in second) - (("d", "b") in second)

    useful = harmful = 0
    for seed in range(3):
        result = dropout(seed, utility=by_edges, agents_out=0, edge_batches=24, every=4)
        first, second = (set(schedule.spatial.edges) for schedule in result.rounds.schedules)
        useful += len(USEFUL & first) + (("b", "a") in second)
        harmful += len(HARMFUL & first) + (("d", "b") in second)
    # 2 of 12 edges are left in each round: by chance 1.5 of 9 useful ones.
    assert useful >= 7 and harmful == 0


def test_dropout_is_the_same_for_the_same_seed_and_its_masks_never_grow():
    result = dropout(5, utility=without_c_then_a)
    assert described(result) == described(dropout(5, utility=without_c_then_a))
    for (near, far), (near_later, far_later) in zip(result.masks, result.masks[1:], strict=False):
        assert all(one >= other for one, other in zip(near, near_later, strict=True))
        assert all(one >= other for one, other in zip(far, far_later, strict=True))
    assert result.masks[0][1][0] == frozenset()  # nothing comes before the first round
    for round, (schedule, quiet) in enumerate(
        zip(result.rounds.schedules, result.rounds.silent, strict=True)
    ):
        schedule.spatial.order()
        assert len(quiet) == 1
        assert not any(quiet & set(edge) for edge in schedule.spatial.edges)
        assert not any(b in quiet for _, b in schedule.temporal.edges)
        if round:
            before = result.rounds.silent[round - 1]
            assert not any(a in before for a, _ in schedule.temporal.edges)


@pytest.mark.parametrize("agents", [2, 3, 7])
@pytest.mark.parametrize("rounds", [1, 3])
def test_any_number_of_agents_and_rounds(agents, rounds):
    async def flat(given, item):
        assert len(given) == rounds
        return 1.0

    graph = Topology.complete(agents)
    result = dropout(
        spatial=graph, temporal=graph, utility=flat, rounds=rounds, agent_batches=1, edge_batches=1
    )
    assert len(result.rounds) == rounds


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(temporal=Topology.complete(["a", "b"])), "the same agents in the same order"),
        (dict(rate=1.0), "rate must lie between 0 and 1"),
        (dict(iterations=0), "iterations must be a whole number"),
        (dict(batch_size=True), "batch_size must be a whole number"),
        (dict(learning_rate=float("nan")), "learning_rate must be a number of at least 0"),
        (dict(learning_rate="0.1"), "learning_rate must be a number of at least 0"),
        (dict(low_rank=-1), "low_rank must be a number of at least 0"),
        (dict(seed="x"), "seed must be a whole number"),
        (dict(seed=2**63), "seed must be a whole number of at most 64 bits"),
        (dict(utility=None), "utility is a NoneType that cannot be called"),
    ],
)
def test_unusable_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        prune(**change)


@pytest.mark.parametrize("name", ["nuclear", "closeness", "tolerance", "learning_rate"])
def test_unusable_weights_of_dropout_are_refused_before_anything_is_tried(name):
    async def never(rounds, item):
        raise AssertionError("nothing is to be tried")

    for value in (float("nan"), float("inf"), -1, None, True):
        with pytest.raises(ValueError, match=f"{name} must be a number of at least 0 and finite"):
            dropout(utility=never, **{name: value})
    with pytest.raises(ValueError, match="seed must be a whole number"):
        dropout(utility=never, seed=None)


@pytest.mark.parametrize("value", [None, "1", "x", [1.0], float("inf"), 10**400, torch.ones(2)])
@pytest.mark.parametrize("learn", [prune, dropout])
def test_a_utility_that_is_no_finite_number_is_named_with_its_item(learn, value):
    async def utility(graph, item):
        return value

    with pytest.raises(ValueError, match=r"a utility must be a finite number.* the item 'item'"):
        learn(utility=utility)


@pytest.mark.parametrize("one", [1, True, np.True_, np.float32(1), torch.tensor(1.0)])
def test_a_utility_may_be_any_librarys_number_or_whether_an_answer_is_right(one):
    async def utility(schedule, item):
        return one

    assert prune(utility=utility, iterations=2).utilities == (1.0, 1.0)


def test_utilities_must_be_numbers_and_agents_must_be_left():
    async def lost(schedule, item):
        return float("nan")

    with pytest.raises(ValueError, match="must be a finite number"):
        prune(utility=lost)
    with pytest.raises(ValueError, match="agents_out must be a whole number from 0 to 3"):
        dropout(utility=lost, agents_out=4)
    with pytest.raises(ValueError, match="items is empty"):
        asyncio.run(agent_prune(COMPLETE, NOTHING, lost, []))
