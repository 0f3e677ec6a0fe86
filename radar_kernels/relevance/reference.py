"""The relevance operators in plain PyTorch, a few thousand sentences at a time."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from radar_kernels.relevance.arguments import RelevanceArguments

# Sentences that fit a cache, so that their norms cost no second pass over memory.
_SENTENCES = 4096


def scores(arguments: RelevanceArguments) -> Tensor:
    """Scores every sentence for every query.

    Args:
        arguments: the validated call.

    Returns:
        Float32 ``[Q, S]``, -inf where a sentence is not scored.
    """
    total = arguments.sentences.shape[0]
    query = _unit(arguments.queries)
    parts = [
        _scores(arguments, query, start, min(total, start + _SENTENCES))
        for start in range(0, total, _SENTENCES)
    ]
    return torch.cat(parts, 1) if parts else query.new_zeros(query.shape[0], 0)


def select(arguments: RelevanceArguments) -> tuple[Tensor, Tensor, Tensor]:
    """Selects sentences for every query without holding all scores.

    Args:
        arguments: the validated call.

    Returns:
        Int64 offsets ``[Q + 1]``, int64 indices and float32 scores of the selected sentences, for
        each query in the order of the sentences.
    """
    query = _unit(arguments.queries)

    def scored(start: int, stop: int) -> Tensor:
        return _scores(arguments, query, start, stop)

    if arguments.top_k is not None:
        return select_best(arguments, _SENTENCES, scored)
    rows: list[Tensor] = []
    indices: list[Tensor] = []
    values: list[Tensor] = []
    for start, stop in _stretches(arguments, _SENTENCES):
        score = _passing(arguments, scored(start, stop))
        row, place = (score > -torch.inf).nonzero(as_tuple=True)
        rows.append(row)
        indices.append(place + start)
        values.append(score[row, place])
    return _by_query(arguments, rows, indices, values)


def select_best(
    arguments: RelevanceArguments, length: int, scored: Callable[[int, int], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Selects the ``top_k`` best sentences of each query, one stretch after the other.

    Args:
        arguments: the validated call, with a ``top_k``.
        length: sentences of a stretch.
        scored: from a first sentence and the one after the last to their scores
            ``[Q, stop - start]``.

    Returns:
        As ``select``.
    """
    count, device = arguments.queries.shape[0], arguments.device
    best = torch.empty(count, 0, dtype=torch.float32, device=device)
    best_index = torch.empty(count, 0, dtype=torch.int64, device=device)
    for start, stop in _stretches(arguments, length):
        score = _passing(arguments, scored(start, stop))
        index = torch.arange(start, stop, device=device).expand(count, -1)
        score, index = torch.cat([best, score], 1), torch.cat([best_index, index], 1)
        # Stable, and the best so far come first: of equals the earlier sentence wins.
        order = score.sort(dim=1, descending=True, stable=True).indices[:, : arguments.top_k]
        best, best_index = score.gather(1, order), index.gather(1, order)
    row, place = (best > -torch.inf).nonzero(as_tuple=True)
    return _by_query(arguments, [row], [best_index[row, place]], [best[row, place]])


def _stretches(arguments: RelevanceArguments, length: int) -> Iterator[tuple[int, int]]:
    total = arguments.sentences.shape[0]
    return ((start, min(total, start + length)) for start in range(0, total, length))


def _passing(arguments: RelevanceArguments, score: Tensor) -> Tensor:
    least = -torch.inf if arguments.threshold is None else arguments.threshold
    # Not "score < least": a NaN passes neither way.
    return score.masked_fill(~(score >= least), -torch.inf)


def _by_query(
    arguments: RelevanceArguments,
    rows: list[Tensor],
    indices: list[Tensor],
    values: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    total, count = arguments.sentences.shape[0], arguments.queries.shape[0]
    none = torch.empty(0, dtype=torch.int64, device=arguments.device)
    row = torch.cat([none, *rows])
    index = torch.cat([none, *indices])
    value = torch.cat([none.to(torch.float32), *values])
    order = (row * max(1, total) + index).argsort()
    # Not bincount, which waits for the device.
    offsets = torch.zeros(count + 1, dtype=torch.int64, device=arguments.device)
    offsets = offsets.index_add_(0, row + 1, torch.ones_like(row)).cumsum(0)
    return offsets, index[order], value[order]


def _unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows.to(torch.float32), dim=1, eps=1e-12)


def _scores(arguments: RelevanceArguments, query: Tensor, start: int, stop: int) -> Tensor:
    sentences = arguments.sentences[start:stop].to(torch.float32)
    if arguments.scales is not None:
        sentences = sentences * arguments.scales[start:stop, None]
    norms = sentences.norm(dim=1).clamp_min(1e-12)
    cosine = (query @ sentences.mT) / norms
    hops = arguments.hops[:, arguments.sender[start:stop]]
    spatial = hops - 1
    temporal = arguments.now[:, None] - arguments.round[None, start:stop] - 1
    hidden = hops < 0
    if arguments.self_policy == "exclude":
        hidden = hidden | (spatial < 0) | (temporal < 0)
    elif arguments.self_policy == "clamp":
        spatial, temporal = spatial.clamp_min(0), temporal.clamp_min(0)
    decay = _decay(arguments.spatial_decay, spatial) * _decay(arguments.temporal_decay, temporal)
    return (cosine * decay).masked_fill(hidden, -torch.inf)


def _decay(factor: float, exponent: Tensor) -> Tensor:
    # A factor near 1 would lose its digits in float32; its logarithm keeps them.
    return torch.exp(exponent.to(torch.float32) * math.log(factor))
