"""Float64 oracles and error budgets, for this package's tests and for integrators'.

The oracles are written for reading: one query of one head of one row at a time, in numpy. They
share no code with the operators they judge. A budget is a bound on the rounding a correct
implementation may show on the very data it is given, so no test needs a tolerance of its own.
"""

import math
from dataclasses import dataclass
from typing import Any

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
    smallest = max(1e-37, torch.finfo(query.dtype).smallest_normal * machine)
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
                elif target is not None and min(anchored, rest) > -math.inf:
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
                out_budget[row, head, token] = (4 * machine + off) * magnitude + smallest
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


def sample_oracle(
    full: Tensor,
    masked: Tensor | None = None,
    strength: float | Tensor = 1.0,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    seed: int | Tensor = 0,
    offset: int | Tensor = 0,
) -> list[set[int]]:
    """Finds the tokens ``sample_logits`` may draw, in float64, one token at a time.

    More than one may be right only within rounding: where perturbed scores differ by less than
    1e-5, or where a token lies so near a cut-off that it may be kept or not. "Near" is what float32
    makes of the logits, and 1e-6 of the probability.

    Args:
        full: this and all others as in ``sample_logits``.

    Returns:
        One set a row; -1 stands in it for no token.
    """
    rows = full.shape[0]

    def per_row(given: float | Tensor | None, off: float) -> list[Any]:
        tensor = torch.as_tensor(off if given is None else given)
        return tensor.expand(rows).tolist()

    if not isinstance(seed, Tensor) or seed.dim() == 0:
        seed = torch.as_tensor(seed) + torch.arange(rows)
    strengths = per_row(torch.as_tensor(strength, dtype=torch.float32), 1.0)
    parameters = zip(
        per_row(torch.as_tensor(temperature, dtype=torch.float32), 1.0),
        per_row(top_k, 0),
        per_row(None if top_p is None else torch.as_tensor(top_p, dtype=torch.float32), 1.0),
        per_row(None if min_p is None else torch.as_tensor(min_p, dtype=torch.float32), 0.0),
        seed.tolist(),
        per_row(offset, 0),
        strict=True,
    )
    found = []
    for row, parameter in enumerate(parameters):
        main = _double(full[row])
        logits, size = main, numpy.abs(main)
        if masked is not None and strengths[row] != 1:
            hidden = _double(masked[row])
            ruled = numpy.isinf(main) | numpy.isinf(hidden)
            with numpy.errstate(invalid="ignore"):
                move = (strengths[row] - 1) * (main - hidden)
                logits = numpy.where(ruled, main, main + move)
            size = numpy.where(ruled, 0, numpy.abs(main) + 2 * numpy.abs(move))
        found.append(_draws(logits, size, *parameter))
    return found


def _draws(
    logits: NDArray[numpy.float64],
    size: NDArray[numpy.float64],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    offset: int,
) -> set[int]:
    """The tokens of one row; ``size`` is what the rounding of each logit is relative to."""
    limit = float(numpy.finfo(numpy.float32).max)
    warm = numpy.where(numpy.isnan(logits), -math.inf, logits) / (temperature or 1.0)
    warm = numpy.where(numpy.abs(warm) > limit, numpy.copysign(math.inf, warm), warm)
    top = warm.max()
    if math.isinf(top):
        return {-1} if top < 0 else {int(numpy.argmax(warm))}
    places = numpy.flatnonzero(warm > -math.inf)
    finite = warm[places]
    slack = 2.0**-22 * float((size[places] / (temperature or 1.0) + numpy.abs(finite)).max())
    if temperature == 0:
        return {int(place) for place in places if warm[place] >= top - 2 * slack}
    least = most = -math.inf
    if 0 < top_k < len(finite):
        cut = numpy.sort(finite)[-top_k]
        least, most = cut - 2 * slack, cut + 2 * slack
    if top_p < 1:
        cuts = [
            _mass_cut(finite[finite >= floor], share)
            for floor in (least, min(most, top))
            for share in (top_p - 1e-6 - 4 * slack, top_p + 1e-6 + 4 * slack)
        ]
        least, most = max(least, min(cuts) - 2 * slack), max(most, max(cuts) + 2 * slack)
    if min_p > 0:
        cut = top + math.log(min_p)
        least, most = max(least, cut - 2 * slack - 1e-6), max(most, cut + 2 * slack + 1e-6)
    scores = {int(place): warm[place] + _gumbel(seed, offset, int(place)) for place in places}
    best = max(scores[int(place)] for place in places if warm[place] >= min(most, top))
    return {
        place
        for place, score in scores.items()
        if warm[place] >= least and score >= best - 1e-5 - 4 * slack
    }


def _mass_cut(warm: NDArray[numpy.float64], share: float) -> float:
    """The least logit whose larger ones hold less than this share; the largest if none does."""
    order = numpy.sort(warm)[::-1]
    weights = numpy.exp(order - order[0])
    larger = numpy.cumsum(weights) - weights
    kept = int((larger < share * weights.sum()).sum())
    return float(order[max(kept, 1) - 1])


def _gumbel(seed: int, offset: int, token: int) -> float:
    """Gumbel noise of one token, from Philox4x32-10 in Python's integers."""
    word = 2**32 - 1
    key = [seed & word, seed >> 32 & word]
    counter = [token >> 2, offset & word, offset >> 32 & word, 0]
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            second >> 32 ^ counter[1] ^ key[0],
            second & word,
            first >> 32 ^ counter[3] ^ key[1],
            first & word,
        ]
        key = [key[0] + 0x9E3779B9 & word, key[1] + 0xBB67AE85 & word]
    uniform = min((counter[token & 3] + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -math.log(-math.log1p(-uniform))


def relevance_oracle(
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
) -> Tensor:
    """Computes ``relevance_scores`` in float64, one pair at a time.

    Args:
        sentences: this and all others as in ``relevance_scores``.

    Returns:
        Float64 ``[Q, S]``, -inf where a sentence is not scored.
    """
    said, asked = _double(sentences), _double(queries)
    if scales is not None:
        said = said * _double(scales)[:, None]
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
    if top == -math.inf:
        return top
    return top + math.log(math.fsum(math.exp(one - top) for one in logits))


def _share(anchored: float, rest: float) -> float:
    if anchored == -math.inf:
        return 0.0
    if rest == -math.inf:
        return 1.0
    return 1 / (1 + math.exp(min(700.0, rest - anchored)))
