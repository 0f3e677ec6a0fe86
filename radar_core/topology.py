"""Who talks to whom: a directed graph of agents and the hops between them."""

from __future__ import annotations

import csv
import difflib
import itertools
import json
import os
import random as random_numbers
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import networkx
from radar_core.checks import check_whole, is_number

__all__ = ["Topology"]

Edge = tuple[str, str]
Node = TypeVar("Node")


class Topology:
    """A directed communication graph; an edge (a, b) means that a's messages go to b.

    The number of hops from a sender to a receiver is the length of the shortest directed path
    (d_G(v_j, v_i) of Agent-Radar, arXiv 2605.30136, section 2).

    Args:
        edges: pairs (sender, receiver) of agent names, or a networkx graph whose nodes are names
            (in an undirected graph every edge counts both ways).
        agents: names of all agents, to fix their order or to add some without an edge; None takes
            the names in the order in which the edges mention them.

    Raises:
        ValueError: if there is no agent, a name is no non-empty str or is given twice, an edge is
            no pair, or an edge names an agent that `agents` lacks.
        ImportError: if networkx is not installed.
    """

    def __init__(
        self, edges: Iterable[Edge] | networkx.Graph, agents: Iterable[str] | None = None
    ) -> None:
        networkx = _networkx()
        if isinstance(edges, networkx.Graph):
            mentioned = list(edges.nodes)
            edges = list(edges.to_directed().edges())
        else:
            edges = [_pair(edge) for edge in edges]
            mentioned = list(dict.fromkeys(itertools.chain.from_iterable(edges)))
        names = mentioned if agents is None else _names(agents)
        for name in (*names, *mentioned):
            _check_name(name)
        known = set(names)
        unknown = [name for name in mentioned if name not in known]
        if unknown:
            raise ValueError(
                f"an edge names {unknown[0]!r}, which is not among the agents: {', '.join(names)}"
            )
        if not names:
            raise ValueError("a topology needs at least one agent")
        self._graph = networkx.DiGraph()
        self._graph.add_nodes_from(names)
        self._graph.add_edges_from(edges)
        networkx.freeze(self._graph)
        self._hops_to: dict[str, dict[str, int]] = {}

    @property
    def agents(self) -> tuple[str, ...]:
        """The names of all agents, in order."""
        return tuple(self._graph.nodes)

    @property
    def edges(self) -> tuple[Edge, ...]:
        """All edges as (sender, receiver)."""
        return tuple(self._graph.edges)

    def __repr__(self) -> str:
        return f"Topology({len(self.agents)} agents, {len(self.edges)} edges)"

    def hops(self, sender: str, receiver: str) -> int:
        """Count the hops from one agent to another.

        Args:
            sender: name of the agent that wrote.
            receiver: name of the agent that reads.

        Returns:
            The length of the shortest directed path: 0 from an agent to itself, -1 without a path.

        Raises:
            ValueError: if an agent is unknown.
        """
        self.check_agent(sender, "sender")
        return self.hops_to(receiver)[sender]

    def hops_to(self, receiver: str) -> dict[str, int]:
        """Count the hops from every agent to one.

        Args:
            receiver: name of the agent that reads.

        Returns:
            Hops by the sender's name, in the order of `agents`; -1 where no path leads.

        Raises:
            ValueError: if the agent is unknown.
        """
        self.check_agent(receiver, "receiver")
        if receiver not in self._hops_to:
            lengths = _networkx().single_target_shortest_path_length(self._graph, receiver)
            found = dict(lengths)
            self._hops_to[receiver] = {agent: found.get(agent, -1) for agent in self.agents}
        return dict(self._hops_to[receiver])

    def acyclic(self) -> Topology:
        """Leave out edges so that no cycle remains, by the rule of AgentPrune and AgentDropout.

        The edges are taken sender by sender, receivers in the order of `agents`, and one that would
        close a cycle with those taken before is left out. So is an edge from an agent to itself.

        Returns:
            A topology of the same agents.
        """
        growing = GrowingGraph(self.agents)
        for a, b in itertools.product(self.agents, repeat=2):
            if self._graph.has_edge(a, b) and not growing.closes_cycle(a, b):
                growing.add(a, b)
        return Topology(growing.edges, self.agents)

    def order(self) -> tuple[str, ...]:
        """Sort the agents so that each comes after all that send to it.

        Kahn's algorithm with a first-in, first-out queue, which starts with the agents nobody sends
        to, in the order of `agents`.

        Returns:
            The names of all agents.

        Raises:
            ValueError: if there is a cycle; names it.
        """
        networkx = _networkx()
        try:
            return tuple(networkx.topological_sort(self._graph))
        except networkx.NetworkXUnfeasible:
            cycle = [a for a, _ in networkx.find_cycle(self._graph)]
            raise ValueError(
                f"the topology has a cycle, {' -> '.join([*cycle, cycle[0]])}, so its agents have "
                "no order; acyclic() leaves out what closes cycles"
            ) from None

    def check_agent(self, name: str, argument: str = "agent") -> None:
        """Raise unless the topology has an agent of this name.

        Args:
            name: the name to look for.
            argument: what the error calls it.

        Raises:
            ValueError: if the agent is unknown; lists the known ones and the closest of them.
        """
        if isinstance(name, str) and name in self._graph:
            return
        close = difflib.get_close_matches(str(name), self.agents, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise ValueError(
            f"{argument} {name!r} is not in the topology{hint} Known agents: "
            f"{', '.join(self.agents)}. Correct the name, or add the agent to the topology"
        )

    @classmethod
    def from_edges(cls, edges: Iterable[Edge], agents: Iterable[str] | None = None) -> Topology:
        """Build a topology from (sender, receiver) pairs; the same as `Topology(edges, agents)`."""
        return cls(edges, agents)

    @classmethod
    def layered(cls, sizes: Iterable[int | Iterable[str]]) -> Topology:
        """Build layers in which every agent sends to every agent of the next layer.

        Args:
            sizes: agents per layer, first layer first, named "layer1-agent1" and so on; or the
                names themselves, one list a layer.

        Returns:
            The topology.

        Raises:
            ValueError: if there is no layer or an empty one.
        """
        layers: list[list[str]] = []
        for number, layer in enumerate(sizes, start=1):
            if isinstance(layer, int):
                check_whole(f"the size of layer {number}", layer, 1)
                layers.append([f"layer{number}-agent{place + 1}" for place in range(layer)])
            else:
                layers.append(_names(layer))
            if not layers[-1]:
                raise ValueError(f"layer {number} is empty; every layer needs an agent")
        edges = [
            edge
            for here, following in itertools.pairwise(layers)
            for edge in itertools.product(here, following)
        ]
        return cls(edges, [name for layer in layers for name in layer])

    @classmethod
    def complete(cls, agents: int | Iterable[str]) -> Topology:
        """Build a group chat in which everybody sends to everybody else.

        Args:
            agents: number of agents, named "agent1" and so on, or their names.

        Returns:
            The topology; all hops are 1.

        Raises:
            ValueError: if the number or a name is unusable.
        """
        names = agent_names(agents)
        return cls(itertools.permutations(names, 2), names)

    @classmethod
    def debate(cls, agents: int | Iterable[str]) -> Topology:
        """Build a debate: everybody reads everybody's last answer, which is `complete`."""
        return cls.complete(agents)

    @classmethod
    def chain(cls, agents: int | Iterable[str]) -> Topology:
        """Build a chain in which each agent sends to the next.

        Args:
            agents: number of agents, named "agent1" and so on, or their names in order.

        Returns:
            The topology.

        Raises:
            ValueError: if the number or a name is unusable.
        """
        names = agent_names(agents)
        return cls(itertools.pairwise(names), names)

    @classmethod
    def star(cls, agents: int | Iterable[str], both_ways: bool = True) -> Topology:
        """Build a star around the first agent.

        Args:
            agents: number of agents, named "agent1" and so on, or their names, the centre first.
            both_ways: whether the others also send to the centre (and so reach each other in two
                hops); False is the star of AgentPrune, where only the centre sends.

        Returns:
            The topology.

        Raises:
            ValueError: if the number or a name is unusable.
        """
        names = agent_names(agents)
        outwards = [(names[0], name) for name in names[1:]]
        return cls(outwards + [(b, a) for a, b in outwards] * both_ways, names)

    @classmethod
    def random(
        cls, agents: int | Iterable[str], probability: float = 0.5, seed: int = 0
    ) -> Topology:
        """Draw every ordered pair of different agents as an edge with the same probability.

        This is the "Random" mask of AgentPrune and AgentDropout (there with probability 0.5 and no
        seed), before those systems drop edges that close a cycle within one round; `acyclic` drops
        them, and `Schedule.random` gives what they run.

        Args:
            agents: number of agents, named "agent1" and so on, or their names.
            probability: of each edge, from 0 to 1.
            seed: of the draw; the same seed gives the same graph on every machine.

        Returns:
            The topology.

        Raises:
            ValueError: if a value is unusable.
        """
        names = agent_names(agents)
        return cls(draw_edges(names, probability, random_numbers.Random(seed)), names)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Topology:
        """Read a topology from an edge list.

        Text files have one edge a line: `a -> b`, `b <- a`, `a <-> b` (both ways), `a, b` (CSV,
        quotes allowed) or `a b`; arrows may form a chain, `a -> b -> c`; a single name adds an
        agent without an edge; blank lines are skipped, and so is what follows a # at the start of
        a line or after a blank (but not in a line with quotes). A .json file, or one that begins
        with `[[` or `{"`, holds a list of pairs, or `{"edges": [[a, b], ...], "agents": [...]?}`.

        Args:
            path: the file, UTF-8 (a byte order mark is allowed).

        Returns:
            The topology.

        Raises:
            ValueError: with file and line, if something in the file is unusable.
            OSError: if the file cannot be read.
        """
        file = Path(path)
        try:
            text = file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8: {error.reason}") from None
        if file.suffix.lower() == ".json" or re.match(r"\s*(\[\s*\[|\{\s*\")", text):
            edges, agents = _json_edges(text, path)
        else:
            edges, agents = _text_edges(text, path)
        try:
            return cls(edges, agents)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


class GrowingGraph(Generic[Node]):
    """A graph that edges are added to one by one, which knows who reaches whom.

    Args:
        nodes: all there are.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.edges: list[tuple[Node, Node]] = []
        self._reached = {node: {node} for node in nodes}

    def closes_cycle(self, a: Node, b: Node) -> bool:
        """Tell whether an edge from a to b would close a cycle; one from a node to itself does."""
        return a in self._reached[b]

    def add(self, a: Node, b: Node) -> None:
        """Add an edge from a to b."""
        self.edges.append((a, b))
        for reached in self._reached.values():
            if a in reached:
                reached |= self._reached[b]


def _networkx() -> Any:
    try:
        import networkx
    except ImportError as error:
        raise ImportError(
            'a topology needs networkx; run: pip install "radar-kernels[agents]"'
        ) from error
    return networkx


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"agent names must be non-empty str, got {name!r}")


def _names(names: Iterable[str]) -> list[str]:
    if isinstance(names, str):
        raise ValueError(f"expected a list of agent names, got the single str {names!r}")
    if not isinstance(names, Iterable):
        raise ValueError(f"expected a whole number of agents or a list of names, got {names!r}")
    listed = list(names)
    for name in listed:
        _check_name(name)
    twice = [name for name, count in Counter(listed).items() if count > 1]
    if twice:
        raise ValueError(f"agent names must differ; given twice: {', '.join(twice)}")
    return listed


def agent_names(agents: int | Iterable[str]) -> list[str]:
    """Return the names of so many agents, "agent1" and so on, or the given ones, checked."""
    if isinstance(agents, int):
        check_whole("the number of agents", agents, 1)
        return [f"agent{number + 1}" for number in range(agents)]
    names = _names(agents)
    if not names:
        raise ValueError("a topology needs at least one agent")
    return names


def draw_edges(names: Sequence[str], probability: float, draw: random_numbers.Random) -> list[Edge]:
    """Draw each ordered pair of different names with a probability, sender by sender."""
    if not is_number(probability) or not 0 <= probability <= 1:
        raise ValueError(f"probability must lie between 0 and 1, got {probability!r}")
    return [pair for pair in itertools.permutations(names, 2) if draw.random() < probability]


def _pair(edge: Any) -> Edge:
    if isinstance(edge, str) or not isinstance(edge, Sequence) or len(edge) != 2:
        raise ValueError(f"an edge must be a pair (sender, receiver), got {edge!r}")
    for name in edge:
        _check_name(name)
    return edge[0], edge[1]


def _text_edges(text: str, path: str | os.PathLike[str]) -> tuple[list[Edge], list[str]]:
    edges: list[Edge] = []
    agents: dict[str, None] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.strip()
        if '"' not in line or line.startswith("#"):
            line = re.sub(r"(^|\s+)#.*", "", line)
        if not line:
            continue
        names, arrows = _split_line(line)
        if len(names) != len(arrows) + 1 or not all(names):
            raise ValueError(
                f"{path}:{number}: expected two agent names ('a -> b', 'a, b' or 'a b'), a chain "
                f"'a -> b -> c' or one name, got {line!r}"
            )
        agents.update(dict.fromkeys(names))
        for (here, there), arrow in zip(itertools.pairwise(names), arrows, strict=True):
            edges += [(here, there)] * (arrow != "<-")
            edges += [(there, here)] * (arrow != "->")
    return edges, list(agents)


def _split_line(line: str) -> tuple[list[str], list[str]]:
    """Cut a line into names and the arrows between them; one arrow stands for any other sign."""
    parts = [part.strip() for part in re.split("(<->|->|<-)", line)]
    if len(parts) > 1:
        return parts[::2], parts[1::2]
    if "," in line or line.startswith('"'):
        names = [name.strip() for name in next(csv.reader([line], skipinitialspace=True))]
    else:
        names = line.split()
    return names, ["->"] * (len(names) == 2)


def _json_edges(
    text: str, path: str | os.PathLike[str]
) -> tuple[Iterator[Edge] | list[Edge], list[str] | None]:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    except RecursionError:
        raise ValueError(f"{path}: the JSON is nested too deeply") from None
    except ValueError as error:  # a number with thousands of digits
        raise ValueError(f"{path}: {error}") from None
    agents = None
    if isinstance(content, Mapping):
        agents = content.get("agents")
        content = content.get("edges")
    if not isinstance(content, list) or not (agents is None or isinstance(agents, list)):
        raise ValueError(
            f'{path}: expected a list of pairs or {{"edges": [[a, b], ...], "agents": [...]}}'
        )
    return content, agents
