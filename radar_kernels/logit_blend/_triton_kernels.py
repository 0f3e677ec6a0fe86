"""The Triton kernels of the logit operators; imported only where Triton is.

``prepare_kernel`` writes the logits of a row over its temperature, the largest of every group of
them, and the mass of every tile. ``floor_kernel``, one program a row, finds what the truncations
keep: a bisection over the bits of the group maxima bounds it from below, the few logits above that
bound are compacted, and bisections over those end at the exact cut-offs. ``draw_kernel`` adds the
noise to what is kept, and ``finish_kernel`` takes the largest of a row's tiles.

Masses and noise are computed in double precision, and every sum has one order, so that a row's
token does not depend on its batch, and cut-offs are those of the reference.
"""

# Triton compiles these functions; the annotations that mypy asks for would change their types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

import triton
import triton.language as tl

NEGATIVE_INFINITY = tl.constexpr(float("-inf"))
INFINITY = tl.constexpr(float("inf"))
LOWEST = tl.constexpr(-3.4028234663852886e38)
LAST_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _infinite(x):
    return tl.abs(x) == INFINITY


@triton.jit
def _blended(full, masked, strength):
    """Infinite logits are rules, not measurements; products are rounded, as in PyTorch."""
    ruled = _infinite(full) | _infinite(masked)
    moved = tl.where(ruled, full, full + (strength - 1.0) * (full - masked))
    return tl.where(strength == 1.0, full, moved)


@triton.jit
def _load(logits, row, stride, token, tokens):
    return tl.load(logits + row * stride + token, mask=token < tokens, other=NEGATIVE_INFINITY).to(
        tl.float32
    )


@triton.jit
def _row_mass(tile_maxima, tile_masses, tiles, BLOCK: tl.constexpr):
    """The largest logit of a row and its mass relative to that, in double precision."""
    index = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], NEGATIVE_INFINITY, tl.float32)
    for start in range(0, tiles, BLOCK):
        at = start + index
        best = tl.maximum(best, tl.load(tile_maxima + at, at < tiles, other=NEGATIVE_INFINITY))
    top = tl.max(best, 0)
    mass = tl.zeros([BLOCK], tl.float64)
    for start in range(0, tiles, BLOCK):
        at = start + index
        maxima = tl.load(tile_maxima + at, at < tiles, other=NEGATIVE_INFINITY)
        masses = tl.load(tile_masses + at, at < tiles, other=0.0)
        mass += masses * tl.exp(maxima.to(tl.float64) - top.to(tl.float64))
    return top, tl.sum(mass, 0)


@triton.jit(do_not_specialize=["tokens", "tiles", "full_stride", "masked_stride"])
def prepare_kernel(
    full,
    masked,
    strength,
    temperature,
    warm,
    maxima,
    tile_maxima,
    tile_masses,
    tokens,
    tiles,
    full_stride,
    masked_stride,
    KEEP_NAN: tl.constexpr,
    TILE: tl.constexpr,
    GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    x = _load(full, row, full_stride, token, tokens)
    if masked is not None:
        x = _blended(x, _load(masked, row, masked_stride, token, tokens), tl.load(strength + row))
    clean = tl.where(x == x, x, NEGATIVE_INFINITY)
    if not KEEP_NAN:
        x = clean
    if temperature is not None:
        scale = tl.load(temperature + row)
        x = tl.div_rn(x, tl.where(scale == 0.0, 1.0, scale))
        x = tl.where(x == 0.0, 0.0, x)  # -0 is 0
        clean = x
        tl.store(warm + row * tokens + token, x, mask=token < tokens)
        groups = tl.max(tl.reshape(x, (GROUPS, TILE // GROUPS)), 1)
        group = tile * GROUPS + tl.arange(0, GROUPS)
        tl.store(maxima + row * tiles * GROUPS + group, groups)
    top = tl.max(clean, 0)
    shift = tl.where(top == NEGATIVE_INFINITY, 0.0, top)
    mass = tl.sum(tl.exp(x.to(tl.float64) - shift.to(tl.float64)), 0)
    tl.store(tile_maxima + row * tiles + tile, top)
    tl.store(tile_masses + row * tiles + tile, mass)


@triton.jit(do_not_specialize=["tokens", "tiles", "full_stride", "masked_stride"])
def blend_kernel(
    full,
    masked,
    strength,
    out,
    tile_maxima,
    tile_masses,
    tokens,
    tiles,
    full_stride,
    masked_stride,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = _load(full, row, full_stride, token, tokens)
    y = _load(masked, row, masked_stride, token, tokens)
    weight = tl.load(strength + row)
    if tile_maxima is None:
        blended = _blended(x, y, weight)
    else:
        top, mass = _row_mass(tile_maxima + row * tiles, tile_masses + row * tiles, tiles, BLOCK)
        share = (tl.exp(x.to(tl.float64) - top.to(tl.float64)) / mass).to(tl.float32)
        share = tl.where(share < 1e-6, 1e-6, share)
        largest = (1.0 / mass).to(tl.float32)
        share = share / tl.where(largest < 1e-6, 1e-6, largest)
        move = (weight - 1.0) * (x - y)
        most = tl.where(tl.abs(weight) > 1.0, 1e2, 1e3)
        move = tl.where(tl.abs(weight) > 1.0, move * share, move)
        move = tl.where(move > most, most, tl.where(move < -most, -most, move))
        blended = x + move
        blended = tl.where(blended > 1e3, 1e3, tl.where(blended < -1e3, -1e3, blended))
        blended = tl.where(_infinite(x) | _infinite(y), x, blended)
        blended = tl.where(weight == 1.0, x, blended)
    tl.store(out + row * tokens + token, blended, mask=token < tokens)


@triton.jit
def _ordered(x):
    """Integers in the order of floats."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _float_of(order):
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _count(values, size, least, BLOCK: tl.constexpr):
    """How many values are at least this, which is above -inf."""
    index = tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        at = start + index
        x = tl.load(values + at, at < size, other=NEGATIVE_INFINITY)
        found += (x >= least).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def _reached_by(values, size, count, least, top, BLOCK: tl.constexpr):
    """The largest number that at least ``count`` values reach; ``least`` is one they reach."""
    low = _ordered(least)
    high = _ordered(top) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = _count(values, size, _float_of(middle), BLOCK) >= count
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return _float_of(low)


@triton.jit
def _mass(values, size, least, above, top, BLOCK: tl.constexpr):
    """The mass, relative to the largest, of the values of at least ``least`` above ``above``."""
    index = tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK], tl.float64)
    for start in range(0, size, BLOCK):
        at = start + index
        x = tl.load(values + at, at < size, other=NEGATIVE_INFINITY)
        weight = tl.exp(x.to(tl.float64) - top.to(tl.float64))
        mass += tl.where((x >= least) & (x > above), weight, 0.0)
    return tl.sum(mass, 0)


@triton.jit
def _cut_by_mass(values, size, least, top, target, BLOCK: tl.constexpr):
    """The least number whose larger values weigh less than ``target``."""
    low = _ordered(least) - 1
    high = _ordered(top)
    while high - low > 1:
        middle = low + (high - low) // 2
        light = _mass(values, size, least, _float_of(middle), top, BLOCK) < target
        high = tl.where(light, middle, high)
        low = tl.where(light, low, middle)
    return _float_of(high)


@triton.jit(do_not_specialize=["tokens", "tiles"])
def floor_kernel(
    warm,
    maxima,
    tile_maxima,
    tile_masses,
    top_k,
    top_p,
    log_min_p,
    temperature,
    candidates,
    floors,
    tokens,
    tiles,
    TILE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile_maxima += row * tiles
    maxima += row * tiles * GROUPS
    warm += row * tokens
    candidates += row * tokens
    top, mass = _row_mass(tile_maxima, tile_masses + row * tiles, tiles, BLOCK)
    floor = top
    if (tl.load(temperature + row) > 0.0) & (tl.abs(top) < INFINITY):
        count = tl.full([], 0, tl.int64)
        share = tl.full([], 1.0, tl.float64)
        least_floor = tl.full([], LOWEST, tl.float32)
        if top_k is not None:
            count = tl.load(top_k + row)
            count = tl.where(count < tokens, count, 0)
        if top_p is not None:
            share = tl.load(top_p + row).to(tl.float64)
        if log_min_p is not None:
            least_floor = tl.maximum(top + tl.load(log_min_p + row), LOWEST)
        floor = tl.full([], LOWEST, tl.float32)
        # Nothing below this can be kept, or counts for what is.
        bound = tl.full([], LOWEST, tl.float32)
        if count > 0:
            groups = tiles * GROUPS
            if _count(maxima, groups, bound, BLOCK) >= count:
                bound = _reached_by(maxima, groups, count, bound, top, BLOCK)
        else:
            if share < 1.0:
                # Tokens below this weight hold less than 1 - top_p together.
                lightest = tl.log((1.0 - share) * mass / tokens * 0.999) + top.to(tl.float64)
                lightest -= tl.abs(top).to(tl.float64) * 2.4e-7
                bound = tl.maximum(lightest.to(tl.float32), LOWEST)
            bound = tl.maximum(bound, least_floor)
        index = tl.arange(0, TILE)
        size = tl.full([], 0, tl.int32)
        for tile in range(0, tiles):
            if tl.load(tile_maxima + tile) >= bound:
                token = tile * TILE + index
                x = tl.load(warm + token, token < tokens, other=NEGATIVE_INFINITY)
                kept = (x >= bound).to(tl.int32)
                place = size + tl.cumsum(kept, 0) - 1
                tl.store(candidates + place, x, mask=kept != 0)
                size += tl.sum(kept, 0)
        tl.debug_barrier()  # the candidates are read by other threads than wrote them
        if (count > 0) & (size >= count):
            floor = _reached_by(candidates, size, count, bound, top, BLOCK)
        if share < 1.0:
            if count > 0:
                mass = _mass(candidates, size, floor, floor - INFINITY, top, BLOCK)
            start = tl.maximum(floor, bound)
            floor = tl.maximum(
                floor, _cut_by_mass(candidates, size, start, top, share * mass, BLOCK)
            )
        floor = tl.maximum(floor, least_floor)
    tl.store(floors + row, floor)


@triton.jit
def _word(token, seed, offset):
    """One word of Philox4x32-10: word ``token % 4`` of block ``token // 4``."""
    one = (token >> 2).to(tl.uint32)
    two = tl.zeros_like(one) + (offset & 0xFFFFFFFF).to(tl.uint32)
    three = tl.zeros_like(one) + ((offset >> 32) & 0xFFFFFFFF).to(tl.uint32)
    four = tl.zeros_like(one)
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        first = one.to(tl.uint64) * 0xD2511F53
        second = three.to(tl.uint64) * 0xCD9E8D57
        one = (second >> 32).to(tl.uint32) ^ two ^ low
        two = second.to(tl.uint32)
        three = (first >> 32).to(tl.uint32) ^ four ^ high
        four = first.to(tl.uint32)
        low = (low.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        high = (high.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    word = token & 3
    return tl.where(word == 0, one, tl.where(word == 1, two, tl.where(word == 2, three, four)))


@triton.jit(do_not_specialize=["tokens", "tiles"])
def draw_kernel(
    warm,
    tile_maxima,
    floors,
    temperature,
    seed,
    offset,
    scores,
    winners,
    tokens,
    tiles,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    best = tl.full([], NEGATIVE_INFINITY, tl.float32)
    winner = tl.full([], LAST_TOKEN, tl.int32)
    floor = tl.full([], LOWEST, tl.float32)
    if floors is not None:
        floor = tl.load(floors + row)
    top = tl.load(tile_maxima + row * tiles + tile)
    if (top >= floor) & (top > NEGATIVE_INFINITY):
        token = tile * TILE + tl.arange(0, TILE)
        score = tl.load(warm + row * tokens + token, token < tokens, other=NEGATIVE_INFINITY)
        score = tl.where(score >= floor, score, NEGATIVE_INFINITY)
        if tl.load(temperature + row) > 0.0:
            word = _word(token, tl.load(seed + row), tl.load(offset + row))
            uniform = ((word.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)).to(tl.float32)
            uniform = tl.minimum(uniform, 1.0 - 5.9604644775390625e-08).to(tl.float64)
            score += (-tl.log(-tl.log(1.0 - uniform))).to(tl.float32)
        best = tl.max(score, 0)
        winner = tl.min(tl.where(score == best, token, LAST_TOKEN), 0)
    tl.store(scores + row * tiles + tile, best)
    tl.store(winners + row * tiles + tile, winner)


@triton.jit(do_not_specialize=["tiles"])
def finish_kernel(scores, winners, out, tiles, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], NEGATIVE_INFINITY, tl.float32)
    winner = tl.full([BLOCK], LAST_TOKEN, tl.int32)
    for start in range(0, tiles, BLOCK):
        at = start + index
        score = tl.load(scores + row * tiles + at, at < tiles, other=NEGATIVE_INFINITY)
        token = tl.load(winners + row * tiles + at, at < tiles, other=LAST_TOKEN)
        # Tiles come in the order of their tokens: of equals the earlier stays.
        winner = tl.where(score > best, token, winner)
        best = tl.maximum(score, best)
    top = tl.max(best, 0)
    found = tl.min(tl.where(best == top, winner, LAST_TOKEN), 0).to(tl.int64)
    tl.store(out + row, tl.where(top == NEGATIVE_INFINITY, -1, found))
