"""The public relevance operators: validate, choose a backend, run it."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from radar_kernels.backends import choose, needs_gradient
from radar_kernels.checks import check_integer, check_number, check_tensors
from radar_kernels.registration import register, unpack
from radar_kernels.relevance import reference
from radar_kernels.relevance.arguments import RelevanceArguments

_POLICIES = ("clamp", "literal", "exclude")


class Selection(NamedTuple):
    """The sentences selected for each query.

    Args:
        offsets: int64 ``[Q + 1]``; those of query ``q`` lie at ``offsets[q]`` to
            ``offsets[q + 1]`` of the other two.
        indices: int64, ascending within a query.
        scores: float32.
    """

    offsets: Tensor
    indices: Tensor
    scores: Tensor


def relevance_scores(
    sentences: Tensor,
    queries: Tensor,
    sender: Tensor,
    round: Tensor,
    hops: Tensor,
    now: Tensor,
    *,
    scales: Tensor | None = None,
    spatial_decay: float = 0.92,
    temporal_decay: float = 0.92,
    self_policy: str = "clamp",
    backend: str | None = None,
) -> Tensor:
    """Scores sentences by cosine and by how far away and how long ago they were said.

    Args:
        sentences: ``[S, d]``, embeddings, normalised or not (norms are taken in float32, from 1e-12
            to 1e19); floating point, or int8 with ``scales``.
        queries: ``[Q, d]``, floating point; taken in the dtype of ``sentences`` (float32 for
            int8).
        sender: integers ``[S]``, the agent that said a sentence, 0 to A - 1.
        round: integers ``[S]``, when.
        hops: integers ``[Q, A]``, from each agent to the receiver of the query; 0 is the receiver
            itself, -1 unreachable.
        now: integers ``[Q]``, the round of the query.
        scales: floating point ``[S]``, what each row of int8 ``sentences`` is multiplied with;
            None for other dtypes.
        spatial_decay: factor per hop beyond the first, in (0, 1].
        temporal_decay: factor per round beyond the last, in (0, 1].
        self_policy: what to do with the receiver's own and same-round (or later) messages, whose
            exponent is negative: "clamp" it to 0, take it "literal" (a boost), or "exclude" them.
        backend: "triton", "cpp" or "reference"; None chooses.

    Returns:
        Float32 ``[Q, S]``: ``cos(q, s) * spatial_decay^(hops[q, sender[s]] - 1) *
        temporal_decay^(now[q] - round[s] - 1)`` (Agent-Radar, arXiv 2605.30136), -inf for sentences
        that are unreachable or excluded. The cosine with a zero embedding is 0, with one that is
        not finite NaN. An embedding shorter than 1e-12 is divided by 1e-12 instead of its length,
        so its cosine fades to 0; bring such embeddings to scale before.

    Raises:
        ValueError: an argument is malformed, or ``backend`` cannot serve the call.
    """
    arguments = prepare_relevance_scores(
        sentences,
        queries,
        sender,
        round,
        hops,
        now,
        scales=scales,
        spatial_decay=spatial_decay,
        temporal_decay=temporal_decay,
        self_policy=self_policy,
    )
    if not torch.compiler.is_compiling():
        return choose("relevance_scores", arguments, backend)(arguments)
    if needs_gradient(arguments):
        return reference.scores(arguments)
    return _registered_scores(*_fields(arguments)[:9], arguments.scales, backend)


def select_relevant(
    sentences: Tensor,
    queries: Tensor,
    sender: Tensor,
    round: Tensor,
    hops: Tensor,
    now: Tensor,
    *,
    scales: Tensor | None = None,
    spatial_decay: float = 0.92,
    temporal_decay: float = 0.92,
    self_policy: str = "clamp",
    threshold: float | None = 0.65,
    top_k: int | None = None,
    backend: str | None = None,
) -> Selection:
    """Selects the sentences that score high enough, without holding ``[Q, S]`` scores.

    Args:
        sentences: this and all others up to ``self_policy`` as in ``relevance_scores``.
        queries: ``[Q, d]``.
        sender: integers ``[S]``.
        round: integers ``[S]``.
        hops: integers ``[Q, A]``.
        now: integers ``[Q]``.
        scales: floating point ``[S]`` for int8 ``sentences``.
        spatial_decay: factor per hop.
        temporal_decay: factor per round.
        self_policy: "clamp", "literal" or "exclude".
        threshold: the least score selected, itself included, with ``top_k`` too (in which
            ``radar_core.AgentRadar`` drops its default); None selects at any score.
        top_k: at most so many of those, the best; of equals the earlier sentence. None: all.
        backend: "triton", "cpp" or "reference"; None chooses.

    Returns:
        The ``Selection``, in the order of the sentences. Sentences that ``relevance_scores`` gives
        -inf or NaN are never selected.

    Raises:
        ValueError: an argument is malformed, or ``backend`` cannot serve the call.
    """
    arguments = prepare_select_relevant(
        sentences,
        queries,
        sender,
        round,
        hops,
        now,
        scales=scales,
        spatial_decay=spatial_decay,
        temporal_decay=temporal_decay,
        self_policy=self_policy,
        threshold=threshold,
        top_k=top_k,
    )
    if torch.compiler.is_compiling():
        return Selection(*_registered_select(*_fields(arguments), backend))
    return Selection(*choose("select_relevant", arguments, backend)(arguments))


def prepare_relevance_scores(
    sentences: Tensor,
    queries: Tensor,
    sender: Tensor,
    round: Tensor,
    hops: Tensor,
    now: Tensor,
    *,
    scales: Tensor | None = None,
    spatial_decay: float = 0.92,
    temporal_decay: float = 0.92,
    self_policy: str = "clamp",
) -> RelevanceArguments:
    """Validates and normalises a call.

    Args:
        sentences: this and all others as in ``relevance_scores``.

    Returns:
        What the implementations are called with.

    Raises:
        ValueError: an argument is malformed.
    """
    if not torch.compiler.is_compiling():
        _check(sentences, queries, sender, round, hops, now)
        _check_scales(sentences, scales)
        for name, decay in (("spatial_decay", spatial_decay), ("temporal_decay", temporal_decay)):
            check_number(name, decay)
            if not 0 < decay <= 1:
                raise ValueError(f"{name} is {decay}; expected above 0 and at most 1 (no decay)")
        if self_policy not in _POLICIES:
            raise ValueError(f"self_policy is {self_policy!r}; expected one of {_POLICIES}")
    device = sentences.device
    return RelevanceArguments(
        sentences,
        queries.to(device, torch.float32 if scales is not None else sentences.dtype),
        sender.to(device, torch.int64),
        round.to(device, torch.int64),
        hops.to(device, torch.int64),
        now.to(device, torch.int64),
        spatial_decay,
        temporal_decay,
        self_policy,
        scales=None if scales is None else scales.to(device, torch.float32),
    )


def prepare_select_relevant(
    sentences: Tensor,
    queries: Tensor,
    sender: Tensor,
    round: Tensor,
    hops: Tensor,
    now: Tensor,
    *,
    scales: Tensor | None = None,
    spatial_decay: float = 0.92,
    temporal_decay: float = 0.92,
    self_policy: str = "clamp",
    threshold: float | None = 0.65,
    top_k: int | None = None,
) -> RelevanceArguments:
    """Validates and normalises a call.

    Args:
        sentences: this and all others as in ``select_relevant``.

    Returns:
        What the implementations are called with.

    Raises:
        ValueError: an argument is malformed.
    """
    arguments = prepare_relevance_scores(
        sentences,
        queries,
        sender,
        round,
        hops,
        now,
        scales=scales,
        spatial_decay=spatial_decay,
        temporal_decay=temporal_decay,
        self_policy=self_policy,
    )
    if threshold is not None:
        check_number("threshold", threshold)
        if math.isnan(threshold):
            raise ValueError("threshold is NaN; expected a score, or None for no threshold")
    if top_k is not None:
        check_integer("top_k", top_k)
        if top_k < 1:
            raise ValueError(f"top_k is {top_k}; expected at least 1, or None for all")
    return replace(arguments, threshold=threshold, top_k=top_k)


def _check(
    sentences: Tensor, queries: Tensor, sender: Tensor, round: Tensor, hops: Tensor, now: Tensor
) -> None:
    check_tensors(
        sentences=sentences, queries=queries, sender=sender, round=round, hops=hops, now=now
    )
    if (
        sentences.dim() != 2
        or queries.dim() != 2
        or sentences.shape[1] != queries.shape[1]
        or not (sentences.is_floating_point() or sentences.dtype == torch.int8)
        or not queries.is_floating_point()
    ):
        raise ValueError(
            f"sentences are {sentences.dtype} {list(sentences.shape)} and queries {queries.dtype} "
            f"{list(queries.shape)}; expected floating point (or int8) [S, d] and floating [Q, d]"
        )
    count, asked = sentences.shape[0], queries.shape[0]
    wanted = {"sender": (sender, (count,)), "round": (round, (count,)), "now": (now, (asked,))}
    for name, (given, shape) in wanted.items():
        if given.shape != shape or given.is_floating_point() or given.dtype == torch.bool:
            raise ValueError(
                f"{name} is {given.dtype} {list(given.shape)}; expected integers {list(shape)}"
            )
    if hops.dim() != 2 or hops.shape[0] != asked or hops.is_floating_point():
        raise ValueError(
            f"hops are {hops.dtype} {list(hops.shape)}; expected integers [{asked}, agents]"
        )
    if sender.device.type == "cpu" and count:
        least, most = (int(end) for end in sender.aminmax())
        if least < 0 or most >= hops.shape[1]:
            raise ValueError(
                f"sender holds {least} to {most}; expected 0 to {hops.shape[1] - 1}, the "
                "columns of hops"
            )


def _check_scales(sentences: Tensor, scales: Tensor | None) -> None:
    if scales is None:
        if sentences.dtype == torch.int8:
            raise ValueError(
                f"scales is None with int8 sentences; expected floating point "
                f"[{sentences.shape[0]}], what each row is multiplied with"
            )
        return
    if sentences.dtype != torch.int8:
        raise ValueError(f"scales are given with {sentences.dtype} sentences; expected int8 ones")
    if scales.shape != sentences.shape[:1] or not scales.is_floating_point():
        raise ValueError(
            f"scales are {scales.dtype} {list(scales.shape)}; expected floating point "
            f"[{sentences.shape[0]}]"
        )


def _fields(arguments: RelevanceArguments) -> list:
    return [getattr(arguments, name) for name in RelevanceArguments.__slots__]


def _run_scores(*arguments: Any) -> Tensor:
    scales, backend, *_ = (*arguments[9:], None, None)
    call = replace(RelevanceArguments(*arguments[:9]), scales=scales)
    return choose("relevance_scores", call, backend)(call).contiguous()


def _fake_scores(sentences: Tensor, queries: Tensor, *others: object) -> Tensor:
    return sentences.new_empty(queries.shape[0], sentences.shape[0], dtype=torch.float32)


def _run_select(*arguments: object) -> tuple[Tensor, Tensor, Tensor]:
    call, backend = unpack(RelevanceArguments, arguments)
    return choose("select_relevant", call, backend)(call)


def _fake_select(
    sentences: Tensor, queries: Tensor, *others: object
) -> tuple[Tensor, Tensor, Tensor]:
    selected = torch.library.get_ctx().new_dynamic_size()
    return (
        sentences.new_empty(queries.shape[0] + 1, dtype=torch.int64),
        sentences.new_empty(selected, dtype=torch.int64),
        sentences.new_empty(selected, dtype=torch.float32),
    )


_SCHEMA = (
    "Tensor sentences, Tensor queries, Tensor sender, Tensor round, Tensor hops, Tensor now, "
    "float spatial_decay, float temporal_decay, str self_policy"
)
register(
    f"relevance_scores({_SCHEMA}, Tensor? scales=None, str? backend=None) -> Tensor",
    _run_scores,
    _fake_scores,
)
register(
    f"select_relevant({_SCHEMA}, float? threshold, int? top_k, Tensor? scales=None, "
    "str? backend=None) -> (Tensor, Tensor, Tensor)",
    _run_select,
    _fake_select,
)
_registered_scores = torch.ops.radar.relevance_scores.default
_registered_select = torch.ops.radar.select_relevant.default
