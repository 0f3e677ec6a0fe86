"""The public function of anchor attention: validates, chooses a backend, runs it."""

import torch
from torch import Tensor

from radar_kernels.anchor_attention import cpp, reference, sdpa
from radar_kernels.anchor_attention.arguments import TARGET_MODES, AnchorAttentionArguments
from radar_kernels.anchor_attention.validation import (
    LARGEST,
    SMALLEST,
    check_shapes,
    checked_anchors,
    checked_key_lengths,
    checked_mask,
    described,
    per_head,
    unit_stride,
)
from radar_kernels.backends import choose, needs_gradient
from radar_kernels.checks import check_integer, check_number, check_tensors
from radar_kernels.registration import register, token_major, unpack


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
            of the bias (nonzero = anchored). None anchors nothing. Without ``bias`` and
            ``target_mass`` the anchors do not change the output, only the mass is theirs.
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
    compiling = torch.compiler.is_compiling()
    if backend is None and not compiling:
        done = cpp.attend_at_once(
            query,
            key,
            value,
            anchors,
            bias,
            target_mass,
            target_mode,
            mask,
            key_lengths,
            causal,
            scale,
            window,
            softcap,
            sinks,
            return_mass,
        )
        if done is not None:
            return done if return_mass else done[0]
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
    if compiling:
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
        check_tensors(query=query, key=key, value=value)
        check_shapes(query, key, value)
    batch, heads, tokens, size = query.shape
    keys = key.shape[2]
    if scale is None:
        scale = size**-0.5
    elif checked:
        check_number("scale", scale)
        if not abs(scale) <= LARGEST:
            raise ValueError(
                f"scale is {scale}; expected a finite number of float32, or None for 1/sqrt(D)"
            )
    if checked:
        if not isinstance(causal, bool):
            raise ValueError(f"causal is {causal!r}; expected True or False")
        if window is not None:
            check_integer("window", window)
            if not causal or window < 1:
                raise ValueError(
                    f"window is {window} with causal={causal}; expected at least 1 and causal=True"
                )
        if softcap is not None:
            check_number("softcap", softcap)
            if not SMALLEST <= softcap <= LARGEST:
                raise ValueError(
                    f"softcap is {softcap}; expected a positive number of float32, or None for none"
                )
        if not isinstance(target_mode, str) or target_mode not in TARGET_MODES:
            raise ValueError(f"target_mode is {target_mode!r}; expected 'at_least' or 'exact'")
        if bias is not None and target_mass is not None:
            raise ValueError("bias and target_mass are both given; give one of them")

        # The last key is the last query's: a window of all keys, and one query, hide nothing.
        if window is not None and window >= keys:
            window = None
    if tokens == 1 and window is None:
        causal = False

    if anchors is not None:
        anchors = checked_anchors(anchors, batch, keys, query, checked)
        if target_mass is not None and anchors.dtype != torch.bool:
            raise ValueError(
                f"anchors are {anchors.dtype} with a target_mass; expected bool, pass anchors != 0"
            )
        if bias is not None:
            bias = per_head("bias", bias, batch, heads, query.device, checked)
        if target_mass is not None:
            target_mass = per_head("target_mass", target_mass, batch, heads, query.device, checked)
    else:
        bias = target_mass = None
    if bias is None and target_mass is None and not return_mass:
        anchors = None
    if mask is not None:
        mask = checked_mask(mask, batch, heads, tokens, keys, query, checked)
    if key_lengths is not None:
        key_lengths = checked_key_lengths(key_lengths, batch, keys, query, checked)
    if sinks is not None:
        if checked:
            check_tensors(sinks=sinks)
        if checked and (sinks.shape != (heads,) or not sinks.is_floating_point()):
            raise ValueError(
                f"sinks are {described(sinks)}; expected floating point [{heads}], one a head"
            )
        if checked and sinks.device.type == "cpu" and not bool((sinks <= LARGEST).all()):
            raise ValueError(f"sinks are {sinks.tolist()}; expected numbers, or -inf for none")
        sinks = sinks.to(query.device, torch.float32).contiguous()
    return AnchorAttentionArguments(
        unit_stride(query),
        unit_stride(key),
        unit_stride(value),
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
    call, backend = unpack(AnchorAttentionArguments, arguments)
    out, mass = choose("anchor_attention", call, backend)(call)
    if mass is None:
        mass = out.new_empty(0, dtype=torch.float32)
    return token_major(out), mass.contiguous()


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
