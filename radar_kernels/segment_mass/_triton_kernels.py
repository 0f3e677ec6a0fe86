"""Triton kernels of segment mass; imported only where Triton is.

Two passes over the keys, without values: ``sum_kernel`` and ``total_kernel`` find the log-sum-exp
of every query row as decoding does (stretches of keys, then a merge), ``mass_kernel`` adds up what
the query tokens of a head give to each key. ``span_kernel`` finds the first and last key of every
segment, and ``segment_kernel`` adds the keys of one segment up between those two. So memory is
keys x heads, whatever the number of queries. Every sum has one order: only the spans use atomics,
and those are of integers, which come out the same in any order.
"""

# Triton compiles these functions; the annotations that mypy asks for would change their types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

import triton
import triton.language as tl

from radar_kernels.anchor_attention._triton_kernels import (
    LOG2E,
    NEGATIVE_INFINITY,
    bits_of,
    log_sum,
    row_range,
    scaled_scores,
    update_sum,
)


@triton.jit(
    do_not_specialize=[
        "keys",
        "tokens",
        "group",
        "heads",
        "causal",
        "window",
        "query_batch",
        "query_head",
        "query_step",
        "key_batch",
        "key_head",
        "key_step",
        "mask_batch",
        "mask_head",
        "mask_query",
        "most_splits",
    ],
    do_not_specialize_on_alignment=["mask", "key_lengths"],
)
def sum_kernel(
    query,
    key,
    mask,
    key_lengths,
    sums,
    scale,
    softcap,
    keys,
    tokens,
    group,
    heads,
    causal,
    window,
    query_batch,
    query_head,
    query_step,
    key_batch,
    key_head,
    key_step,
    mask_batch,
    mask_head,
    mask_query,
    most_splits,
    UNIT: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    FULL_MASK: tl.constexpr,
    PRECISION: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Log-sum-exps of a block of query rows over one stretch of keys.

    Grid: (batch * key heads * ceil(tokens * group / BLOCK_ROWS), splits). Rows, strides and units
    as in ``attention_kernel``.
    """
    blocks = tl.cdiv(tokens * group, BLOCK_ROWS)
    program = tl.program_id(0)
    split = tl.program_id(1)
    batch = (program // (heads * blocks)).to(tl.int64)
    head = program // blocks % heads
    first_row = program % blocks * BLOCK_ROWS
    row = first_row + tl.arange(0, BLOCK_ROWS)
    real = row < tokens * group
    token = row // group
    query_heads = head * group + row % group

    length = keys if key_lengths is None else tl.minimum(tl.load(key_lengths + batch), keys)
    last_token = tl.minimum((first_row + BLOCK_ROWS - 1) // group, tokens - 1)
    first, last, _begin, _end = row_range(
        length, first_row // group, last_token, tokens, causal, window
    )
    own = length - tokens + token
    limit = tl.where(causal != 0, own, length - 1)
    begin = first // BLOCK_KEYS * BLOCK_KEYS
    stretch = tl.cdiv(tl.cdiv(last - begin, most_splits), BLOCK_KEYS) * BLOCK_KEYS
    stretch = tl.maximum(stretch, MIN_KEYS)
    begin += split * stretch
    end = tl.minimum(begin + stretch, last)

    step = tl.arange(0, BLOCK_KEYS)
    depth = tl.arange(0, BLOCK_SIZE)
    place = (
        batch * query_batch
        + query_heads.to(tl.int64) * query_head
        + token.to(tl.int64) * query_step
    )
    query_tile = tl.load(
        query + place[:, None] * UNIT + depth[None, :],
        mask=real[:, None] & (depth < HEAD_SIZE)[None, :],
        other=0.0,
    )
    key_tile = (
        key
        + (batch * key_batch + head.to(tl.int64) * key_head + step.to(tl.int64)[None, :] * key_step)
        * UNIT
        + depth[:, None]
    )
    scale = tl.cast(scale, tl.float32)
    if mask is not None:
        mask += batch * mask_batch
    if FULL_MASK:
        there = tl.minimum(row, tokens * group - 1)
        mask += (head * group + there % group).to(tl.int64) * mask_head
        mask += (there // group).to(tl.int64) * mask_query
    top = tl.full([BLOCK_ROWS], NEGATIVE_INFINITY, tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    for start in range(begin, end, BLOCK_KEYS):
        position = start + step
        inside = (position >= first) & (position < end)
        key_block = tl.load(
            key_tile + tl.cast(start, tl.int64) * key_step * UNIT,
            mask=inside[None, :] & (depth < HEAD_SIZE)[:, None],
            other=0.0,
        )
        scores = scaled_scores(query_tile, key_block, scale, softcap, PRECISION)
        attends = (position[None, :] <= limit[:, None]) & (
            position[None, :] > (limit - window)[:, None]
        )
        attends &= inside[None, :]
        if FULL_MASK:
            attends &= bits_of(mask, start, BLOCK_KEYS)
        elif mask is not None:
            seen = tl.load(mask + position, mask=inside, other=0) != 0
            attends &= seen[None, :]
        scores = tl.where(attends, scores, NEGATIVE_INFINITY)
        _weights, top, total, _decay = update_sum(scores, top, total)
    cell = (batch * heads + head) * tokens * group + row
    tl.store(sums + cell * tl.num_programs(1) + split, log_sum(top, total), mask=real)


@triton.jit(
    do_not_specialize=["rows", "splits", "tokens", "group", "heads"],
    do_not_specialize_on_alignment=["sinks"],
)
def total_kernel(
    sums,
    sinks,
    totals,
    rows,
    splits,
    tokens,
    group,
    heads,
    BLOCK_ROWS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Merges the stretches of BLOCK_ROWS query rows, and adds the sinks. Grid: (row blocks)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    split = tl.arange(0, MAX_SPLITS)
    parts = tl.load(
        sums + row[:, None] * splits + split[None, :],
        mask=(row < rows)[:, None] & (split < splits)[None, :],
        other=NEGATIVE_INFINITY,
    )
    top = tl.max(parts, 1)
    inner = row % (tokens * group)
    if sinks is not None:
        query_head = row // (tokens * group) % heads * group + inner % group
        sink = tl.load(sinks + query_head, mask=row < rows, other=0.0) * LOG2E
        top = tl.maximum(top, sink)
    shift = tl.where(top == NEGATIVE_INFINITY, 0.0, top)
    total = tl.sum(tl.exp2(parts - shift[:, None]), 1)
    if sinks is not None:
        total += tl.exp2(sink - shift)
    # From the packed order of the rows to [batch, query head, token].
    place = (row // (tokens * group) * group + inner % group) * tokens + inner // group
    tl.store(totals + place, log_sum(shift, total), mask=row < rows)


@triton.jit(
    do_not_specialize=[
        "keys",
        "tokens",
        "group",
        "heads",
        "causal",
        "window",
        "query_batch",
        "query_head",
        "query_step",
        "key_batch",
        "key_head",
        "key_step",
        "mask_batch",
        "mask_head",
        "mask_query",
    ],
    do_not_specialize_on_alignment=["mask", "key_lengths"],
)
def mass_kernel(
    query,
    key,
    mask,
    key_lengths,
    totals,
    mass,
    scale,
    softcap,
    keys,
    tokens,
    group,
    heads,
    causal,
    window,
    query_batch,
    query_head,
    query_step,
    key_batch,
    key_head,
    key_step,
    mask_batch,
    mask_head,
    mask_query,
    UNIT: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    FULL_MASK: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """What the tokens of every head of a group give to BLOCK_KEYS keys.

    Grid: (batch * key heads, ceil(keys / BLOCK_KEYS)). Writes float32 [batch, query heads, keys],
    0 at keys beyond a row's length.
    """
    program = tl.program_id(0)
    batch = (program // heads).to(tl.int64)
    head = program % heads
    length = keys if key_lengths is None else tl.minimum(tl.load(key_lengths + batch), keys)
    start = tl.program_id(1) * BLOCK_KEYS
    position = start + tl.arange(0, BLOCK_KEYS)
    depth = tl.arange(0, BLOCK_SIZE)
    inside = position < length
    if mask is not None:
        mask += batch * mask_batch
        if not FULL_MASK:
            inside &= tl.load(mask + position, mask=inside, other=0) != 0
    key_block = tl.load(
        key
        + (
            batch * key_batch
            + head.to(tl.int64) * key_head
            + position.to(tl.int64)[None, :] * key_step
        )
        * UNIT
        + depth[:, None],
        mask=inside[None, :] & (depth < HEAD_SIZE)[:, None],
        other=0.0,
    )
    scale = tl.cast(scale, tl.float32)
    for member in range(0, group):
        one_head = (head * group + member).to(tl.int64)
        given = tl.zeros([BLOCK_KEYS], tl.float32)
        for first in range(0, tokens, BLOCK_ROWS):
            token = first + tl.arange(0, BLOCK_ROWS)
            real = token < tokens
            place = batch * query_batch + one_head * query_head + token.to(tl.int64) * query_step
            query_tile = tl.load(
                query + place[:, None] * UNIT + depth[None, :],
                mask=real[:, None] & (depth < HEAD_SIZE)[None, :],
                other=0.0,
            )
            total = tl.load(
                totals + (batch * heads * group + one_head) * tokens + token,
                mask=real,
                other=NEGATIVE_INFINITY,
            )
            scores = scaled_scores(query_tile, key_block, scale, softcap, PRECISION)
            attends = inside[None, :] & real[:, None]
            own = length - tokens + token
            within = (position[None, :] <= own[:, None]) & (
                position[None, :] > (own - window)[:, None]
            )
            attends &= within | (causal == 0)
            if FULL_MASK:
                own_row = tl.minimum(token, tokens - 1).to(tl.int64) * mask_query
                attends &= bits_of(mask + one_head * mask_head + own_row, start, BLOCK_KEYS)
            shift = tl.where(total == NEGATIVE_INFINITY, 0.0, total)
            weights = tl.exp2(tl.where(attends, scores, NEGATIVE_INFINITY) - shift[:, None])
            given += tl.sum(weights, 0)
        row = batch * heads * group + one_head
        tl.store(mass + row * keys + position, given, mask=position < keys)


@triton.jit(
    do_not_specialize=["keys", "segments_batch", "segments_step", "count"],
    do_not_specialize_on_alignment=["segments", "firsts", "lasts"],
)
def span_kernel(
    segments,
    firsts,
    lasts,
    keys,
    segments_batch,
    segments_step,
    count,
    BLOCK_KEYS: tl.constexpr,
):
    """First and last key of every segment. Grid: (batch, ceil(keys / BLOCK_KEYS)).

    ``firsts`` comes filled with the number of keys and ``lasts`` with -1. A number that is no
    segment is none. Only the ends of a run of keys can be either.
    """
    batch = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    here = segments + batch * segments_batch + position.to(tl.int64) * segments_step
    present = position < keys
    segment = tl.load(here, mask=present, other=-1)
    before = tl.load(here - segments_step, mask=present & (position > 0), other=-1)
    after = tl.load(here + segments_step, mask=position + 1 < keys, other=-1)
    valid = present & (segment >= 0) & (segment < count)
    cell = batch * count + segment
    tl.atomic_min(firsts + cell, position, mask=valid & (segment != before), sem="relaxed")
    tl.atomic_max(lasts + cell, position, mask=valid & (segment != after), sem="relaxed")


@triton.jit(
    do_not_specialize=["keys", "tokens", "query_heads", "segments_batch", "segments_step", "count"],
    do_not_specialize_on_alignment=["segments", "firsts", "lasts"],
)
def segment_kernel(
    mass,
    segments,
    firsts,
    lasts,
    out,
    keys,
    tokens,
    query_heads,
    segments_batch,
    segments_step,
    count,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Mass of one segment, or of a piece of it, for BLOCK_HEADS heads, mean over the tokens.

    Grid: (batch * segments, head blocks, pieces). Writes float32
    [pieces, batch, query heads, segments].
    """
    program = tl.program_id(0)
    batch = (program // count).to(tl.int64)
    segment = program % count
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    piece = tl.program_id(2)
    first = tl.load(firsts + batch * count + segment)
    last = tl.load(lasts + batch * count + segment) + 1
    stretch = tl.cdiv(tl.cdiv(last - first, tl.num_programs(2)), BLOCK_KEYS) * BLOCK_KEYS
    begin = first + piece * stretch
    end = tl.minimum(begin + stretch, last)
    row = batch * query_heads + head
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    for start in range(begin, end, BLOCK_KEYS):
        position = start + tl.arange(0, BLOCK_KEYS)
        here = segments + batch * segments_batch + position.to(tl.int64) * segments_step
        member = tl.load(here, mask=position < end, other=-1) == segment
        given = tl.load(
            mass + row[:, None] * keys + position[None, :],
            mask=(head < query_heads)[:, None] & member[None, :],
            other=0.0,
        )
        total += tl.sum(given, 1)
    batches = tl.num_programs(0) // count
    place = (piece * batches + batch) * query_heads + head
    tl.store(out + place * count + segment, total / tokens, mask=head < query_heads)


@triton.jit(do_not_specialize=["size", "pieces"])
def piece_kernel(parts, out, size, pieces, BLOCK: tl.constexpr, MOST_PIECES: tl.constexpr):
    """Adds the pieces of BLOCK results up, in one order. Grid: (ceil(size / BLOCK))."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    piece = tl.arange(0, MOST_PIECES)
    given = tl.load(
        parts + piece.to(tl.int64)[:, None] * size + place[None, :],
        mask=(piece < pieces)[:, None] & (place < size)[None, :],
        other=0.0,
    )
    tl.store(out + place, tl.sum(given, 0), mask=place < size)
