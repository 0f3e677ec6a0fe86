"""Float64 oracles and error budgets, for this package's tests and for integrators'.

The oracles are written for reading: one query of one head of one row at a time, in numpy. They
share no code with the operators they judge. A budget is a bound on the rounding a correct
implementation may show on the very data it is given, so no test needs a tolerance of its own.
"""

import math
from dataclasses import dataclass

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

_SINGLE = 2.0**-23


@dataclass(frozen=True)
class AttentionOracle:
    """What attention should be, and how far off a correct implementation may be.

    Args:
        out: float64 ``[B, Hq, q, Dv]``.
        mass: float64 ``[B, Hq, q]``, share of the anchors before steering.
        lse: float64 ``[B, Hq, q]``, log-sum-exp of the steered logits, sinks included; -inf where
            there is nothing.
        out_budget: float64 ``[B, Hq, q, Dv]``, largest allowed absolute error of ``out``.
        mass_budget: float64 ``[B, Hq, q]``.
        lse_budget: float64 ``[B, Hq, q]``.
    """

    out: Tensor
    mass: Tensor
    lse: Tensor
    out_budget: Tensor
    mass_budget: Tensor
    lse_budget: Tensor


def attention_oracle(
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
) -> AttentionOracle:
    """Computes ``anchor_attention`` in float64, one query at a time.

    Args:
        query: this and all others as in ``anchor_attention``; values are taken as they are stored,
            so a bfloat16 input is judged by what bfloat16 holds.

    Returns:
        The ``AttentionOracle``. An error of ``out`` is allowed to reach, with ``w`` the weights,
        ``4 * eps * sum(w * |value|)`` for the dtype of ``query``, plus as much for float32
        logits, which are off by up to ``eps32 * (sum of |scale * q * k| + |bias|)``.
    """
    rows, heads, tokens, size = query.shape
    keys = key.shape[2]
    group = heads // key.shape[1]
    q, k, v = _double(query), _double(key), _double(value)
    factor = numpy.zeros((rows, keys)) if anchors is None else _spread(anchors, (rows, keys))
    allowed = numpy.ones((rows, heads, tokens, keys), dtype=bool)
    if mask is not None:
        shaped = mask[:, None, None] if mask.dim() == 2 else mask
        allowed &= shaped.cpu().expand(rows, heads, tokens, keys).numpy()
    ends = [keys] * rows if key_lengths is None else [int(end) for end in key_lengths.tolist()]
    added = None if bias is None else _per_head(bias, rows, heads)
    target = None if target_mass is None else _per_head(target_mass, rows, heads)
    scale = size**-0.5 if scale is None else scale
    machine = max(torch.finfo(query.dtype).eps, 2.0**-52)
    single = 2.0**-52 if query.dtype == torch.float64 else _SINGLE
    # For half precision torch's kernels take an exponential that is good to about 14 bits.
    coarse = 2.0**-13 if machine > _SINGLE else 0.0

    out = numpy.zeros((rows, heads, tokens, v.shape[3]))
    out_budget = numpy.zeros_like(out)
    mass, mass_budget = numpy.zeros((rows, heads, tokens)), numpy.zeros((rows, heads, tokens))
    lse, lse_budget = numpy.full((rows, heads, tokens), -math.inf), numpy.zeros_like(mass)
    for row in range(rows):
        for head in range(heads):
            extra = [] if sinks is None else [float(sinks[head])]
            for token in range(tokens):
                own = ends[row] - tokens + token
                seen = [
                    place
                    for place in range(ends[row])
                    if allowed[row, head, token, place]
                    and (not causal or place <= own)
                    and (window is None or place > own - window)
                ]
                read = k[row, head // group, seen]
                logits = scale * (read @ q[row, head, token])
                size_of = abs(scale) * (numpy.abs(read) @ numpy.abs(q[row, head, token]))
                if softcap is not None:
                    logits = softcap * numpy.tanh(logits / softcap)
                factors = factor[row, seen]
                is_anchor = factors != 0
                anchored = _log_sum_exp(logits[is_anchor])
                rest = _log_sum_exp([*logits[~is_anchor], *extra])
                share = _share(anchored, rest)
                shift = 0.0
                if added is not None:
                    shift = added[row, head]
                elif target is not None and 0 < share < 1:
                    goal = target[row, head]
                    shift = math.log(goal) - math.log1p(-goal) - (anchored - rest)
                    if target_mode == "at_least":
                        shift = max(0.0, shift)
                logits = logits + shift * factors
                total = _log_sum_exp([*logits, *extra])
                mass[row, head, token], lse[row, head, token] = share, total
                if not seen:
                    continue
                weights = numpy.exp(logits - total)
                read_value = v[row, head // group, seen]
                out[row, head, token] = weights @ read_value
                off = 4 * single * (4 + size_of.max() + numpy.abs(shift * factors).max())
                magnitude = weights @ numpy.abs(read_value)
                out_budget[row, head, token] = (4 * machine + off) * magnitude + 1e-37
                off += coarse
                mass_budget[row, head, token] = off + _SINGLE  # it is float32 for any input
                lse_budget[row, head, token] = off + 4 * single * abs(total)
    return AttentionOracle(
        *(torch.from_numpy(one) for one in (out, mass, lse, out_budget, mass_budget, lse_budget))
    )


def blend_oracle(
    full: Tensor, masked: Tensor, strength: float | Tensor, *, modulated: bool = False
) -> Tensor:
    """Computes ``blend_logits`` in float64, one row at a time.

    Args:
        full: this and all others as in ``blend_logits``.

    Returns:
        Float64 ``[B, V]``.
    """
    strengths = numpy.broadcast_to(_double(torch.as_tensor(strength)), full.shape[:1])
    rows = []
    for main, hidden, weight in zip(_double(full), _double(masked), strengths, strict=True):
        blended = main.copy()
        for place in numpy.flatnonzero(numpy.isfinite(main) & numpy.isfinite(hidden)):
            move = (weight - 1) * (main[place] - hidden[place])
            if modulated and abs(weight) > 1:
                odds = numpy.exp(main - main.max())
                share = max(odds[place] / odds.sum(), 1e-6) / max(odds.max() / odds.sum(), 1e-6)
                move = min(100.0, max(-100.0, move * share))
            elif modulated:
                move = min(1000.0, max(-1000.0, move))
            blended[place] = main[place] + move
            if modulated and weight != 1:
                blended[place] = min(1000.0, max(-1000.0, blended[place]))
        rows.append(blended)
    return torch.from_numpy(numpy.stack(rows))


def relevance_oracle(
    sentences: Tensor,
    queries: Tensor,
    sender: Tensor,
    round: Tensor,
    hops: Tensor,
    now: Tensor,
    *,
    spatial_decay: float = 0.92,
    temporal_decay: float = 0.92,
    self_policy: str = "clamp",
) -> Tensor:
    """Computes ``relevance_scores`` in float64, one pair at a time.

    Args:
        sentences: this and all others as in ``relevance_scores``.

    Returns:
        Float64 ``[Q, S]``, -inf where a sentence is not scored.
    """
    said, asked = _double(sentences), _double(queries)
    scores = numpy.full((len(asked), len(said)), -math.inf)
    for ask in range(len(asked)):
        for place in range(len(said)):
            distance = int(hops[ask, int(sender[place])])
            exponents = [distance - 1, int(now[ask]) - int(round[place]) - 1]
            if distance < 0 or (self_policy == "exclude" and min(exponents) < 0):
                continue
            if self_policy == "clamp":
                exponents = [max(0, one) for one in exponents]
            length = numpy.linalg.norm(said[place]) * numpy.linalg.norm(asked[ask])
            cosine = said[place] @ asked[ask] / length if length > 0 else 0.0
            scores[ask, place] = (
                cosine * spatial_decay ** exponents[0] * temporal_decay ** exponents[1]
            )
    return torch.from_numpy(scores)


def edit_keys_oracle(
    key: Tensor, anchors: Tensor, projection: Tensor, gain: float | Tensor
) -> Tensor:
    """Computes ``edit_keys`` in float64, one key at a time.

    Args:
        key: this and all others as in ``edit_keys``; ``projection`` as ``[Hkv, D, D]``.

    Returns:
        Float64 ``[B, Hkv, k, D]``.
    """
    keys = _double(key).copy()
    rows, heads, places, _ = keys.shape
    chosen = numpy.broadcast_to(anchors.cpu().numpy(), (rows, places))
    gains = numpy.broadcast_to(_double(torch.as_tensor(gain)), (heads,))
    matrices = _double(projection)
    for row, head, place in numpy.ndindex(rows, heads, places):
        if chosen[row, place]:
            one = keys[row, head, place]
            keys[row, head, place] = one + gains[head] * (one @ matrices[head])
    return torch.from_numpy(keys)


def assert_within(actual: Tensor, expected: Tensor, budget: Tensor | float) -> None:
    """Asserts that every element is as close as its budget allows.

    Args:
        actual: any floating dtype.
        expected: float64, same shape; infinite elements must be equal.
        budget: largest absolute error, float64, broadcastable.

    Raises:
        AssertionError: naming the worst element, its error and its budget.
    """
    assert actual.shape == expected.shape, f"{list(actual.shape)} is not {list(expected.shape)}"
    if actual.numel() == 0:
        return
    actual = actual.detach().cpu().double()
    error = (actual - expected).abs().masked_fill(actual == expected, 0)
    allowed = torch.as_tensor(budget, dtype=torch.float64).expand(expected.shape)
    excess = torch.nan_to_num(error - allowed, nan=math.inf)
    worst = int(excess.argmax())
    place = tuple(int(one) for one in numpy.unravel_index(worst, tuple(expected.shape)))
    assert excess.flatten()[worst] <= 0, (
        f"element {place} is {float(actual[place]):.9g}, expected {float(expected[place]):.9g}: "
        f"off by {float(error[place]):.3g} with a budget of {float(allowed[place]):.3g}; "
        f"{int((excess > 0).sum())} of {expected.numel()} elements are over"
    )


def _double(tensor: Tensor) -> NDArray[numpy.float64]:
    return tensor.detach().cpu().double().numpy()


def _spread(tensor: Tensor, shape: tuple[int, int]) -> NDArray[numpy.float64]:
    return numpy.broadcast_to(_double(tensor), shape)


def _per_head(given: float | Tensor, rows: int, heads: int) -> NDArray[numpy.float64]:
    return _spread(torch.as_tensor(given, dtype=torch.float32), (rows, heads))


def _log_sum_exp(logits: list[float] | NDArray[numpy.float64]) -> float:
    if len(logits) == 0:
        return -math.inf
    top = max(logits)
    return top + math.log(math.fsum(math.exp(one - top) for one in logits))


def _share(anchored: float, rest: float) -> float:
    if anchored == -math.inf:
        return 0.0
    if rest == -math.inf:
        return 1.0
    return 1 / (1 + math.exp(min(700.0, rest - anchored)))
