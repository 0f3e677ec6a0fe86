"""What every implementation of anchor attention is called with, after validation."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Whether a target mass is set exactly, by the name of its mode.
TARGET_MODES = {"at_least": False, "exact": True}


@dataclass(frozen=True, slots=True, eq=False)
class AnchorAttentionArguments:
    """One validated, normalised call of ``anchor_attention``.

    With ``s = scale * query . key`` (then ``softcap * tanh(s / softcap)`` if given), the
    steered logit of key ``j`` is ``s + bias[head] * anchors[j]``; ``target_mass`` chooses the
    bias per row, head and query instead. Query ``i`` of ``q`` sits at key position
    ``key_lengths[b] - q + i`` (``k - q + i`` without ``key_lengths``).

    Args:
        query: ``[B, Hq, q, D]``, floating, last stride 1.
        key: ``[B, Hkv, k, D]``, dtype of ``query``, last stride 1; query head ``h`` reads
            key head ``h // (Hq // Hkv)``.
        value: ``[B, Hkv, k, Dv]``, dtype of ``query``, last stride 1. Positions that may not
            be attended to may hold NaN or inf, in ``key`` as well.
        anchors: None, bool ``[B, k]`` or float32 ``[B, k]`` (factor of the bias; nonzero means
            anchored); last stride 1, any row stride, row stride 0 included.
        bias: None or float32 contiguous ``[B or 1, Hq]``; None together with ``anchors`` when
            nothing is added to the logits. Never given together with ``target_mass``.
        target_mass: None or float32 contiguous ``[B or 1, Hq]`` in (0, 1); bool anchors only.
        target_exact: False raises the mass to at least the target, True sets it.
        mask: None or bool 4-D, each size 1 or full (``[B|1, Hq|1, q|1, k]``), True = may attend.
        key_lengths: None or int32 ``[B]``, between 0 and ``k``; keys at or beyond are never read.
        causal: query ``i`` sees key positions up to its own.
        scale: factor of the dot products.
        window: None or the number of latest keys a query sees (its own included); needs causal.
        softcap: None or the positive cap of the logits before the bias.
        sinks: None or float32 contiguous ``[Hq]``: one more logit per head that takes mass and
            has no value; never anchored.
        return_mass: whether the share of attention on the anchors before steering is wanted.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    anchors: Tensor | None = None
    bias: Tensor | None = None
    target_mass: Tensor | None = None
    target_exact: bool = False
    mask: Tensor | None = None
    key_lengths: Tensor | None = None
    causal: bool = False
    scale: float = 1.0
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    return_mass: bool = False

    @property
    def device(self) -> torch.device:
        """Where every tensor of the call lies."""
        return self.query.device
