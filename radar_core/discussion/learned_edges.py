"""Graphs whose edges are learned: drawn by their probabilities, raised or lowered, and pruned."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from radar_core.checks import is_finite
from radar_core.discussion.model import plain_number
from radar_core.topology import GrowingGraph, Topology

__all__ = ["LearnedEdges", "batches", "policy_loss", "utilities"]


class LearnedEdges:
    """One or several graphs over the same agents, with a mask and a logit for each edge.

    An edge of the mask is there with probability sigmoid(logit), at first 1/2.

    Args:
        topology: the edges that there can be; those from an agent to itself are left out.
        graphs: how many graphs, all alike at first.
        acyclic: whether an edge that would close a cycle is left out.
    """

    def __init__(self, topology: Topology, graphs: int, *, acyclic: bool) -> None:
        self.agents = topology.agents
        self.acyclic = acyclic
        place = {name: index for index, name in enumerate(self.agents)}
        self.mask = torch.zeros(graphs, len(place), len(place), dtype=torch.bool)
        for a, b in topology.edges:
            self.mask[:, place[a], place[b]] = a != b
        self.logits = torch.zeros(self.mask.shape, dtype=torch.float64, requires_grad=True)

    def probabilities(self) -> Tensor:
        """Return the probability of every edge, 0 for those outside the mask.

        Returns:
            float64 [graphs, senders, receivers].
        """
        return self.logits.sigmoid() * self.mask

    def draw(self, generator: torch.Generator) -> tuple[list[Topology], Tensor]:
        """Draw every graph, its edges sender by sender.

        Args:
            generator: draws.

        Returns:
            The graphs, and the log-probability of their draw. An edge that would close a cycle is
            left out without a draw, as AgentPrune does.
        """
        chance = torch.rand(self.mask.shape, generator=generator, dtype=torch.float64)
        wanted = chance < self.probabilities().detach()
        drawn: list[Topology] = []
        considered = torch.zeros_like(self.mask)
        taken = torch.zeros_like(self.mask)
        for graph in range(len(self.mask)):
            places = self.mask[graph].nonzero().tolist()
            growing = GrowingGraph(range(len(self.agents)))
            for a, b in places:
                if self.acyclic and growing.closes_cycle(a, b):
                    continue
                considered[graph, a, b] = True
                if wanted[graph, a, b]:
                    taken[graph, a, b] = True
                    growing.add(a, b)
            drawn.append(self._topology(growing.edges))
        return drawn, _log_probability(self.logits, considered, taken)

    def kept(self) -> list[Topology]:
        """Return every graph with all edges of its mask, the most probable first.

        Where the edges must not close a cycle, the less probable one is left out.
        """
        graphs = []
        for mask, logits in zip(self.mask, self.logits.detach(), strict=True):
            growing = GrowingGraph(range(len(self.agents)))
            for a, b in sorted(mask.nonzero().tolist(), key=lambda edge: -float(logits[*edge])):
                if not (self.acyclic and growing.closes_cycle(a, b)):
                    growing.add(a, b)
            graphs.append(self._topology(growing.edges))
        return graphs

    def masks(self) -> tuple[frozenset[tuple[str, str]], ...]:
        """Return the edges of every graph's mask."""
        return tuple(
            frozenset((self.agents[a], self.agents[b]) for a, b in mask.nonzero().tolist())
            for mask in self.mask
        )

    def prune(self, rate: float) -> None:
        """Take the edges with the lowest logits out of every graph's mask.

        Args:
            rate: the share of its edges, rounded, but at least one edge.
        """
        for mask, logits in zip(self.mask, self.logits.detach(), strict=True):
            edges = sorted(mask.nonzero().tolist(), key=lambda edge: float(logits[*edge]))
            for a, b in edges[: max(1, round(rate * len(edges)))]:
                mask[a, b] = False

    def _topology(self, edges: Iterable[tuple[int, int]]) -> Topology:
        return Topology([(self.agents[a], self.agents[b]) for a, b in edges], self.agents)


def _log_probability(logits: Tensor, considered: Tensor, taken: Tensor) -> Tensor:
    each = torch.where(taken, logsigmoid(logits), logsigmoid(-logits))
    return (each * considered).sum()


def policy_loss(log_probabilities: Sequence[Tensor], gained: Tensor, baseline: bool) -> Tensor:
    """Return the loss of REINFORCE: the mean of -log-probability times utility.

    Args:
        log_probabilities: of each draw.
        gained: float64, the utility of each draw.
        baseline: subtract the mean utility of the batch, which lowers the variance.
    """
    if baseline:
        gained = gained - gained.mean()
    return -(torch.stack(list(log_probabilities)) * gained).mean()


def batches(items: Sequence[Any], size: int, count: int) -> Iterator[list[Any]]:
    """Give so many batches of items, over and over in their order."""
    endless = itertools.cycle(items)
    for _ in range(count):
        yield list(itertools.islice(endless, size))


async def utilities(
    utility: Callable[[Any, Any], Awaitable[float]], graphs: Sequence[Any], items: Sequence[Any]
) -> Tensor:
    """Await the utility of each graph for its item, all at once.

    Returns:
        float64 [number of items].

    Raises:
        ValueError: one of them is no finite number. True and False count as 1 and 0.
        TypeError: `utility` is not async.
    """
    awaited = [utility(graph, item) for graph, item in zip(graphs, items, strict=True)]
    for one in awaited:
        if not inspect.isawaitable(one):
            raise TypeError(
                f"utility returned a {type(one).__name__}; expected an awaitable of a number: make "
                "it an async function"
            )
    found = await asyncio.gather(*awaited)
    for gained, item in zip(found, items, strict=True):
        if not isinstance(gained, bool | np.bool_) and not is_finite(plain_number(gained)):
            raise ValueError(
                "a utility must be a finite number, such as 1 for a right answer and 0 for a wrong "
                f"one, got {gained!r} for the item {item!r:.80}"
            )
    return torch.tensor([float(gained) for gained in found], dtype=torch.float64)
