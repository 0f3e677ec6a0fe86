"""Partitioned attention through torch's flash attention for CPUs."""

from torch import Tensor

from radar_kernels.anchor_attention.arguments import AnchorAttentionArguments
from radar_kernels.anchor_attention.flash import attend_parts, why_not_flash
from radar_kernels.backends import needs_gradient


def unsupported(arguments: AnchorAttentionArguments) -> str | None:
    """Says why a call cannot be served by this backend.

    Args:
        arguments: the validated call.

    Returns:
        The reason, or None if ``run`` can serve it.
    """
    if arguments.softcap is not None:
        return "torch's attention has no softcap"
    if needs_gradient(arguments):
        return "its log-sum-exp has no gradient"
    return why_not_flash(arguments)


def run(arguments: AnchorAttentionArguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes both parts; the anchored one costs only as many keys as are anchored.

    Args:
        arguments: a validated call that ``unsupported`` accepts.

    Returns:
        Output ``[B, Hq, q, Dv]`` and log-sum-exp ``[B, Hq, q]`` of the anchored keys, then of the
        rest.
    """
    return attend_parts(arguments)
