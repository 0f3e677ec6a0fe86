"""The public function of anchor attention: validates, chooses a backend, runs it."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from radar_kernels.anchor_attention import reference, sdpa
from radar_kernels.anchor_attention.arguments import AnchorAttentionArguments
from radar_kernels.backends import choose, needs_gradient
from radar_kernels.registration import register

_TARGET_MODES = {"at_least": False, "exact": True}


def anchor_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    anchors: Tensor | None = None,
    *,
    bias: float | Tensor | None = None,
    target_mass: float | Tensor | None = None,
    target_mode: str = "at_least",
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_mass: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attends with a bias on the anchored keys, in O(heads x keys) memory for the bias.

    Args:
        query: ``[B, Hq, q, D]``, float32, float16, bfloat16 or float64.
        key: ``[B, Hkv, k, D]``, not repeated: query head ``h`` reads key head
            ``h // (Hq // Hkv)``.
        value: ``[B, Hkv, k, Dv]``.
        anchors: ``[B, k]`` (or ``[1, k]``), bool, or finite floats of any sign as a per-key factor
            of the bias (nonzero = anchored). None anchors nothing.
        bias: added to the logits of anchored keys, after scale and softcap: a float, 0-dim,
            ``[Hq]``, ``[B, Hq]`` or ``[B, 1]``; finite, in nats.
        target_mass: share of attention the anchors shall have, in (0, 1), same shapes as
            ``bias``; needs bool anchors and no ``bias``.
        target_mode: ``"at_least"`` only raises the mass, ``"exact"`` also lowers it.
        mask: bool, True = may attend; ``[B, k]``, or 4-D broadcastable to ``[B, Hq, q, k]``.
        key_lengths: integers ``[B]`` in 0..k; keys at or beyond are never read. None means k.
        causal: query ``i`` sits at key ``key_lengths[b] - q + i`` and sees keys up to its own.
        scale: factor of the dot products; None means ``1 / sqrt(D)``.
        window: a query at ``p`` sees keys ``p - window + 1`` to ``p``; needs ``causal``.
        softcap: ``s`` becomes ``softcap * tanh(s / softcap)`` before the bias; positive.
        sinks: ``[Hq]``, one more logit per head that takes mass and has no value.
        return_mass: return the mass too.
        backend: "triton", "cpp", "sdpa" or "reference"; None chooses.

    Returns:
        ``[B, Hq, q, Dv]`` in the dtype of ``query``; with ``return_mass`` also the share of
        attention on the anchors before steering, float32 ``[B, Hq, q]``. A query that may attend
        to nothing gets 0 and mass 0. Keys that no query of a row may attend to may hold NaN.

    Raises:
        ValueError: an argument is malformed, or ``backend`` cannot serve the call.

    With ``s`` the logits and ``a`` the anchors, ``out = softmax(s + bias * a) @ value``.
    PASTA(alpha) is ``bias = -log(alpha)`` (Zhang et al., 2024), InstABoost(M) ``bias = log(M)``,
    GUIDE(delta) ``bias = delta``. A target mass ``t`` (after SpotLight) sets, per query and head,
    ``bias = log(t / (1 - t)) - log(mass / (1 - mass))``; rows of mass 0 or 1 are left alone.
    """
    arguments = prepare_anchor_attention(
        query,
        key,
        value,
        anchors,
        bias=bias,
        target_mass=target_mass,
        target_mode=target_mode,
        mask=mask,
        key_lengths=key_lengths,
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        return_mass=return_mass,
    )
    if torch.compiler.is_compiling():
        out, mass = _traced(arguments, backend)
    else:
        out, mass = choose("anchor_attention", arguments, backend)(arguments)
    if not return_mass:
        return out
    assert mass is not None
    return out, mass


def prepare_anchor_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    anchors: Tensor | None = None,
    *,
    bias: float | Tensor | None = None,
    target_mass: float | Tensor | None = None,
    target_mode: str = "at_least",
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_mass: bool = False,
) -> AnchorAttentionArguments:
    """Validates and normalises a call; reads no values from an accelerator.

    Args:
        query: this and all others as in ``anchor_attention``.

    Returns:
        What the implementations are called with.

    Raises:
        ValueError: an argument is malformed.
    """
    checked = not torch.compiler.is_compiling()
    if checked:
        _check_shapes(query, key, value)
    batch, heads, tokens, size = query.shape
    keys = key.shape[2]
    if scale is None:
        scale = size**-0.5
    elif checked and not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; expected a finite number, or None for 1/sqrt(D)")
    if checked:
        if window is not None and (not causal or window < 1):
            raise ValueError(
                f"window is {window} with causal={causal}; expected at least 1 and causal=True"
            )
        if softcap is not None and not 0 < softcap < math.inf:
            raise ValueError(f"softcap is {softcap}; expected a positive number, or None for none")
        if target_mode not in _TARGET_MODES:
            raise ValueError(f"target_mode is {target_mode!r}; expected 'at_least' or 'exact'")
        if bias is not None and target_mass is not None:
            raise ValueError("bias and target_mass are both given; give one of them")

    if anchors is not None:
        anchors = _anchors(anchors, batch, keys, query, checked)
        if target_mass is not None and anchors.dtype != torch.bool:
            raise ValueError(
                f"anchors are {anchors.dtype} with a target_mass; expected bool, pass anchors != 0"
            )
        if bias is not None:
            bias = _per_head("bias", bias, batch, heads, query, checked)
        if target_mass is not None:
            target_mass = _per_head("target_mass", target_mass, batch, heads, query, checked)
    else:
        bias = target_mass = None
    if bias is None and target_mass is None and not return_mass:
        anchors = None
    if mask is not None:
        mask = _mask(mask, batch, heads, tokens, keys, query, checked)
    if key_lengths is not None:
        key_lengths = _key_lengths(key_lengths, batch, keys, query, checked)
    if sinks is not None:
        if checked and (sinks.shape != (heads,) or not sinks.is_floating_point()):
            raise ValueError(
                f"sinks are {_described(sinks)}; expected floating point [{heads}], one a head"
            )
        sinks = sinks.to(query.device, torch.float32).contiguous()
    return AnchorAttentionArguments(
        _unit_stride(query),
        _unit_stride(key),
        _unit_stride(value),
        anchors,
        bias,
        target_mass,
        target_mode == "exact",
        mask,
        key_lengths,
        causal,
        scale,
        window,
        softcap,
        sinks,
        return_mass,
    )


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise ValueError(
            f"query, key and value are {_described(query)}, {_described(key)}, "
            f"{_described(value)}; expected four dimensions [batch, heads, tokens, head size]"
        )
    batch, heads, _, size = query.shape
    key_batch, key_heads, keys, key_size = key.shape
    if key_batch != batch or key_size != size or value.shape[:3] != (batch, key_heads, keys):
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} do "
            "not fit; expected [B,Hq,q,D], [B,Hkv,k,D] and [B,Hkv,k,Dv]"
        )
    if key_heads == 0 or heads % key_heads:
        raise ValueError(
            f"query has {heads} heads and key {key_heads}; expected a multiple of the key heads. "
            "Pass key and value as they are in the cache, not repeated"
        )
    dtype, device = query.dtype, query.device
    if not dtype.is_floating_point or key.dtype != dtype or value.dtype != dtype:
        raise ValueError(
            f"query, key and value are {dtype}, {key.dtype} and {value.dtype}; "
            "expected one floating point dtype"
        )
    if key.device != device or value.device != device:
        raise ValueError(
            f"query, key and value are on {device}, {key.device} and {value.device}; "
            "expected one device"
        )


def _anchors(anchors: Tensor, batch: int, keys: int, query: Tensor, checked: bool) -> Tensor:
    if checked and (
        anchors.dim() != 2 or anchors.shape[1] != keys or anchors.shape[0] not in (1, batch)
    ):
        raise ValueError(
            f"anchors are {_described(anchors)}; expected [{batch}, {keys}], one for each key. "
            "Keys made during generation are keys too: extend the anchors with False"
        )
    if anchors.dtype != torch.bool:
        if not anchors.is_floating_point():
            raise ValueError(
                f"anchors are {anchors.dtype}; expected bool, or floats as a factor of the bias. "
                "Pass anchors.bool() for a 0/1 mask"
            )
        anchors = anchors.to(torch.float32)
    if anchors.device != query.device:
        anchors = anchors.to(query.device)
    if anchors.shape[0] != batch:
        anchors = anchors.expand(batch, keys)
    return _unit_stride(anchors)


def _per_head(
    name: str, given: float | Tensor, batch: int, heads: int, query: Tensor, checked: bool
) -> Tensor:
    """A float, 0-dim, [Hq], [B,Hq] or [B,1] as contiguous float32 [B or 1, Hq]."""
    if not isinstance(given, Tensor):
        if checked:
            _check_values(name, (given,))
            return _constant(float(given), heads, query.device)
        return torch.full((1, heads), given, dtype=torch.float32, device=query.device)
    shape = given.shape
    if given.dim() == 0:
        rows = given.expand(1, heads)
    elif given.dim() == 1 and shape[0] == heads:
        rows = given.unsqueeze(0)
    elif given.dim() == 2 and shape[0] in (1, batch) and shape[1] in (1, heads):
        rows = given if shape[1] == heads else given.expand(shape[0], heads)
    else:
        raise ValueError(
            f"{name} is {_described(given)}; expected a float, a 0-dim tensor, [{heads}] for one "
            f"value a head, [{batch}, {heads}], or [{batch}, 1] for one value a row"
        )
    if checked and given.device.type == "cpu":
        _check_values(name, given.flatten().tolist())
    return rows.to(query.device, torch.float32).contiguous()


def _check_values(name: str, values: tuple | list) -> None:
    if name == "target_mass":
        if not all(0 < one < 1 for one in values):
            raise ValueError(
                f"target_mass is {values}; expected shares of attention between 0 and 1, "
                "both excluded"
            )
    elif not math.isfinite(sum(values)):
        raise ValueError(
            f"{name} is {values}; expected finite numbers. Use mask to hide keys altogether"
        )


@lru_cache(maxsize=256)
def _constant(number: float, heads: int, device: torch.device) -> Tensor:
    # A tensor made in inference mode could not be used where autograd records.
    with torch.inference_mode(False):
        return torch.full((1, heads), number, dtype=torch.float32, device=device)


def _mask(
    mask: Tensor, batch: int, heads: int, tokens: int, keys: int, query: Tensor, checked: bool
) -> Tensor:
    if checked and (mask.dtype != torch.bool or mask.dim() not in (2, 4)):
        raise ValueError(
            f"mask is {_described(mask)}; expected bool, True where a query may attend, [B, k] or "
            "four dimensions. An additive mask becomes one with mask == 0"
        )
    if mask.dim() == 2:
        mask = mask[:, None, None]
    if checked:
        full = (batch, heads, tokens, keys)
        fits = all(one in (1, other) for one, other in zip(mask.shape, full, strict=True))
        if not fits or mask.shape[3] != keys:
            raise ValueError(
                f"mask is {_described(mask)}; expected [{batch}, {keys}], or four dimensions "
                f"broadcastable to {list(full)} with all {keys} keys"
            )
        for dimension in range(3):
            if mask.shape[dimension] > 1 and mask.stride(dimension) == 0:
                mask = mask.narrow(dimension, 0, 1)
    if mask.device != query.device:
        mask = mask.to(query.device)
    return _unit_stride(mask)


def _key_lengths(
    key_lengths: Tensor, batch: int, keys: int, query: Tensor, checked: bool
) -> Tensor:
    if checked:
        if key_lengths.shape != (batch,) or key_lengths.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"key_lengths are {_described(key_lengths)}; expected int32 [{batch}], the number "
                "of keys in use in each row"
            )
        if key_lengths.device.type == "cpu" and not all(
            0 <= one <= keys for one in key_lengths.tolist()
        ):
            raise ValueError(
                f"key_lengths are {key_lengths.tolist()}; expected 0 to {keys}, the keys there are"
            )
    return key_lengths.to(query.device, torch.int32)


def _unit_stride(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _traced(
    arguments: AnchorAttentionArguments, backend: str | None
) -> tuple[Tensor, Tensor | None]:
    if needs_gradient(arguments):
        # The registered operator is opaque to autograd; these are plain PyTorch.
        if backend != "reference" and sdpa.unsupported(arguments) is None:
            return sdpa.run(arguments)
        return reference.run(arguments)
    return _registered(
        *(getattr(arguments, name) for name in AnchorAttentionArguments.__slots__), backend
    )


def _run(*arguments: object) -> tuple[Tensor, Tensor]:
    *fields, backend = arguments
    call = AnchorAttentionArguments(*fields)  # type: ignore[arg-type]
    out, mass = choose("anchor_attention", call, backend)(call)  # type: ignore[arg-type]
    if mass is None:
        mass = out.new_empty(0, dtype=torch.float32)
    return _token_major(out), mass.contiguous()


def _token_major(out: Tensor) -> Tensor:
    """One memory layout whatever ran: [B, q, Hq, Dv], which models reshape without a copy."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _fake(*arguments: object) -> tuple[Tensor, Tensor]:
    query, _, value = arguments[:3]
    batch, heads, tokens, _ = query.shape  # type: ignore[attr-defined]
    out = query.new_empty(batch, tokens, heads, value.shape[3])  # type: ignore[attr-defined]
    size = (batch, heads, tokens) if arguments[14] else (0,)
    return out.transpose(1, 2), out.new_empty(size, dtype=torch.float32)


register(
    "anchor_attention(Tensor query, Tensor key, Tensor value, Tensor? anchors, Tensor? bias, "
    "Tensor? target_mass, bool target_exact, Tensor? mask, Tensor? key_lengths, bool causal, "
    "float scale, int? window, float? softcap, Tensor? sinks, bool return_mass, "
    "str? backend=None) -> (Tensor, Tensor)",
    _run,
    _fake,
)
_registered = torch.ops.radar.anchor_attention.default
