"""Hop counts of every topology, and what files are read as."""

import itertools
import time

import networkx
import pytest

from radar_core.topology import Topology


def oracle(topology):
    """Hops by relaxing all edges until nothing changes."""
    hops = {
        pair: 0 if pair[0] == pair[1] else None
        for pair in itertools.product(topology.agents, repeat=2)
    }
    for _ in topology.agents:
        for (a, b), target in itertools.product(topology.edges, topology.agents):
            onward = hops[b, target]
            if onward is not None and (hops[a, target] is None or onward + 1 < hops[a, target]):
                hops[a, target] = onward + 1
    return {pair: -1 if count is None else count for pair, count in hops.items()}


@pytest.mark.parametrize(
    "topology",
    [
        Topology.layered([3, 2, 1]),
        Topology.chain(5),
        Topology.star(4),
        Topology.star(4, both_ways=False),
        Topology.debate(3),
        *(Topology.random(7, probability=0.25, seed=seed) for seed in range(5)),
    ],
)
def test_hops_are_shortest_directed_paths(topology):
    expected = oracle(topology)
    for (sender, receiver), hops in expected.items():
        assert topology.hops(sender, receiver) == hops
    for receiver in topology.agents:
        assert topology.hops_to(receiver) == {s: expected[s, receiver] for s in topology.agents}


def test_direction_counts_a_message_travels_from_sender_to_receiver():
    chain = Topology.chain(["writer", "critic", "editor"])
    assert chain.hops("writer", "editor") == 2
    assert chain.hops("editor", "writer") == -1
    assert chain.hops("critic", "critic") == 0


def test_layers_are_named_and_fully_connected_to_the_next_one_only():
    topology = Topology.layered([2, 1, 1])
    assert topology.agents == ("layer1-agent1", "layer1-agent2", "layer2-agent1", "layer3-agent1")
    assert topology.hops_to("layer3-agent1") == {
        "layer1-agent1": 2,
        "layer1-agent2": 2,
        "layer2-agent1": 1,
        "layer3-agent1": 0,
    }
    assert topology.hops("layer1-agent1", "layer1-agent2") == -1
    named = Topology.layered([["a", "b"], ["c"]])
    assert named.edges == (("a", "c"), ("b", "c"))


def test_everybody_is_one_hop_away_in_group_chats_and_debates():
    for topology in (
        Topology.complete(4),
        Topology.debate(["agent1", "agent2", "agent3", "agent4"]),
    ):
        for a, b in itertools.permutations(topology.agents, 2):
            assert topology.hops(a, b) == 1


def test_stars_in_both_directions():
    assert Topology.star(["hub", "a", "b"]).hops("a", "b") == 2
    outward = Topology.star(["hub", "a", "b"], both_ways=False)
    assert (outward.hops("hub", "b"), outward.hops("a", "hub"), outward.hops("a", "b")) == (
        1,
        -1,
        -1,
    )


def test_random_graphs_follow_their_seed_and_probability():
    assert Topology.random(8, seed=3).edges == Topology.random(8, seed=3).edges
    assert Topology.random(8, seed=3).edges != Topology.random(8, seed=4).edges
    assert Topology.random(4, probability=0).edges == ()
    assert len(Topology.random(4, probability=1).edges) == 12
    counts = [len(Topology.random(10, probability=0.3, seed=seed).edges) for seed in range(40)]
    assert 0.27 < sum(counts) / (40 * 90) < 0.33


def test_networkx_graphs_are_taken_undirected_ones_both_ways():
    directed = networkx.DiGraph([("a", "b")])
    assert Topology(directed).hops("b", "a") == -1
    assert Topology(networkx.Graph([("a", "b")])).hops("b", "a") == 1
    directed.add_edge("b", "a")
    assert Topology(directed, agents=["b", "a", "c"]).agents == ("b", "a", "c")


def test_the_answer_is_a_copy_and_later_changes_of_the_input_do_not_matter():
    edges = [("a", "b")]
    topology = Topology.from_edges(edges)
    topology.hops_to("b")["a"] = 99
    edges.append(("b", "a"))
    assert topology.hops("a", "b") == 1
    assert topology.hops("b", "a") == -1


def test_unknown_agents_are_refused_with_the_known_and_the_closest_ones():
    topology = Topology.complete(["planner", "critic"])
    with pytest.raises(
        ValueError, match=r"sender 'planer'.*did you mean 'planner'.*planner, critic"
    ):
        topology.hops("planer", "critic")
    with pytest.raises(ValueError, match="receiver 'x'"):
        topology.hops_to("x")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Topology([]), "at least one agent"),
        (lambda: Topology([("a", "b", "c")]), "pair"),
        (lambda: Topology(["ab"]), "pair"),
        (lambda: Topology([("a", 1)]), "non-empty str"),
        (lambda: Topology([("a", "b")], agents=["a"]), "names 'b'"),
        (lambda: Topology([], agents=["a", "a"]), "given twice: a"),
        (lambda: Topology.layered([2, 0]), "layer 2"),
        (lambda: Topology.layered([["a"], []]), "layer 2"),
        (lambda: Topology.layered([["a"], ["a"]]), "given twice"),
        (lambda: Topology.layered([]), "at least one agent"),
        (lambda: Topology.chain(0), "number of agents"),
        (lambda: Topology.complete("abc"), "single str"),
        (lambda: Topology.complete([]), "at least one agent"),
        (lambda: Topology.random(3, probability=1.5), "probability"),
        (lambda: Topology.random(3, probability="x"), "probability"),
        (lambda: Topology.layered([2.0]), "got 2.0"),
        (lambda: Topology.chain(None), "got None"),
        (lambda: Topology.chain([["a"]]), "non-empty str"),
    ],
)
def test_unusable_topologies_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "# who\n\nproject lead -> coder\ncoder <-> tester\nloner\n"),
        ("a.txt", "coder<-project lead # note\ntester<->coder\t# b -> c\nloner #\n#x"),
        ("a.csv", '"project lead",coder\ncoder, tester\ntester,coder\nloner'),
        (
            "a.txt",
            ' {"edges": [["project lead", "coder"], ["coder", "tester"], ["tester", "coder"]],'
            ' "agents": ["project lead", "coder", "tester", "loner"]}',
        ),
        (
            "a.json",
            '{"edges": [["project lead", "coder"], ["coder", "tester"], ["tester", "coder"]],'
            ' "agents": ["project lead", "coder", "tester", "loner"]}',
        ),
    ],
)
def test_edge_lists_in_files(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, "utf-8-sig")
    topology = Topology.from_file(path)
    assert sorted(topology.agents) == ["coder", "loner", "project lead", "tester"]
    assert set(topology.edges) == {
        ("project lead", "coder"),
        ("coder", "tester"),
        ("tester", "coder"),
    }


def test_names_may_hold_a_hash(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('agent#1, "agent #2"\n')
    assert Topology.from_file(path).edges == (("agent#1", "agent #2"),)


def test_many_agents_take_no_time():
    """A hundred thousand names: quadratic work would take minutes."""
    started = time.process_time()
    assert len(Topology.chain(100_000).agents) == 100_000
    assert len(Topology([], agents=map(str, range(100_000))).agents) == 100_000
    assert time.process_time() - started < 20


def test_blanks_separate_names_where_nothing_else_does(tmp_path):
    path = tmp_path / "a.edges"
    path.write_text("a b\nb\tc\r\n")
    assert Topology.from_file(path).edges == (("a", "b"), ("b", "c"))
    path.write_text("a -> big b <-> c\nd\n")
    chain = Topology.from_file(path)
    assert chain.agents == ("a", "big b", "c", "d")
    assert chain.edges == (("a", "big b"), ("big b", "c"), ("c", "big b"))
    path = tmp_path / "a.json"
    path.write_text('[["a", "b"]]')
    assert Topology.from_file(path).edges == (("a", "b"),)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "a b\na b c\n", r"a\.txt:2: expected two"),
        ("a.txt", "a -> b -> ", r"a\.txt:1: expected two"),
        ("a.txt", "a ->", r"a\.txt:1: expected two"),
        ("a.txt", "\n# nothing\n", r"a\.txt: a topology needs"),
        ("a.json", '[["a", "b"],\n["a"', r"a\.json:2: not JSON"),
        ("a.json", '{"nodes": []}', r"a\.json: expected a list of pairs"),
        ("a.json", '[["a"]]', r"a\.json: an edge must be a pair"),
        ("a.json", "[" * 100_000, r"a\.json: the JSON is nested too deeply"),
        ("a.json", "[" + "9" * 5000 + "]", r"a\.json: .*5000"),
    ],
)
def test_broken_files_are_refused_with_file_and_line(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Topology.from_file(path)
