"""AgentPrune: learning which edges of a discussion's graphs are worth keeping.

Source: AgentPrune (Zhang et al., arXiv 2410.02506); written from its described behaviour.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from radar_core.checks import check_has, check_number, check_seed, check_whole, is_number
from radar_core.discussion.learned_edges import (
    LearnedEdges,
    batches,
    policy_loss,
    utilities,
)
from radar_core.schedule import Schedule, check_same_agents
from radar_core.topology import Topology

__all__ = ["Pruned", "agent_prune"]

Item = TypeVar("Item")
Masks = tuple[frozenset[tuple[str, str]], ...]


@dataclass(frozen=True)
class Pruned:
    """What is left after pruning.

    Args:
        schedule: the edges that are left, of both kinds; of spatial edges that close a cycle the
            least probable are left out.
        masks: (spatial, temporal) edges that could be drawn, before and after each pruning.
        utilities: the mean utility of each iteration's batch.
    """

    schedule: Schedule
    masks: tuple[Masks, ...]
    utilities: tuple[float, ...]


async def agent_prune(
    spatial: Topology,
    temporal: Topology,
    utility: Callable[[Schedule, Item], Awaitable[float]],
    items: Sequence[Item],
    *,
    iterations: int = 10,
    batch_size: int = 4,
    rate: float = 0.25,
    every: int = 5,
    learning_rate: float = 0.1,
    low_rank: float = 0.0,
    baseline: bool = False,
    seed: int = 0,
) -> Pruned:
    """Learn the probabilities of edges by REINFORCE, and prune the least probable now and then.

    Each iteration draws one graph of each kind for each item of a batch and takes a step of Adam on
    mean(-log-probability * utility), plus low_rank times the nuclear norms of both matrices of
    probabilities. All probabilities begin at 1/2.

    Args:
        spatial: the edges within a round that there can be; they may have cycles.
        temporal: the edges from one round to the next that there can be.
        utility: `await utility(schedule, item)` tells how well a schedule serves an item, such as 1
            for a right answer and 0 for a wrong one: any finite number, the larger the better.
            Those of a batch are awaited together.
        items: what to learn on, in order and over and over; none that is evaluated on later.
        iterations: how many.
        batch_size: draws of each iteration.
        rate: the share of the remaining edges of each kind that a pruning takes, at least one edge.
        every: iterations from one pruning to the next.
        learning_rate: of Adam.
        low_rank: weight of the nuclear norms, which the paper has and its released code has not.
        baseline: subtract the batch's mean utility, which the paper does not; the utility of a
            draw then counts against the others', and a few iterations tell more.
        seed: of the draws; the same seed gives the same result, if the utility does.

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
        at_least_one=dict(iterations=iterations, batch_size=batch_size, every=every),
        at_least_zero=dict(learning_rate=learning_rate, low_rank=low_rank),
    )
    generator = torch.Generator().manual_seed(seed)
    within = LearnedEdges(spatial, 1, acyclic=True)
    across = LearnedEdges(temporal, 1, acyclic=False)
    optimizer = torch.optim.Adam([within.logits, across.logits], lr=learning_rate)
    masks = [(within.masks()[0], across.masks()[0])]
    means: list[float] = []
    for iteration, batch in enumerate(batches(items, batch_size, iterations), start=1):
        schedules, log_probabilities = [], []
        for _ in batch:
            (drawn,), first = within.draw(generator)
            (later,), second = across.draw(generator)
            schedules.append(Schedule(drawn, later))
            log_probabilities.append(first + second)
        gained = await utilities(utility, schedules, batch)
        means.append(float(gained.mean()))
        loss = policy_loss(log_probabilities, gained, baseline)
        if low_rank:
            for edges in (within, across):
                loss = loss + low_rank * nuclear_norm(edges)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if iteration % every == 0:
            within.prune(rate)
            across.prune(rate)
            masks.append((within.masks()[0], across.masks()[0]))
    return Pruned(Schedule(within.kept()[0], across.kept()[0]), tuple(masks), tuple(means))


def nuclear_norm(edges: LearnedEdges) -> torch.Tensor:
    """Return the sum of the nuclear norms of all graphs' matrices of probabilities."""
    return torch.linalg.matrix_norm(edges.probabilities(), ord="nuc").sum()


def check_settings(
    utility: object,
    items: Sequence[object],
    rate: float,
    seed: int,
    *,
    at_least_one: Mapping[str, int],
    at_least_zero: Mapping[str, float],
) -> None:
    """Raise ValueError unless the settings of a learning loop are usable.

    Args:
        utility: as in `agent_prune`, as are the next three.
        items: what is learned on.
        rate: share of edges.
        seed: of the draws.
        at_least_one: whole numbers by their names.
        at_least_zero: finite numbers by their names.
    """
    check_has("utility", utility, "__call__", "async def utility(schedule, item)")
    if not len(items):
        raise ValueError("items is empty; expected at least one item to learn on")
    for name, value in at_least_one.items():
        check_whole(name, value, 1)
    for name, number in at_least_zero.items():
        check_number(name, number)
    if not is_number(rate) or not 0 < rate < 1:
        raise ValueError(f"rate must lie between 0 and 1, got {rate!r}")
    check_seed(seed)
