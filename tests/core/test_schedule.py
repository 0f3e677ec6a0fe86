"""One round's graphs: AgentPrune's rule, its statistics, and the order in which agents speak."""

import itertools
from collections import Counter

import networkx
import pytest

from radar_core.schedule import Schedule
from radar_core.topology import Topology

FORWARD = list(itertools.combinations([f"agent{number}" for number in range(1, 6)], 2))


def realised_by_hand(spatial, temporal):
    """The rule edge by edge, with a search of the graph as it stands for every edge."""
    graph = networkx.DiGraph()
    graph.add_nodes_from(spatial.agents)
    for edge in itertools.product(spatial.agents, repeat=2):
        if edge in spatial.edges and not networkx.has_path(graph, edge[1], edge[0]):
            graph.add_edge(*edge)
    across = {(a, b) for a, b in temporal.edges if not networkx.has_path(graph, b, a)}
    return list(graph.edges), across


def kahn(topology):
    """Agents nobody sends to come first; one joins the queue when its last sender has spoken."""
    waiting = dict.fromkeys(topology.agents, 0)
    for _, receiver in topology.edges:
        waiting[receiver] += 1
    queue = [agent for agent in topology.agents if not waiting[agent]]
    for agent in queue:
        for sender, receiver in topology.edges:
            if sender == agent:
                waiting[receiver] -= 1
                queue += [receiver] * (not waiting[receiver])
    return tuple(queue)


@pytest.mark.parametrize("seed", range(30))
def test_random_schedules_follow_the_rule_and_the_order_is_kahns(seed):
    drawn = Topology.random(6, 0.4, seed), Topology.random(6, 0.6, seed + 1000)
    schedule = Schedule.realise(*drawn)
    within, across = realised_by_hand(*drawn)
    assert list(schedule.spatial.edges) == within
    assert set(schedule.temporal.edges) == across
    assert schedule.order() == kahn(schedule.spatial)
    assert sorted(schedule.order()) == sorted(schedule.agents)
    heard = Topology.random(6, 0.4, seed).acyclic()
    assert heard.edges == schedule.spatial.edges
    assert Schedule.random(6, 0.4, seed).spatial.edges == heard.edges


def statistics(agents, draws):
    spatial = temporal = reached = 0
    hops = Counter()
    for seed in range(draws):
        schedule = Schedule.random(agents, 0.5, seed)
        spatial += len(schedule.spatial.edges)
        temporal += len(schedule.temporal.edges)
        for receiver in schedule.agents:
            hops.update(schedule.spatial.hops_to(receiver).values())
    del hops[0]  # an agent from itself
    unreachable = hops.pop(-1)
    reached = hops.total()
    shares = {distance: count / reached for distance, count in hops.items()}
    return spatial / draws, temporal / draws, shares, unreachable / (unreachable + reached)


def test_random_graphs_of_five_agents_have_the_published_statistics():
    spatial, temporal, shares, unreachable = statistics(5, 2000)
    assert spatial == pytest.approx(6.7, abs=0.1)
    assert temporal == pytest.approx(5.5, abs=0.1)
    assert shares[1] == pytest.approx(0.74, abs=0.01)
    assert shares[2] == pytest.approx(0.24, abs=0.01)
    assert shares[3] == pytest.approx(0.02, abs=0.01)
    assert unreachable == pytest.approx(0.55, abs=0.01)


def test_random_graphs_of_ten_agents_have_the_published_statistics():
    spatial, _, shares, unreachable = statistics(10, 400)
    assert spatial == pytest.approx(26.9, abs=0.4)
    assert shares[1] == pytest.approx(0.63, abs=0.01)
    assert shares[2] == pytest.approx(0.34, abs=0.01)
    assert shares[3] == pytest.approx(0.03, abs=0.01)
    assert unreachable == pytest.approx(0.52, abs=0.01)


def test_everybody_to_everybody_leaves_the_ten_forward_edges_of_each_kind():
    schedule = Schedule.complete(5)
    assert list(schedule.spatial.edges) == FORWARD
    assert list(schedule.temporal.edges) == FORWARD
    assert schedule.order() == schedule.agents


def test_debates_have_twenty_edges_from_round_to_round_and_none_within():
    schedule = Schedule.debate(5)
    assert schedule.spatial.edges == ()
    assert set(schedule.temporal.edges) == set(itertools.permutations(schedule.agents, 2))
    assert schedule.order() == schedule.agents
    assert set(schedule.topology.hops_to("agent1").values()) == {0, 1}


def test_chains_layers_and_stars():
    chain = Schedule.chain(["a", "b", "c"])
    assert chain.spatial.edges == (("a", "b"), ("b", "c"))
    assert chain.temporal.edges == ()  # the first reaches the last, whose edge back is left out
    layered = Schedule.layered(["a", "b", "c", "d", "e"])
    assert set(layered.spatial.edges) == set(itertools.product("abc", "de"))
    backwards = set(itertools.product("de", "abc"))
    assert set(layered.temporal.edges) == set(itertools.permutations("abcde", 2)) - backwards
    assert Schedule.layered(7, layers=3).spatial.edges == Topology.layered(
        [["agent1", "agent2", "agent3"], ["agent4", "agent5"], ["agent6", "agent7"]]
    ).edges  # fmt: skip
    star = Schedule.star(["hub", "a", "b"])
    assert star.spatial.edges == (("hub", "a"), ("hub", "b"))
    assert set(star.temporal.edges) == {*star.spatial.edges, ("a", "b"), ("b", "a")}


def test_later_receivers_speak_after_those_they_hear():
    edges = [("c", "a"), ("d", "a"), ("a", "b")]
    assert Topology(edges, ["a", "b", "c", "d", "e"]).order() == ("c", "d", "e", "a", "b")


def test_a_lone_agent_hears_nobody():
    for build in (Schedule.random, Schedule.complete, Schedule.chain, Schedule.debate,
                  Schedule.star):  # fmt: skip
        schedule = build(["solo"])
        assert (schedule.spatial.edges, schedule.temporal.edges) == ((), ())
        assert schedule.order() == ("solo",)


def test_what_closes_cycles_is_left_out_and_an_order_needs_that():
    cycle = Topology([("c", "a"), ("b", "c"), ("a", "b"), ("a", "a")], ["a", "b", "c"])
    with pytest.raises(ValueError, match=r"has a cycle, a -> .*acyclic\(\) leaves out"):
        cycle.order()
    with pytest.raises(ValueError, match="has a cycle"):
        Schedule(cycle, Topology.complete(["a", "b", "c"]))
    unsorted = Topology([("a", "c"), ("a", "b")], ["a", "b", "c"])
    assert unsorted.acyclic().edges == (("a", "b"), ("a", "c"))
    # Sender by sender: c -> a comes last, whatever the order in which the edges were given.
    assert cycle.acyclic().edges == (("a", "b"), ("b", "c"))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Schedule(Topology([], ["a", "b"]), Topology([], ["b", "a"])), "a, b and b, a"),
        (lambda: Schedule.realise(Topology.chain(2), Topology.chain(3)), "the same agents"),
        (lambda: Schedule.layered(3, layers=4), "from 1 to 3, the number of agents, got 4"),
        (lambda: Schedule.layered(3, layers=0), "got 0"),
        (lambda: Schedule.random(3, 2.0), "probability must lie between 0 and 1, got 2.0"),
        (lambda: Schedule.debate(0), "at least 1"),
    ],
)
def test_unusable_schedules_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
