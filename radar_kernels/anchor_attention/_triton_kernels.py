"""The Triton kernels of anchor attention for one query token; imported only where Triton is.

Two kernels. ``split_kernel`` gives each program a stretch of one row's keys and the query heads
that share them, and writes two softmax parts: one over the keys that are not anchored ("rest"),
one over the anchored keys. ``merge_kernel`` merges the parts of a row by their log-sum-exps and
applies what steers: with ``L_A`` and ``L_R`` the log-sum-exps of the two parts,

    mass = sigmoid(L_A - L_R),   share = sigmoid(L_A + bias - L_R)   or the target mass,
    out  = share * o_A + (1 - share) * o_R.

How a row is cut depends on that row's length alone and every sum has one order, so the bits of a
row do not depend on its batch. All logits are kept in base 2.
"""

# Triton compiles these functions; the annotations that mypy asks for would change their types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def _product(left, right, total, PRECISION: tl.constexpr):
    if PRECISION == "interpreted":
        # Triton's interpreter multiplies the bit patterns of bfloat16.
        left = left.to(tl.float32)
        right = right.to(tl.float32)
        total = tl.dot(left, right, total)
    else:
        total = tl.dot(left, right, total, input_precision=PRECISION)
    return total


@triton.jit
def _capped(scores, softcap):
    """``softcap * tanh(scores / softcap)`` from exp2, which never overflows here."""
    decay = tl.exp2(tl.abs(scores / softcap) * (-2.0 * LOG2E))
    magnitude = softcap * (1.0 - decay) / (1.0 + decay)
    return tl.where(scores < 0, -magnitude, magnitude)


@triton.jit
def _update_sum(scores, top, total):
    """Adds a tile to a running sum of exponentials: weights, new top, new sum, decay of old."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    # A row without any key yet has top -inf, and -inf - -inf is NaN.
    shift = tl.where(new_top == NEGATIVE_INFINITY, 0.0, new_top)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(top - shift)
    return weights, new_top, total * decay + tl.sum(weights, 1), decay


@triton.jit
def _update_part(scores, value, top, total, out, PRECISION: tl.constexpr):
    """Adds a tile to one running softmax part."""
    weights, top, total, decay = _update_sum(scores, top, total)
    weights = weights.to(value.dtype)
    out = out * decay[:, None]
    out = _product(weights, value, out, PRECISION)
    return top, total, out


@triton.jit
def _log_sum(top, total):
    """The base-2 log-sum-exp; a sum of exactly 0 means no key (a NaN sum stays NaN)."""
    return tl.where(total == 0, NEGATIVE_INFINITY, top + tl.log2(tl.where(total == 0, 1.0, total)))


@triton.jit
def _store_part(partial, lse, row, splits, split, out, total, log_sum, real, columns, VALUE_SIZE):
    cell = row.to(tl.int64) * splits + split
    tl.store(lse + cell, log_sum, mask=real)
    # Parts without a key are never read by the merge, so they need not be written.
    tl.store(
        partial + cell[:, None] * VALUE_SIZE + columns[None, :],
        out / tl.where(total == 0, 1.0, total)[:, None],
        mask=(real & (log_sum != NEGATIVE_INFINITY))[:, None] & (columns < VALUE_SIZE)[None, :],
    )


@triton.jit(
    do_not_specialize=[
        "keys",
        "window",
        "heads",
        "rows",
        "query_batch",
        "query_head",
        "key_batch",
        "key_head",
        "key_step",
        "value_batch",
        "value_head",
        "value_step",
        "anchors_batch",
        "bias_batch",
        "mask_batch",
        "mask_head",
        "mask_step",
    ],
    do_not_specialize_on_alignment=["anchors", "bias", "mask", "key_lengths"],
)
def split_kernel(
    query,
    key,
    value,
    anchors,
    bias,
    mask,
    key_lengths,
    partial,
    lse,
    scale,
    softcap,
    keys,
    window,
    heads,
    rows,
    query_batch,
    query_head,
    key_batch,
    key_head,
    key_step,
    value_batch,
    value_head,
    value_step,
    anchors_batch,
    bias_batch,
    mask_batch,
    mask_head,
    mask_step,
    UNIT: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    HEAD_MASK: tl.constexpr,
    PRECISION: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """One stretch of keys of one row and key head, for up to BLOCK_HEADS of its query heads.

    Grid: (batch * key heads * ceil(GROUP / BLOCK_HEADS), splits). Strides of key and value come
    in steps of UNIT elements, so that 16-byte loads stay provable without specialising on strides
    that change with the number of keys. ``bias`` is given only for factors (float anchors).
    """
    blocks: tl.constexpr = (GROUP + BLOCK_HEADS - 1) // BLOCK_HEADS
    program = tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    batch = (program // (heads * blocks)).to(tl.int64)
    head = program // blocks % heads
    member = program % blocks * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    real = member < GROUP
    query_heads = head * GROUP + member
    row = batch * heads * GROUP + query_heads
    head = head.to(tl.int64)

    length = keys if key_lengths is None else tl.minimum(tl.load(key_lengths + batch), keys)
    first = 0
    if window is not None:
        first = tl.maximum(length - window, 0)
    stretch = tl.cdiv(tl.cdiv(length - first, MAX_SPLITS), BLOCK_KEYS) * BLOCK_KEYS
    stretch = tl.maximum(stretch, MIN_KEYS)
    begin = first + split * stretch
    end = tl.minimum(begin + stretch, length)

    step = tl.arange(0, BLOCK_KEYS).to(tl.int64)
    depth = tl.arange(0, BLOCK_SIZE)
    columns = tl.arange(0, BLOCK_VALUE)
    query_tile = tl.load(
        query
        + batch * query_batch
        + query_heads.to(tl.int64)[:, None] * query_head
        + depth[None, :],
        mask=real[:, None] & (depth < HEAD_SIZE)[None, :],
        other=0.0,
    )
    key_tile = (
        key
        + (batch * key_batch + head * key_head + step[None, :] * key_step) * UNIT
        + depth[:, None]
    )
    value_tile = (
        value
        + (batch * value_batch + head * value_head + step[:, None] * value_step) * UNIT
        + columns[None, :]
    )
    scale = tl.cast(scale, tl.float32)
    if anchors is not None:
        anchors += batch * anchors_batch
        anchored_top = tl.full([BLOCK_HEADS], NEGATIVE_INFINITY, tl.float32)
        anchored_total = tl.zeros([BLOCK_HEADS], tl.float32)
        anchored_out = tl.zeros([BLOCK_HEADS, BLOCK_VALUE], tl.float32)
        if bias is not None:
            factor_scale = (
                tl.load(bias + batch * bias_batch + query_heads, mask=real, other=0.0) * LOG2E
            )
            plain_top = tl.full([BLOCK_HEADS], NEGATIVE_INFINITY, tl.float32)
            plain_total = tl.zeros([BLOCK_HEADS], tl.float32)
    if mask is not None:
        mask += batch * mask_batch
    top = tl.full([BLOCK_HEADS], NEGATIVE_INFINITY, tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    out = tl.zeros([BLOCK_HEADS, BLOCK_VALUE], tl.float32)

    # Flags of one byte a key cannot be copied asynchronously, so they are read a tile ahead.
    if anchors is not None:
        next_factors = tl.load(anchors + begin + step, mask=begin + step < end, other=0)
    if mask is not None and not HEAD_MASK:
        next_readable = tl.load(mask + (begin + step) * mask_step, mask=begin + step < end, other=0)
    for start in range(begin, end, BLOCK_KEYS):
        start = tl.cast(start, tl.int64)
        position = start + step
        inside = position < end
        ahead = position + BLOCK_KEYS
        readable = inside
        if mask is not None and not HEAD_MASK:
            readable &= next_readable != 0
            next_readable = tl.load(mask + ahead * mask_step, mask=ahead < end, other=0)
        attends = readable[None, :] & real[:, None]
        if HEAD_MASK:
            seen = tl.load(
                mask
                + query_heads.to(tl.int64)[:, None] * mask_head
                + position[None, :] * mask_step,
                mask=attends,
                other=0,
            )
            attends &= seen != 0
            readable = tl.max(attends.to(tl.int32), 0) > 0
        key_block = tl.load(
            key_tile + start * key_step * UNIT,
            mask=inside[None, :] & (depth < HEAD_SIZE)[:, None],
            other=0.0,
        )
        value_block = tl.load(
            value_tile + start * value_step * UNIT,
            mask=readable[:, None] & (columns < VALUE_SIZE)[None, :],
            other=0.0,
        )
        scores = tl.zeros([BLOCK_HEADS, BLOCK_KEYS], tl.float32)
        scores = _product(query_tile, key_block, scores, PRECISION) * scale
        if softcap is not None:
            scores = _capped(scores, tl.cast(softcap, tl.float32))
        scores *= LOG2E
        scores = tl.where(attends, scores, NEGATIVE_INFINITY)
        if anchors is None:
            top, total, out = _update_part(scores, value_block, top, total, out, PRECISION)
        else:
            factors = next_factors
            next_factors = tl.load(anchors + ahead, mask=ahead < end, other=0)
            anchored = (factors != 0) & readable
            rest = tl.where(anchored[None, :], NEGATIVE_INFINITY, scores)
            top, total, out = _update_part(rest, value_block, top, total, out, PRECISION)
            if tl.max(anchored.to(tl.int32), 0) > 0:
                scores = tl.where(anchored[None, :], scores, NEGATIVE_INFINITY)
                if bias is not None:
                    _, plain_top, plain_total, _ = _update_sum(scores, plain_top, plain_total)
                    scores += factor_scale[:, None] * factors.to(tl.float32)[None, :]
                anchored_top, anchored_total, anchored_out = _update_part(
                    scores,
                    value_block,
                    anchored_top,
                    anchored_total,
                    anchored_out,
                    PRECISION,
                )

    log_sum = _log_sum(top, total)
    _store_part(partial, lse, row, splits, split, out, total, log_sum, real, columns, VALUE_SIZE)
    if anchors is not None:
        row += rows
        log_sum = _log_sum(anchored_top, anchored_total)
        _store_part(
            partial,
            lse,
            row,
            splits,
            split,
            anchored_out,
            anchored_total,
            log_sum,
            real,
            columns,
            VALUE_SIZE,
        )
        if bias is not None:
            cell = (row + rows).to(tl.int64) * splits + split
            tl.store(lse + cell, _log_sum(plain_top, plain_total), mask=real)


@triton.jit
def _merged_log_sum(lse, row, splits, MAX_SPLITS: tl.constexpr):
    split = tl.arange(0, MAX_SPLITS)
    sums = tl.load(lse + row * splits + split, mask=split < splits, other=NEGATIVE_INFINITY)
    top = tl.max(sums, 0)
    shift = tl.where(top == NEGATIVE_INFINITY, 0.0, top)
    return _log_sum(shift, tl.sum(tl.exp2(sums - shift), 0))


@triton.jit
def _merged_out(
    partial,
    lse,
    row,
    splits,
    log_sum,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_VALUE)
    shift = tl.where(log_sum == NEGATIVE_INFINITY, 0.0, log_sum)
    out = tl.zeros([BLOCK_VALUE], tl.float32)
    for start in range(0, splits, BLOCK_SPLITS):
        split = start + tl.arange(0, BLOCK_SPLITS)
        sums = tl.load(lse + row * splits + split, mask=split < splits, other=NEGATIVE_INFINITY)
        parts = tl.load(
            partial + (row * splits + split)[:, None] * VALUE_SIZE + columns[None, :],
            mask=(sums != NEGATIVE_INFINITY)[:, None] & (columns < VALUE_SIZE)[None, :],
            other=0.0,
        )
        out += tl.sum(parts * tl.exp2(sums - shift)[:, None], 0)
    return out


@triton.jit
def _share(anchored, rest):
    """Share of the anchored part from base-2 log-sum-exps; 0 where there is nothing at all."""
    difference = tl.where(
        anchored == NEGATIVE_INFINITY,
        NEGATIVE_INFINITY,
        tl.where(rest == NEGATIVE_INFINITY, float("inf"), anchored - rest),
    )
    return 1.0 / (1.0 + tl.exp2(-difference))


@triton.jit(
    do_not_specialize=["heads", "rows", "splits", "bias_batch", "target_batch"],
    do_not_specialize_on_alignment=["bias", "target", "sinks", "mass"],
)
def merge_kernel(
    partial,
    lse,
    bias,
    target,
    sinks,
    out,
    mass,
    heads,
    rows,
    splits,
    bias_batch,
    target_batch,
    ANCHORED: tl.constexpr,
    FACTORS: tl.constexpr,
    EXACT: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Merges the parts of one row and query head. Grid: (batch * query heads)."""
    row = tl.program_id(0).to(tl.int64)
    batch = row // heads
    head = row % heads
    columns = tl.arange(0, BLOCK_VALUE)

    rest = _merged_log_sum(lse, row, splits, MAX_SPLITS)
    result = _merged_out(partial, lse, row, splits, rest, VALUE_SIZE, BLOCK_SPLITS, BLOCK_VALUE)
    if sinks is not None:
        # The sink belongs to the rest and has no value: it only takes weight from it.
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        top = tl.maximum(rest, sink)
        shift = tl.where(top == NEGATIVE_INFINITY, 0.0, top)
        with_sink = _log_sum(shift, tl.exp2(rest - shift) + tl.exp2(sink - shift))
        result *= tl.where(rest == NEGATIVE_INFINITY, 0.0, tl.exp2(rest - with_sink))
        rest = with_sink
    share = 0.0
    if ANCHORED:
        steered = _merged_log_sum(lse, rows + row, splits, MAX_SPLITS)
        anchored_out = _merged_out(
            partial, lse, rows + row, splits, steered, VALUE_SIZE, BLOCK_SPLITS, BLOCK_VALUE
        )
        plain = steered
        if FACTORS:
            plain = _merged_log_sum(lse, 2 * rows + row, splits, MAX_SPLITS)
        elif bias is not None:
            steered += tl.load(bias + batch * bias_batch + head).to(tl.float32) * LOG2E
        share = _share(plain, rest)
        after = _share(steered, rest)
        if target is not None:
            wanted = tl.load(target + batch * target_batch + head).to(tl.float32)
            if not EXACT:
                wanted = tl.maximum(wanted, share)
            # Where one part is empty no bias can reach the target: left alone.
            reachable = (plain != NEGATIVE_INFINITY) & (rest != NEGATIVE_INFINITY)
            after = tl.where(reachable, wanted, share)
        result = result * (1.0 - after) + anchored_out * after
    tl.store(out + row * VALUE_SIZE + columns, result, mask=columns < VALUE_SIZE)
    if mass is not None:
        tl.store(mass + row, share)
