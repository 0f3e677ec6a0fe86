"""The public function of key edits."""

import math

import torch
from torch import Tensor

from radar_kernels.backends import choose, needs_gradient
from radar_kernels.checks import check_numbers, check_tensors
from radar_kernels.key_edit import reference
from radar_kernels.key_edit.arguments import KeyEditArguments
from radar_kernels.registration import register


def edit_keys(
    key: Tensor,
    anchors: Tensor,
    projection: Tensor | tuple[Tensor, Tensor, Tensor],
    gain: float | Tensor,
    *,
    backend: str | None = None,
) -> Tensor:
    """Amplifies a subspace of the keys at anchored positions.

    Args:
        key: ``[B, Hkv, k, D]``, floating point, before rotary embedding; not written to.
        anchors: bool ``[B, k]`` or ``[1, k]``.
        projection: floating ``[Hkv, D, D]``, or a low-rank ``(U, S, V)`` of shapes
            ``[Hkv, D, r]``, ``[Hkv, r]``, ``[Hkv, D, r]`` that stands for ``U diag(S) V^T``.
        gain: float or ``[Hkv]``, finite; 0 changes nothing.
        backend: "triton", "cpp" or "reference"; None chooses.

    Returns:
        New keys, same shape and dtype: ``k + gain * (k @ P)`` with ``k`` as rows at anchored
        positions, the same bits elsewhere (SEKA, Li et al., arXiv 2603.01281; its projections are
        symmetric).

    Raises:
        ValueError: an argument is malformed, or ``backend`` cannot serve the call.
    """
    arguments = prepare_edit_keys(key, anchors, projection, gain)
    if not torch.compiler.is_compiling():
        return choose("edit_keys", arguments, backend)(arguments)
    if needs_gradient(arguments):
        return reference.run(arguments)
    return _registered(
        key, arguments.anchors, arguments.left, arguments.right, arguments.gain, backend
    )


def prepare_edit_keys(
    key: Tensor,
    anchors: Tensor,
    projection: Tensor | tuple[Tensor, Tensor, Tensor],
    gain: float | Tensor,
) -> KeyEditArguments:
    """Validates and normalises a call.

    Args:
        key: this and all others as in ``edit_keys``.

    Returns:
        What the implementations are called with.

    Raises:
        ValueError: an argument is malformed.
    """
    check_tensors(key=key, anchors=anchors)
    if key.dim() != 4 or not key.is_floating_point():
        raise ValueError(
            f"key is {key.dtype} {list(key.shape)}; expected floating point [B, Hkv, k, D]"
        )
    batch, heads, keys, size = key.shape
    # Sizes one by one: symbolic ones are not found in a tuple.
    fits = anchors.dim() == 2 and (anchors.shape[0] == batch or anchors.shape[0] == 1)
    if anchors.dtype != torch.bool or not fits or anchors.shape[1] != keys:
        raise ValueError(
            f"anchors are {anchors.dtype} {list(anchors.shape)}; expected bool [{batch}, {keys}]"
        )
    left, right = _factors(projection, heads, size, key)
    return KeyEditArguments(
        key,
        anchors.to(key.device).expand(batch, keys),
        left,
        right,
        _gain(gain, heads, key.device),
    )


def _factors(
    projection: Tensor | tuple[Tensor, Tensor, Tensor], heads: int, size: int, key: Tensor
) -> tuple[Tensor, Tensor | None]:
    dtype = torch.float64 if key.dtype == torch.float64 else torch.float32
    if isinstance(projection, Tensor):
        if projection.shape != (heads, size, size):
            raise ValueError(
                f"projection is {list(projection.shape)}; expected [{heads}, {size}, {size}], one "
                "for each key head, or a tuple (U, S, V)"
            )
        return projection.to(key.device, dtype), None
    if not isinstance(projection, tuple | list) or len(projection) != 3:
        raise ValueError(
            f"projection is {type(projection).__name__}; expected a tensor or a tuple (U, S, V)"
        )
    left, singular, right = projection
    check_tensors(U=left, S=singular, V=right)
    rank = left.shape[-1]
    if (
        left.shape != (heads, size, rank)
        or singular.shape != (heads, rank)
        or right.shape != (heads, size, rank)
    ):
        raise ValueError(
            f"projection is {list(left.shape)}, {list(singular.shape)}, {list(right.shape)}; "
            f"expected U [{heads}, {size}, r], S [{heads}, r] and V [{heads}, {size}, r]"
        )
    scaled = left.to(key.device, dtype) * singular.to(key.device, dtype)[:, None]
    return scaled, right.to(key.device, dtype).mT


def _gain(gain: float | Tensor, heads: int, device: torch.device) -> Tensor:
    if not torch.compiler.is_compiling():
        check_numbers("gain", gain)
    if not isinstance(gain, Tensor):
        if not torch.compiler.is_compiling() and not math.isfinite(gain):
            raise ValueError(f"gain is {gain}; expected a finite number")
        return torch.full((heads,), gain, dtype=torch.float32, device=device)
    if gain.shape not in ((), (heads,)):
        raise ValueError(
            f"gain has shape {list(gain.shape)}; expected a number or [{heads}], one a key head"
        )
    return gain.to(device, torch.float32).expand(heads)


def _run(
    key: Tensor,
    anchors: Tensor,
    left: Tensor,
    right: Tensor | None,
    gain: Tensor,
    backend: str | None = None,
) -> Tensor:
    call = KeyEditArguments(key, anchors, left, right, gain)
    return choose("edit_keys", call, backend)(call).contiguous()


def _fake(key: Tensor, *others: object) -> Tensor:
    return key.new_empty(key.shape)


register(
    "edit_keys(Tensor key, Tensor anchors, Tensor left, Tensor? right, Tensor gain, "
    "str? backend=None) -> Tensor",
    _run,
    _fake,
)
_registered = torch.ops.radar.edit_keys.default
