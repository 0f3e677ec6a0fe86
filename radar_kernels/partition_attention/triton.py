"""Partitioned attention on GPUs, in Triton: anchor attention's kernel writes its two parts."""

from torch import Tensor

from radar_kernels import triton_launch
from radar_kernels.anchor_attention.arguments import AnchorAttentionArguments
from radar_kernels.anchor_attention.triton import Results, launches, unsupported
from radar_kernels.triton_launch import run_all, target_of

__all__ = ["absent", "run", "unsupported"]

absent = triton_launch.absent


def run(
    arguments: AnchorAttentionArguments, *, splits: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes both parts in one pass over the keys.

    Args:
        arguments: a validated call with bool anchors that ``unsupported`` accepts.
        splits: most stretches a row's keys are cut into; None chooses, as in anchor attention.

    Returns:
        Output ``[B, Hq, q, Dv]`` (stored as ``[B, q, Hq, Dv]``) and float32 log-sum-exp
        ``[B, Hq, q]`` of the anchored keys, then of the rest.
    """
    results = Results.empty(arguments, partition=True)
    anchored, anchored_lse, rest_lse = results.anchored, results.anchored_lse, results.rest_lse
    assert anchored is not None and anchored_lse is not None and rest_lse is not None
    if anchored_lse.numel() != 0:
        target = target_of(arguments.device)
        run_all(launches(arguments, target, results, splits=splits), arguments.device)
    return anchored, anchored_lse, results.out, rest_lse
