"""The public logit operators: validate, choose a backend, run it."""

import math

import torch
from torch import Tensor

from radar_kernels.backends import choose, needs_gradient
from radar_kernels.checks import check_integer, check_numbers, check_tensors
from radar_kernels.logit_blend import reference
from radar_kernels.logit_blend.arguments import BlendArguments, SampleArguments
from radar_kernels.registration import register, unpack


def blend_logits(
    full: Tensor,
    masked: Tensor,
    strength: float | Tensor,
    *,
    modulated: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Moves logits away from those of the same prompt with its anchors hidden.

    Args:
        full: ``[B, V]``, logits of the full prompt; floating point.
        masked: ``[B, V]``, logits with the anchors hidden.
        strength: float or ``[B]``, finite; 1 leaves ``full``, 0 gives ``masked``.
        modulated: weight each token's move by its probability over the row's largest, as the
            released SPA package does, with its limits (probability at least 1e-6, move within 100,
            within 1000 for ``|strength| <= 1``, result within 1000).
        backend: "triton", "cpp" or "reference"; None chooses.

    Returns:
        Float32 ``[B, V]``: ``strength * full + (1 - strength) * masked``, written as
        ``full + (strength - 1) * (full - masked)`` (Selective Prompt Anchoring, Tian and Zhang,
        2025; the same as classifier-free guidance). Where either logit is infinite, and in rows
        of strength 1, exactly ``full``; so a -inf in ``full`` stays.

    Raises:
        ValueError: an argument is malformed, or ``backend`` cannot serve the call.
    """
    arguments = prepare_blend_logits(full, masked, strength, modulated=modulated)
    if not torch.compiler.is_compiling():
        return choose("blend_logits", arguments, backend)(arguments)
    if needs_gradient(arguments):
        return reference.blend(arguments)
    return _registered_blend(
        arguments.full, arguments.masked, arguments.strength, modulated, backend
    )


def sample_logits(
    full: Tensor,
    masked: Tensor | None = None,
    strength: float | Tensor = 1.0,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    seed: int | Tensor | None = None,
    offset: int | Tensor = 0,
    nan: str = "ignore",
    backend: str | None = None,
) -> Tensor:
    """Blends, applies temperature, truncates and draws one token a row.

    Args:
        full: ``[B, V]``, logits; floating point.
        masked: None, or ``[B, V]`` to blend with as in ``blend_logits``.
        strength: float or ``[B]``; of the blend.
        temperature: float or ``[B]``, at least 0; 0 takes the largest logit (the first of equals).
        top_k: int or ``[B]``; keeps the k largest. None or 0 keeps all.
        top_p: float or ``[B]`` in [0, 1]; keeps the largest until they hold this probability, at
            least one. None or 1 keeps all.
        min_p: float or ``[B]`` in [0, 1]; keeps those of at least this times the largest
            probability. None or 0 keeps all.
        seed: int or int64 ``[B]``; a scalar means ``seed + row``; None draws one from torch's
            generator of that device.
        offset: int or int64 ``[B]``: the position in the row's random sequence, such as the
            number of tokens generated so far.
        nan: "ignore" counts a logit that is NaN as -inf and never waits for the device; "raise"
            raises if one is NaN, which reads the logits once more, and on a GPU makes the host
            wait for them.
        backend: "triton", "cpp" or "reference"; None chooses.

    Returns:
        Int64 ``[B]``, token ids; -1 for a row without any logit above -inf. The truncations come in
        the order of transformers (temperature, top-k, top-p, min-p); tokens equal to the last one
        kept are kept. The draw is the largest of ``logit + Gumbel noise``; the noise of a token
        depends on (seed, offset, token id) only: Philox4x32-10, see ``logit_blend.philox``.

    On CPUs, without top-k, probabilities are summed in float32: a token may be kept or not where
    the larger ones hold ``top_p`` to within 1e-6.

    Raises:
        ValueError: an argument is malformed, a logit is NaN and ``nan`` is "raise", or ``backend``
            cannot serve the call.
    """
    arguments = prepare_sample_logits(
        full,
        masked,
        strength,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        offset=offset,
        nan=nan,
    )
    if torch.compiler.is_compiling():
        return _registered_sample(
            *(getattr(arguments, name) for name in SampleArguments.__slots__), backend
        )
    return _draw(arguments, backend)


def prepare_blend_logits(
    full: Tensor, masked: Tensor, strength: float | Tensor, *, modulated: bool = False
) -> BlendArguments:
    """Validates and normalises a call.

    Args:
        full: this and all others as in ``blend_logits``.

    Returns:
        What the implementations are called with.

    Raises:
        ValueError: an argument is malformed.
    """
    check_tensors(masked=masked)
    _check_logits(full, masked)
    return BlendArguments(full, masked, _per_row("strength", strength, full), modulated)


def prepare_sample_logits(
    full: Tensor,
    masked: Tensor | None = None,
    strength: float | Tensor = 1.0,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    seed: int | Tensor | None = None,
    offset: int | Tensor = 0,
    nan: str = "ignore",
) -> SampleArguments:
    """Validates and normalises a call.

    Args:
        full: this and all others as in ``sample_logits``.

    Returns:
        What the implementations are called with.

    Raises:
        ValueError: an argument is malformed.
    """
    _check_logits(full, masked)
    if masked is None and not (isinstance(strength, int | float) and strength == 1):
        raise ValueError("strength is given without masked; pass the logits to blend with")
    if nan not in ("ignore", "raise"):
        raise ValueError(f"nan is {nan!r}; expected 'ignore' or 'raise'")
    device = full.device
    if seed is None:
        seed = torch.randint(2**62, (), device=device)
    seeds = _integers("seed", seed, full)
    if not isinstance(seed, Tensor) or seed.dim() == 0:
        seeds = seeds + torch.arange(full.shape[0], device=device)
    return SampleArguments(
        full,
        masked,
        _per_row("strength", strength, full),
        _per_row("temperature", temperature, full, 0.0),
        None if top_k is None else _integers("top_k", top_k, full, 0),
        None if top_p is None else _per_row("top_p", top_p, full, 0.0, 1.0),
        None if min_p is None else _per_row("min_p", min_p, full, 0.0, 1.0),
        seeds,
        _integers("offset", offset, full),
        nan,
    )


def _check_logits(full: Tensor, masked: Tensor | None) -> None:
    check_tensors(full=full)
    if masked is not None:
        check_tensors(masked=masked)
    if full.dim() != 2 or not full.is_floating_point() or full.shape[1] == 0:
        raise ValueError(
            f"full is {full.dtype} {list(full.shape)}; expected floating point logits [B, V]"
        )
    if masked is not None and (
        masked.shape != full.shape or not masked.is_floating_point() or masked.device != full.device
    ):
        raise ValueError(
            f"masked is {masked.dtype} {list(masked.shape)} on {masked.device}; expected floating "
            f"point {list(full.shape)} on {full.device}, as full"
        )


def _per_row(
    name: str,
    given: float | Tensor,
    full: Tensor,
    least: float = -math.inf,
    most: float = math.inf,
) -> Tensor:
    """A float or [B] as float32 [B]."""
    if not torch.compiler.is_compiling():
        check_numbers(name, given)
        for one in _readable(given):
            if not (math.isfinite(one) and least <= one <= most):
                raise ValueError(f"{name} is {one}; expected a finite number {_range(least, most)}")
    if isinstance(given, Tensor):
        return _spread(name, given, full).to(torch.float32)
    return torch.full((full.shape[0],), given, dtype=torch.float32, device=full.device)


def _readable(given: float | Tensor) -> list[float]:
    """The values that can be read without waiting for a device."""
    if not isinstance(given, Tensor):
        return [given]
    return given.flatten().tolist() if given.device.type == "cpu" else []


def _range(least: float, most: float) -> str:
    if most < math.inf:
        return f"from {least:g} to {most:g}"
    return f"of at least {least:g}" if least > -math.inf else "of any size"


def _integers(name: str, given: int | Tensor, full: Tensor, least: int = -(2**63)) -> Tensor:
    """An int or [B] as int64 [B]."""
    if isinstance(given, Tensor) and (given.is_floating_point() or given.dtype == torch.bool):
        raise ValueError(f"{name} is {given.dtype}; expected integers")
    if not torch.compiler.is_compiling():
        if not isinstance(given, Tensor):
            check_integer(name, given)
        for one in _readable(given):
            if not least <= one < 2**63:
                raise ValueError(f"{name} is {one}; expected {least} to 2^63 - 1")
    if isinstance(given, Tensor):
        return _spread(name, given, full).to(torch.int64)
    return torch.full((full.shape[0],), given, dtype=torch.int64, device=full.device)


def _spread(name: str, given: Tensor, full: Tensor) -> Tensor:
    batch = full.shape[0]
    if given.dim() > 1 or (given.dim() == 1 and given.shape[0] != batch):
        raise ValueError(
            f"{name} has shape {list(given.shape)}; expected a number or [{batch}], one a row"
        )
    return given.to(full.device).expand(batch).contiguous()


def _run_blend(
    full: Tensor, masked: Tensor, strength: Tensor, modulated: bool, backend: str | None = None
) -> Tensor:
    call = BlendArguments(full, masked, strength, modulated)
    return choose("blend_logits", call, backend)(call).contiguous()


def _fake_blend(full: Tensor, *others: object) -> Tensor:
    return full.new_empty(full.shape, dtype=torch.float32)


def _draw(call: SampleArguments, backend: str | None) -> Tensor:
    if call.nan == "raise":
        _refuse_nan(call)
    return choose("sample_logits", call, backend)(call)


def _refuse_nan(call: SampleArguments) -> None:
    wrong = call.full.isnan().any(-1)
    if call.masked is not None:
        wrong |= call.masked.isnan().any(-1) & (call.strength != 1)
    rows = wrong.nonzero().flatten().tolist()
    if rows:
        raise ValueError(
            f"full or masked holds NaN in rows {rows[:8]}{' and more' if len(rows) > 8 else ''}; "
            "expected numbers or infinities (nan='ignore' counts NaN as -inf)"
        )


def _run_sample(*arguments: object) -> Tensor:
    return _draw(*unpack(SampleArguments, arguments))


def _fake_sample(full: Tensor, *others: object) -> Tensor:
    return full.new_empty(full.shape[:1], dtype=torch.int64)


register(
    "blend_logits(Tensor full, Tensor masked, Tensor strength, bool modulated, "
    "str? backend=None) -> Tensor",
    _run_blend,
    _fake_blend,
)
register(
    "sample_logits(Tensor full, Tensor? masked, Tensor strength, Tensor temperature, "
    "Tensor? top_k, Tensor? top_p, Tensor? min_p, Tensor seed, Tensor offset, "
    "str nan='ignore', str? backend=None) -> Tensor",
    _run_sample,
    _fake_sample,
)
_registered_blend = torch.ops.radar.blend_logits.default
_registered_sample = torch.ops.radar.sample_logits.default
