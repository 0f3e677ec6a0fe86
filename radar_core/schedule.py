"""Who hears whom, round by round: messages of the same round and of the one before."""

from __future__ import annotations

import itertools
import random as random_numbers
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from radar_core.checks import is_whole
from radar_core.topology import Topology, agent_names, draw_edges

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """The graphs of a discussion in rounds, in which the agents of a round speak one by one.

    The constructors give the graphs of AgentPrune and AgentDropout as those systems run them: every
    mask of theirs goes through :meth:`realise`.

    Args:
        spatial: edges within a round, without a cycle: the receiver reads what the sender said in
            this very round.
        temporal: edges across rounds: the receiver reads what the sender said in the round before;
            none are used in the first round.

    Raises:
        ValueError: if the two do not have the same agents in the same order, or `spatial` has a
            cycle.
    """

    spatial: Topology
    temporal: Topology

    def __post_init__(self) -> None:
        check_same_agents(self.spatial, self.temporal)
        self.spatial.order()

    @property
    def agents(self) -> tuple[str, ...]:
        """The names of all agents, in order."""
        return self.spatial.agents

    @cached_property
    def topology(self) -> Topology:
        """Who sends to whom in any round: the edges of both graphs."""
        return Topology([*self.spatial.edges, *self.temporal.edges], self.agents)

    def order(self) -> tuple[str, ...]:
        """Return the agents in the order in which they speak in a round; see `Topology.order`."""
        return self.spatial.order()

    @classmethod
    def realise(cls, spatial: Topology, temporal: Topology) -> Schedule:
        """Turn any two graphs into one round's graphs by AgentPrune's rule.

        Spatial edges are taken sender by sender, receivers in order, and an edge that would close a
        cycle is left out (`Topology.acyclic`). Temporal edges pass the same check against the
        finished spatial graph: (a, b) is left out where b reaches a within the round, so messages
        never travel back from one round to the next along the way they came, and nobody sends to
        itself.

        Args:
            spatial: what may be sent within a round; may have cycles.
            temporal: what may be sent from one round to the next.

        Returns:
            The schedule.

        Raises:
            ValueError: if the two do not have the same agents in the same order.
        """
        check_same_agents(spatial, temporal)
        within = spatial.acyclic()
        across = [(a, b) for a, b in temporal.edges if within.hops(b, a) < 0]
        return cls(within, Topology(across, temporal.agents))

    @classmethod
    def random(
        cls, agents: int | Iterable[str], probability: float = 0.5, seed: int = 0
    ) -> Schedule:
        """Draw both graphs: every ordered pair is an edge with the same probability.

        With probability 0.5 this is the default of Agent-Radar, AgentPrune and AgentDropout. The
        spatial graph is `Topology.random(agents, probability, seed).acyclic()`. Five agents have
        6.7 spatial and 5.5 temporal edges on average.

        Args:
            agents: number of agents, named "agent1" and so on, or their names.
            probability: of each edge before cycles are left out, from 0 to 1.
            seed: of the draw; the same seed gives the same graphs on every machine.

        Returns:
            The schedule.

        Raises:
            ValueError: if a value is unusable.
        """
        names = agent_names(agents)
        draw = random_numbers.Random(seed)
        spatial = Topology(draw_edges(names, probability, draw), names)
        temporal = Topology(draw_edges(names, probability, draw), names)
        return cls.realise(spatial, temporal)

    @classmethod
    def complete(cls, agents: int | Iterable[str]) -> Schedule:
        """Let everybody send to everybody: without cycles, to all that speak later.

        Args:
            agents: number of agents, named "agent1" and so on, or their names.

        Returns:
            The schedule; both graphs have the edges from each agent to all after it.

        Raises:
            ValueError: if the number or a name is unusable.
        """
        everybody = Topology.complete(agents)
        return cls.realise(everybody, everybody)

    @classmethod
    def chain(cls, agents: int | Iterable[str]) -> Schedule:
        """Let each agent send to the next within a round.

        AgentPrune's mask also has a temporal edge from the last agent to the first, which its own
        check leaves out: the first reaches the last within the round. So there is none.

        Args:
            agents: number of agents, named "agent1" and so on, or their names in order.

        Returns:
            The schedule.

        Raises:
            ValueError: if the number or a name is unusable.
        """
        spatial = Topology.chain(agents)
        ends = (spatial.agents[-1], spatial.agents[0])
        return cls.realise(spatial, Topology([ends], spatial.agents))

    @classmethod
    def debate(cls, agents: int | Iterable[str]) -> Schedule:
        """Let everybody read what everybody else said in the round before, and nothing newer.

        Args:
            agents: number of agents, named "agent1" and so on, or their names.

        Returns:
            The schedule; it has no spatial edges.

        Raises:
            ValueError: if the number or a name is unusable.
        """
        temporal = Topology.debate(agents)
        return cls.realise(Topology([], temporal.agents), temporal)

    @classmethod
    def layered(cls, agents: int | Iterable[str], layers: int = 2) -> Schedule:
        """Let every agent send to the next layer within a round, and to all others across rounds.

        Args:
            agents: number of agents, named "agent1" and so on, or their names, first layer first.
            layers: number of layers, as even as can be; the first ones take what is left over.

        Returns:
            The schedule; temporal edges against the layers' direction are left out.

        Raises:
            ValueError: if the number or a name is unusable, or there are fewer agents than layers.
        """
        names = agent_names(agents)
        if not is_whole(layers) or not 1 <= layers <= len(names):
            raise ValueError(
                f"layers must be a whole number from 1 to {len(names)}, the number of agents, got "
                f"{layers!r}"
            )
        size, more = divmod(len(names), layers)
        begins = [layer * size + min(layer, more) for layer in range(layers + 1)]
        parts = [names[here:there] for here, there in itertools.pairwise(begins)]
        return cls.realise(Topology.layered(parts), Topology.complete(names))

    @classmethod
    def star(cls, agents: int | Iterable[str]) -> Schedule:
        """Let the first agent send to all others within a round, and all to all across rounds.

        Args:
            agents: number of agents, named "agent1" and so on, or their names, the centre first.

        Returns:
            The schedule; temporal edges to the centre are left out.

        Raises:
            ValueError: if the number or a name is unusable.
        """
        spatial = Topology.star(agents, both_ways=False)
        return cls.realise(spatial, Topology.complete(spatial.agents))


def check_same_agents(spatial: Topology, temporal: Topology) -> None:
    """Raise ValueError unless both graphs have the same agents in the same order."""
    if spatial.agents != temporal.agents:
        raise ValueError(
            "spatial and temporal must have the same agents in the same order, got "
            f"{', '.join(spatial.agents)} and {', '.join(temporal.agents)}"
        )
