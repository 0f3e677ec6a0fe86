"""AgentDropout: learning which agents can be silent in a round, then which edges can go.

Source: AgentDropout (Wang et al., arXiv 2503.18891); written from its described behaviour, for any
number of agents and rounds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from radar_core.checks import is_whole
from radar_core.discussion.learned_edges import (
    LearnedEdges,
    batches,
    policy_loss,
    utilities,
)
from radar_core.discussion.pruning import check_settings, nuclear_norm
from radar_core.discussion.rounds import Rounds
from radar_core.schedule import Schedule, check_same_agents
from radar_core.topology import Topology

__all__ = ["DroppedOut", "agent_dropout"]

Item = TypeVar("Item")
Masks = tuple[frozenset[tuple[str, str]], ...]


@dataclass(frozen=True)
class DroppedOut:
    """What is left after agents and edges dropped out.

    Args:
        rounds: the schedule of each round, and who is silent in it.
        masks: (spatial, temporal), each with the edges of every round that could be drawn: at
            first, after the agents dropped out, and after each pruning of edges.
        utilities: the mean utility of each batch, those of agents' dropout first.
    """

    rounds: Rounds
    masks: tuple[tuple[Masks, Masks], ...]
    utilities: tuple[float, ...]


async def agent_dropout(
    spatial: Topology,
    temporal: Topology,
    utility: Callable[[Rounds, Item], Awaitable[float]],
    items: Sequence[Item],
    *,
    rounds: int = 2,
    agents_out: int = 1,
    agent_batches: int = 2,
    agent_batch_size: int = 20,
    edge_batches: int = 4,
    edge_batch_size: int = 10,
    rate: float = 0.25,
    every: int = 2,
    learning_rate: float = 0.1,
    nuclear: float = 1.0,
    closeness: float = 1.0,
    tolerance: float = 0.1,
    baseline: bool = False,
    seed: int = 0,
) -> DroppedOut:
    """Learn, for each round by itself, who can be silent, and then which edges can go.

    First, for each item of a batch one agent a round is silenced, and Adam takes a step on
    mean(-((N - 1) * sum of log(1 - p) over its edges + sum of log p over the other edges) *
    utility), p being the edges' probabilities. Then the agents whose edges have the lowest mean
    probability in a round drop out of it, with their edges. Second, graphs are drawn, and Adam
    takes steps on mean(-log-probability * utility) + nuclear * (nuclear norms of the matrices of
    probabilities) + closeness * (how much further than `tolerance` each matrix is from its
    beginning, by Frobenius norm); now and then the least probable edges are pruned.

    Unlike the released code, which picks whom to silence by the edges' logits, agents are picked
    evenly here, so that nothing that is learned makes up for itself; and an agent's edges to and
    from the rounds before and after count as its edges too.

    Args:
        spatial: as in `agent_prune`.
        temporal: as in `agent_prune`.
        utility: `await utility(rounds, item)`, as in `agent_prune`.
        items: as in `agent_prune`.
        rounds: how many rounds the discussion has.
        agents_out: how many agents drop out of each round; an agent without an edge never does.
        agent_batches: batches in which agents are silenced.
        agent_batch_size: items of each.
        edge_batches: batches in which edges are drawn.
        edge_batch_size: items of each.
        rate: the share of the remaining edges of each graph that a pruning takes, at least one.
        every: batches from one pruning to the next.
        learning_rate: of Adam.
        nuclear: weight of the nuclear norms.
        closeness: weight of the distance from the beginning.
        tolerance: distance that costs nothing.
        baseline: as in `agent_prune`.
        seed: as in `agent_prune`.

    Returns:
        What is left.

    Raises:
        ValueError: a value is unusable, or a utility is no finite number.
    """
    check_same_agents(spatial, temporal)
    check_settings(
        utility,
        items,
        rate,
        seed,
        at_least_one=dict(
            edge_batches=edge_batches,
            edge_batch_size=edge_batch_size,
            agent_batches=agent_batches,
            agent_batch_size=agent_batch_size,
            every=every,
            rounds=rounds,
        ),
        at_least_zero=dict(
            learning_rate=learning_rate, nuclear=nuclear, closeness=closeness, tolerance=tolerance
        ),
    )
    if not is_whole(agents_out) or not 0 <= agents_out < len(spatial.agents):
        raise ValueError(
            f"agents_out must be a whole number from 0 to {len(spatial.agents) - 1}, one less than "
            f"there are agents, got {agents_out!r}"
        )
    generator = torch.Generator().manual_seed(seed)
    within = LearnedEdges(spatial, rounds, acyclic=True)
    across = LearnedEdges(temporal, rounds, acyclic=False)
    across.mask[0] = False  # nothing comes before the first round
    masks = [(within.masks(), across.masks())]
    means: list[float] = []

    optimizer = torch.optim.Adam([within.logits, across.logits], lr=learning_rate)
    for batch in batches(items, agent_batch_size, agent_batches if agents_out else 0):
        shape = (len(batch), rounds)
        chosen = torch.randint(len(spatial.agents), shape, generator=generator)
        spatial_kept, temporal_kept = within.kept(), across.kept()
        silenced = [
            _rounds(spatial_kept, temporal_kept, [[agent] for agent in row])
            for row in chosen.tolist()
        ]
        gained = await utilities(utility, silenced, batch)
        means.append(float(gained.mean()))
        merits = [_merit(within, across, row) for row in chosen]
        _step(optimizer, policy_loss(merits, gained, baseline))
    silent = _drop_agents(within, across, agents_out)
    masks.append((within.masks(), across.masks()))

    optimizer = torch.optim.Adam([within.logits, across.logits], lr=learning_rate)
    began = [edges.probabilities().detach() for edges in (within, across)]
    for number, batch in enumerate(batches(items, edge_batch_size, edge_batches), start=1):
        drawn, log_probabilities = [], []
        for _ in batch:
            graphs, first = within.draw(generator)
            later, second = across.draw(generator)
            drawn.append(_rounds(graphs, later, silent))
            log_probabilities.append(first + second)
        gained = await utilities(utility, drawn, batch)
        means.append(float(gained.mean()))
        loss = policy_loss(log_probabilities, gained, baseline)
        for edges, before in zip((within, across), began, strict=True):
            # An edge that was pruned since is not to be held against those that are left.
            moved = (edges.probabilities() - before) * edges.mask
            distance = torch.linalg.matrix_norm(moved)
            loss = loss + nuclear * nuclear_norm(edges)
            loss = loss + closeness * relu(distance - tolerance).sum()
        _step(optimizer, loss)
        if number % every == 0:
            within.prune(rate)
            across.prune(rate)
            masks.append((within.masks(), across.masks()))
    return DroppedOut(_rounds(within.kept(), across.kept(), silent), tuple(masks), tuple(means))


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _rounds(
    spatial: Sequence[Topology], temporal: Sequence[Topology], silent: Sequence[Sequence[int]]
) -> Rounds:
    names = spatial[0].agents
    schedules = [Schedule(*graphs) for graphs in zip(spatial, temporal, strict=True)]
    return Rounds(schedules, [frozenset(names[x] for x in quiet) for quiet in silent])


def _incident(edges: Tensor, temporal: Tensor, round: int, agent: int) -> tuple[Tensor, Tensor]:
    """Mark the edges of an agent in a round.

    Args:
        edges: bool [rounds, agents, agents], spatial edges.
        temporal: bool [rounds, agents, agents], edges from the round before.
        round: the round.
        agent: the agent's index.

    Returns:
        The spatial and the temporal edges to and from it, of the same shapes.
    """
    near, far = torch.zeros_like(edges), torch.zeros_like(temporal)
    near[round, agent] = near[round, :, agent] = True
    far[round, :, agent] = True
    if round + 1 < len(far):
        far[round + 1, agent] = True
    return near & edges, far & temporal


def _merit(within: LearnedEdges, across: LearnedEdges, silenced: Tensor) -> Tensor:
    """Return what silencing agents raises if it was useful: their edges down, the others up."""
    total = torch.zeros((), dtype=torch.float64)
    weight = len(within.agents) - 1
    for round, agent in enumerate(silenced.tolist()):
        own = _incident(within.mask, across.mask, round, agent)
        everybody = [_incident(within.mask, across.mask, round, x) for x in range(weight + 1)]
        for edges, mine, all_of_round in zip(
            (within, across), own, zip(*everybody, strict=True), strict=True
        ):
            others = torch.stack(all_of_round).any(0) & ~mine
            total = total + weight * (logsigmoid(-edges.logits) * mine).sum()
            total = total + (logsigmoid(edges.logits) * others).sum()
    return total


def _drop_agents(within: LearnedEdges, across: LearnedEdges, count: int) -> list[list[int]]:
    """Take the agents with the least probable edges, and these edges, out of each round."""
    silent: list[list[int]] = []
    near, far = (edges.probabilities().detach() for edges in (within, across))
    edges_of = [
        [
            _incident(within.mask.clone(), across.mask.clone(), round, agent)
            for agent in range(len(within.agents))
        ]
        for round in range(len(within.mask))
    ]
    for of_round in edges_of:
        mean: dict[int, float] = {}
        for agent, (spatial, temporal) in enumerate(of_round):
            number = int(spatial.sum() + temporal.sum())
            if number:
                mean[agent] = float((near * spatial).sum() + (far * temporal).sum()) / number
        quiet = sorted(mean, key=lambda agent: mean[agent])[:count]
        for agent in quiet:
            within.mask &= ~of_round[agent][0]
            across.mask &= ~of_round[agent][1]
        silent.append(quiet)
    return silent
