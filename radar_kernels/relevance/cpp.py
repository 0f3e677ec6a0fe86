"""Relevance on CPUs, in C++: one pass over the sentences, bound by reading them."""

import torch
from torch import Tensor

from radar_kernels import native
from radar_kernels.relevance.arguments import RelevanceArguments

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)

absent = native.absent

if absent() is None:
    _scores = torch.ops.radar_cpp.relevance_scores.default
    _select = torch.ops.radar_cpp.select_relevant.default


def unsupported(arguments: RelevanceArguments) -> str | None:
    """Says why a call cannot be served.

    Args:
        arguments: the validated call.

    Returns:
        The reason, or None if ``scores`` and ``select`` can serve it.
    """
    sentences = arguments.sentences
    if (reason := absent()) is not None:
        return reason
    if not sentences.is_cpu:
        return f"it runs on the CPU only, these sentences are on {sentences.device}"
    if sentences.dtype not in _DTYPES:
        return f"it takes float32, bfloat16, float16 and int8 sentences, got {sentences.dtype}"
    if sentences.shape[1] > 1 and sentences.stride(1) != 1:
        return "each row of sentences must be contiguous"
    return None


def scores(arguments: RelevanceArguments) -> Tensor:
    """Scores every sentence for every query.

    Args:
        arguments: a call that ``unsupported`` has let through.

    Returns:
        Float32 ``[Q, S]``, -inf where a sentence is not scored.
    """
    return _scores(*_call(arguments))


def select(arguments: RelevanceArguments) -> tuple[Tensor, Tensor, Tensor]:
    """Selects sentences for every query; a score is forgotten once it is compared.

    Args:
        arguments: a call that ``unsupported`` has let through.

    Returns:
        Int64 offsets ``[Q + 1]``, int64 indices and float32 scores of the selected sentences, for
        each query in the order of the sentences.
    """
    return _select(*_call(arguments), arguments.threshold, arguments.top_k)


def _call(arguments: RelevanceArguments) -> tuple:
    return (
        arguments.sentences,
        arguments.scales,
        arguments.queries,
        arguments.sender,
        arguments.round,
        arguments.hops,
        arguments.now,
        arguments.spatial_decay,
        arguments.temporal_decay,
        arguments.self_policy,
    )
