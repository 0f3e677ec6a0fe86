"""Anchor attention on CPUs, in C++.

Up to eight query tokens are served by one pass over the keys and values for all query heads of a
group. More go tile by tile over matrix products (oneDNN's, or our own where the CPU has AVX512_BF16
and no AMX), with the bias, masks and the softmax fused between them, so that a bias costs nothing
beside plain attention. In bfloat16 the few tokens use AMX or AVX512_BF16 too, in whose products
numbers below 2^-126 count as 0. A row's result depends on that row alone: not on its batch and not
on the number of threads.
"""

import os

import torch
from torch import Tensor

from radar_kernels import native
from radar_kernels.anchor_attention.arguments import TARGET_MODES, AnchorAttentionArguments
from radar_kernels.anchor_attention.validation import constant
from radar_kernels.backends import needs_gradient, records_gradient

_FEW_QUERIES = 8
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

absent = native.absent

if absent() is None:
    _attend = torch.ops.radar_cpp.anchor_attention.default
    _products_absent = torch.ops.radar_cpp.products_absent()


def unsupported(arguments: AnchorAttentionArguments) -> str | None:
    """Says why a call cannot be served.

    Args:
        arguments: the validated call.

    Returns:
        The reason, or None if ``run`` can serve it.
    """
    query = arguments.query
    if query.device.type != "cpu":
        return f"it runs on the CPU only, these tensors are on {query.device}"
    tokens = query.shape[2]
    if tokens == 0:
        return "it needs at least one query token"
    if tokens > _FEW_QUERIES and _products_absent:
        return f"more than {_FEW_QUERIES} query tokens need oneDNN: {_products_absent}"
    if query.dtype not in _DTYPES:
        return f"it takes float32, bfloat16 and float16, got {query.dtype}"
    if needs_gradient(arguments):
        return "it computes no gradients, and an input requires one (torch.no_grad() turns it off)"
    return None


def run(arguments: AnchorAttentionArguments) -> tuple[Tensor, Tensor | None]:
    """Computes a call that ``unsupported`` has let through.

    Args:
        arguments: the validated call.

    Returns:
        ``[B, Hq, q, Dv]`` in the dtype of the query (stored as ``[B, q, Hq, Dv]``), and the mass
        on the anchors before steering, float32 ``[B, Hq, q]``, or None if it was not asked for.
    """
    out, mass = _attend(
        arguments.query,
        arguments.key,
        arguments.value,
        arguments.anchors,
        arguments.bias,
        arguments.target_mass,
        arguments.target_exact,
        arguments.mask,
        arguments.key_lengths,
        arguments.causal,
        arguments.scale,
        arguments.window,
        arguments.softcap,
        arguments.sinks,
        arguments.return_mass,
    )
    return out, mass if arguments.return_mass else None


def attend_at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    anchors: Tensor | None,
    bias: float | Tensor | None,
    target_mass: float | Tensor | None,
    target_mode: str,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    return_mass: bool,
) -> tuple[Tensor, Tensor] | None:
    """Tries a call as it was given: C++ then checks it, in a third of the time.

    Args:
        query: this and all others as in ``anchor_attention``.

    Returns:
        Output, and mass (empty if it was not asked for). None if the call has to be looked at in
        Python: to be normalised, served by another backend, or refused in words.
    """
    if absent() is not None or "RADAR_BACKEND" in os.environ or records_gradient(query, key, value):
        return None
    try:
        if query.dtype not in _DTYPES or not query.is_cpu:
            return None
        # The operator's schema would take much for a number.
        if type(causal) is not bool or not _numbers(scale, softcap, window):
            return None
        heads = query.shape[1]
        return _attend(
            query,
            key,
            value,
            anchors,
            _tensor(bias, heads),
            _tensor(target_mass, heads),
            TARGET_MODES[target_mode],
            mask,
            key_lengths,
            causal,
            query.shape[3] ** -0.5 if scale is None else scale,
            window,
            softcap,
            sinks,
            return_mass,
        )
    # Whatever is wrong, the checks in Python find it again and have the words for it.
    except Exception:
        return None


def _tensor(given: float | Tensor | None, heads: int) -> Tensor | None:
    if given is None or (isinstance(given, Tensor) and given.is_floating_point()):
        return given
    if not _numbers(given):
        raise TypeError(f"{given!r} is to be looked at in Python")
    return constant(float(given), heads, torch.device("cpu"))


def _numbers(*given: object) -> bool:
    return all(one is None or type(one) in (int, float) for one in given)
