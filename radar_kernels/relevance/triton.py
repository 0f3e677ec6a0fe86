"""Relevance on GPUs, in Triton: products, norms and decays of a tile of sentences in one program.

A selection without ``top_k`` reads the embeddings twice, to count and to write, and waits once for
the device, for the size of its result; nothing else of it is read on the host. With ``top_k`` the
scores of one stretch of sentences after the other are merged into the best so far.

With ``TRITON_INTERPRET=1`` set before Triton is first imported the same kernels run on CPU
tensors, slowly: for tests.
"""

import functools
import math
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from radar_kernels import triton_launch
from radar_kernels.relevance import reference
from radar_kernels.relevance.arguments import RelevanceArguments
from radar_kernels.triton_launch import Launch, ceil_div, interpreted, power_of_two

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)
# Sentences whose scores for all queries are held at once where only the best are kept.
STRETCH = 1 << 16
MOST_QUERIES = 64

absent = triton_launch.absent


@dataclass(frozen=True, slots=True)
class Configuration:
    """One pinned setting of the kernels.

    Args:
        target: "sm_80", "sm_90", "sm_100" or "gfx942".
        element_size: bytes of an element of a sentence: 1, 2 or 4.
        block_queries: queries of a program.
        block_sentences: sentences of a program.
        block_size: elements of a row that are multiplied at a time.
        warps: warps of a program.
        stages: tiles in flight.
        precision: how fp32 operands are multiplied, "ieee" or "tf32x3".
    """

    target: str
    element_size: int
    block_queries: int
    block_sentences: int
    block_size: int
    warps: int
    stages: int
    precision: str


def configurations() -> list[Configuration]:
    """Lists every setting the launcher can choose.

    Returns:
        One ``Configuration`` for each target, element size and block of queries.
    """
    return [
        _configuration(target, element_size, queries)
        for target in triton_launch.TARGETS
        for element_size in (1, 2, 4)
        for queries in (16, 32, MOST_QUERIES)
    ]


def compile_configuration(one: Configuration) -> list[Any]:
    """Compiles the kernels of a setting; no GPU is needed.

    Args:
        one: the setting.

    Returns:
        Triton's compiled kernels: the scores', and the selection's.
    """
    dtype = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32}[one.element_size]

    def tensor(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    call = RelevanceArguments(
        tensor(5000, 384, dtype=dtype),
        tensor(one.block_queries, 384, dtype=torch.float32 if one.element_size == 1 else dtype),
        tensor(5000),
        tensor(5000),
        tensor(one.block_queries, 6),
        tensor(one.block_queries),
        0.92,
        0.92,
        "exclude",
        0.65,
        None,
        tensor(5000, dtype=torch.float32) if one.element_size == 1 else None,
    )
    work = _Work(call, one.target)
    return [
        triton_launch.compile_launch(launch, one.target)
        for launch in (
            work.scoring(tensor(one.block_queries, 5000, dtype=torch.float32)),
            work.selecting(
                tensor(one.block_queries, work.grid[0]),
                tensor(10),
                tensor(10, dtype=torch.float32),
                write=True,
            ),
        )
    ]


def unsupported(arguments: RelevanceArguments) -> str | None:
    """Says why a call cannot be served by this backend.

    Args:
        arguments: the validated call.

    Returns:
        The reason, or None if ``scores`` and ``select`` can serve it.
    """
    sentences = arguments.sentences
    if (reason := absent()) is not None:
        return reason
    if (reason := triton_launch.wrong_device("sentences", sentences)) is not None:
        return reason
    if sentences.dtype not in DTYPES:
        return (
            f"sentences are {sentences.dtype}, and the Triton kernels take float32, float16, "
            "bfloat16 and int8"
        )
    if sentences.shape[1] > 1 and sentences.stride(1) != 1:
        return "each row of sentences must be contiguous"
    if max(sentences.shape[0], sentences.stride(0)) >= 2**31 - 1024:
        return f"{sentences.shape[0]} sentences are more than the Triton kernels count"
    return None


def scores(arguments: RelevanceArguments) -> Tensor:
    """Scores every sentence for every query.

    Args:
        arguments: a call that ``unsupported`` accepts.

    Returns:
        Float32 ``[Q, S]``, -inf where a sentence is not scored.
    """
    return _scores(arguments, *_queries(arguments))


def select(arguments: RelevanceArguments) -> tuple[Tensor, Tensor, Tensor]:
    """Selects sentences for every query without holding all scores.

    Args:
        arguments: a call that ``unsupported`` accepts.

    Returns:
        Int64 offsets ``[Q + 1]``, int64 indices and float32 scores of the selected sentences, for
        each query in the order of the sentences.
    """
    given = _queries(arguments)
    if arguments.top_k is not None:
        return reference.select_best(
            arguments, STRETCH, lambda start, stop: _scores(_part(arguments, start, stop), *given)
        )
    count, asked = arguments.sentences.shape[0], arguments.queries.shape[0]
    device = arguments.device
    offsets = torch.zeros(asked + 1, dtype=torch.int64, device=device)
    indices = torch.empty(0, dtype=torch.int64, device=device)
    values = torch.empty(0, dtype=torch.float32, device=device)
    if count == 0 or asked == 0:
        return offsets, indices, values
    work = _Work(arguments, triton_launch.target_of(device), *given)
    tiles = torch.empty(asked, work.grid[0], dtype=torch.int64, device=device)
    triton_launch.run_all([work.selecting(tiles, indices, values, write=False)], device)
    ends = tiles.flatten().cumsum(0).view_as(tiles)
    offsets[1:] = ends[:, -1]
    found = int(offsets[-1])  # the one wait for the device
    if found:
        indices, values = indices.new_empty(found), values.new_empty(found)
        launch = work.selecting(ends - tiles, indices, values, write=True)
        triton_launch.run_all([launch], device)
    return offsets, indices, values


def _scores(arguments: RelevanceArguments, queries: Tensor, factors: Tensor) -> Tensor:
    out = queries.new_empty(queries.shape[0], arguments.sentences.shape[0], dtype=torch.float32)
    if out.numel():
        work = _Work(arguments, triton_launch.target_of(arguments.device), queries, factors)
        triton_launch.run_all([work.scoring(out)], arguments.device)
    return out


def _part(arguments: RelevanceArguments, start: int, stop: int) -> RelevanceArguments:
    scales = arguments.scales
    return replace(
        arguments,
        sentences=arguments.sentences[start:stop],
        sender=arguments.sender[start:stop],
        round=arguments.round[start:stop],
        scales=None if scales is None else scales[start:stop],
    )


def _queries(arguments: RelevanceArguments) -> tuple[Tensor, Tensor]:
    """What the sentences are multiplied with, contiguous, and what makes the products cosines."""
    queries = arguments.queries
    if queries.dtype == torch.float32:
        unit = torch.nn.functional.normalize(queries, dim=1, eps=1e-12).contiguous()
        return unit, torch.ones(len(queries), dtype=torch.float32, device=queries.device)
    # As stored, for the matrix units: unit length would need more bits.
    norms = queries.to(torch.float32).norm(dim=1).clamp_min(1e-12)
    return queries.contiguous(), norms.reciprocal()


def _configuration(target: str, element_size: int, queries: int) -> Configuration:
    block_queries = min(MOST_QUERIES, max(16, power_of_two(max(1, queries))))
    wide = element_size == 2
    precision = "ieee" if wide or target == "gfx942" else "tf32x3"
    return Configuration(
        target,
        element_size,
        block_queries,
        block_sentences=64,
        block_size=64 if wide else 32,
        # Three products for one in fp32 take more registers.
        warps=8 if block_queries == MOST_QUERIES and not wide else 4,
        stages=2 if target == "gfx942" else 3,
        precision=precision,
    )


class _Work:
    """The launches of a call."""

    def __init__(
        self,
        arguments: RelevanceArguments,
        target: str,
        queries: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> None:
        sentences, asked = arguments.sentences, arguments.queries.shape[0]
        setting = _configuration(target, sentences.element_size(), asked)
        unit = 16 // sentences.element_size()
        stride = triton_launch.used_strides(sentences)[0]
        if stride % unit:
            unit = 1
        if queries is None or factors is None:
            queries = arguments.queries
            factors = queries.new_empty(asked, dtype=torch.float32)
        self.grid = (
            ceil_div(sentences.shape[0], setting.block_sentences),
            ceil_div(asked, setting.block_queries),
        )
        self._options = {
            "num_warps": setting.warps,
            "num_stages": setting.stages,
            "enable_fp_fusion": True,
        }
        self._values = {
            "sentences": sentences,
            "scales": _contiguous(arguments.scales),
            "queries": queries,
            "factors": factors,
            "sender": arguments.sender.contiguous(),
            "round": arguments.round.contiguous(),
            "hops": arguments.hops.contiguous(),
            "now": arguments.now.contiguous(),
            "spatial_log": math.log2(arguments.spatial_decay),
            "temporal_log": math.log2(arguments.temporal_decay),
            "count": sentences.shape[0],
            "asked": asked,
            "agents": arguments.hops.shape[1],
            "row_units": stride // unit,
            "UNIT": unit,
            "SIZE": sentences.shape[1],
            "POLICY": arguments.self_policy,
            "PRECISION": "interpreted" if interpreted() else setting.precision,
            "BLOCK_SENTENCES": setting.block_sentences,
            "BLOCK_QUERIES": setting.block_queries,
            "BLOCK_SIZE": setting.block_size,
        }
        least = arguments.threshold
        self._threshold = -math.inf if least is None else float(least)

    def scoring(self, out: Tensor) -> Launch:
        """The launch that stores every score."""
        return Launch(
            _kernels().scores_kernel, self.grid, {**self._values, "out": out}, self._options
        )

    def selecting(self, tiles: Tensor, indices: Tensor, values: Tensor, *, write: bool) -> Launch:
        """The launch that counts what passes in each tile, or writes it."""
        own = {
            "tiles": tiles,
            "indices": indices,
            "scores": values,
            "threshold": self._threshold,
            "write": int(write),
        }
        return Launch(_kernels().select_kernel, self.grid, {**self._values, **own}, self._options)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


@functools.cache
def _kernels() -> ModuleType:
    from radar_kernels.relevance import _triton_kernels

    return _triton_kernels
