"""The relevance operators in plain PyTorch, a few thousand sentences at a time."""

import math

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
    total, count = arguments.sentences.shape[0], arguments.queries.shape[0]
    query = _unit(arguments.queries)
    rows: list[Tensor] = []
    indices: list[Tensor] = []
    values: list[Tensor] = []
    best = query.new_empty(count, 0)
    best_index = torch.empty(count, 0, dtype=torch.int64, device=query.device)
    for start in range(0, total, _SENTENCES):
        stop = min(total, start + _SENTENCES)
        score = _scores(arguments, query, start, stop)
        least = -torch.inf if arguments.threshold is None else arguments.threshold
        # Not "score < least": a NaN passes neither way.
        score = score.masked_fill(~(score >= least), -torch.inf)
        if arguments.top_k is None:
            row, place = (score > -torch.inf).nonzero(as_tuple=True)
            rows.append(row)
            indices.append(place + start)
            values.append(score[row, place])
            continue
        index = torch.arange(start, stop, device=query.device).expand(count, -1)
        score, index = torch.cat([best, score], 1), torch.cat([best_index, index], 1)
        # Stable, and the best so far come first: of equals the earlier sentence wins.
        order = score.sort(dim=1, descending=True, stable=True).indices[:, : arguments.top_k]
        best, best_index = score.gather(1, order), index.gather(1, order)
    if arguments.top_k is not None:
        row, place = (best > -torch.inf).nonzero(as_tuple=True)
        rows, indices, values = [row], [best_index[row, place]], [best[row, place]]
    return _by_query(rows, indices, values, count, total, query.device)


def _by_query(
    rows: list[Tensor],
    indices: list[Tensor],
    values: list[Tensor],
    count: int,
    total: int,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:
    none = torch.empty(0, dtype=torch.int64, device=device)
    row = torch.cat([none, *rows])
    index = torch.cat([none, *indices])
    value = torch.cat([none.to(torch.float32), *values])
    order = (row * max(1, total) + index).argsort()
    offsets = torch.zeros(count + 1, dtype=torch.int64, device=device)
    offsets[1:] = torch.bincount(row, minlength=count).cumsum(0)
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
