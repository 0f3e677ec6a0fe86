"""Triton kernels of anchor attention and partitioned attention; imported only where Triton is.

``attention_kernel`` gives each program a stretch of one row's keys and a block of the query rows
that share them (tokens x heads of a group, packed into one tile), and keeps one or two softmax
parts: with one part a bias is added to the logits as they come; with two, the anchored keys have a
part of their own, which costs nothing in a tile without anchors. Where there is one stretch it
also finishes; else ``merge_kernel`` merges the stretches of a row by their log-sum-exps. To finish
is to apply what steers: with ``L_A`` and ``L_R`` the log-sum-exps of the two parts,

    mass = sigmoid(L_A - L_R),   share = sigmoid(L_A + bias - L_R)   or the target mass,
    out  = share * o_A + (1 - share) * o_R,

or to write the four parts as they are. How a row is cut depends on that row's length and on the
number of query rows alone, and every sum has one order, so the bits of a row do not depend on its
batch. All logits are kept in base 2.
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
    """``softcap * tanh(scores / softcap)`` in base 2, from exp2, which never overflows here."""
    decay = tl.exp2(tl.abs(scores) * (-2.0 * LOG2E / softcap))
    magnitude = (softcap * LOG2E) * ((1.0 - decay) / (1.0 + decay))
    return tl.where(scores < 0, -magnitude, magnitude)


@triton.jit
def scaled_scores(query_tile, key_block, scale, softcap, PRECISION: tl.constexpr):
    """Logits of a tile in base 2, scale and softcap applied."""
    scores = tl.zeros([query_tile.shape[0], key_block.shape[1]], tl.float32)
    scores = _product(query_tile, key_block, scores, PRECISION)
    if softcap is None:
        scores *= scale * LOG2E
    else:
        scores = _capped(scores * scale, tl.cast(softcap, tl.float32))
    return scores


@triton.jit
def update_sum(scores, top, total):
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
    weights, top, total, decay = update_sum(scores, top, total)
    weights = weights.to(value.dtype)
    out = out * decay[:, None]
    out = _product(weights, value, out, PRECISION)
    return top, total, out


@triton.jit
def log_sum(top, total):
    """The base-2 log-sum-exp; a sum of exactly 0 means no key (a NaN sum stays NaN)."""
    return tl.where(total == 0, NEGATIVE_INFINITY, top + tl.log2(tl.where(total == 0, 1.0, total)))


@triton.jit
def _either(left, right):
    return left | right


@triton.jit
def _any(word):
    """The bits that are set in any row."""
    return tl.reduce(word, 0, _either)


@triton.jit
def _words(mask, start, end, real, BLOCK_KEYS: tl.constexpr):
    """Every row's words of a packed mask for a tile, and what is set in any row."""
    # A comparison of scalars would be an int32 in Triton's interpreter.
    there = real & (tl.full(real.shape, start, tl.int32) < end)
    word = tl.load(mask + start // 32, mask=there, other=0)
    second = word
    if BLOCK_KEYS == 64:
        second = tl.load(mask + start // 32 + 1, mask=there, other=0)
    return word, second, _any(word), _any(second)


@triton.jit
def _bits(word, second, start, BLOCK_KEYS: tl.constexpr):
    """Bools of the keys of a tile from words that broadcast against them."""
    step = tl.arange(0, BLOCK_KEYS)
    if len(word.shape) == 2:
        step = step[None, :]
    if BLOCK_KEYS == 64:
        word = tl.where(step < 32, word, second)
    return (word >> ((start + step) % 32) & 1) != 0


@triton.jit
def bits_of(words, start, BLOCK_KEYS: tl.constexpr):
    """The bits of a packed mask for a tile that begins at ``start``, a pointer for every row."""
    word = tl.load(words + start // 32)[:, None]
    second = word
    if BLOCK_KEYS == 64:
        second = tl.load(words + start // 32 + 1)[:, None]
    return _bits(word, second, start, BLOCK_KEYS)


@triton.jit
def row_range(length, first_token, last_token, tokens, causal, window):
    """Keys that some query of a block sees, and those that all see: begin, end, begin, end."""
    first_place = length - tokens + first_token
    last_place = length - tokens + last_token
    if causal != 0:
        some_begin = tl.maximum(first_place - window + 1, 0)
        some_end = tl.maximum(last_place + 1, 0)
        all_begin = last_place - window + 1
        all_end = first_place + 1
    else:
        some_begin = length * 0
        some_end = length
        all_begin = length * 0
        all_end = length
    return some_begin, some_end, all_begin, all_end


@triton.jit
def _share(anchored, rest):
    """Share of the anchored part from base-2 log-sum-exps; 0 where there is nothing at all."""
    difference = tl.where(
        anchored == NEGATIVE_INFINITY,
        NEGATIVE_INFINITY,
        tl.where(rest == NEGATIVE_INFINITY, float("inf"), anchored - rest),
    )
    return 1.0 / (1.0 + tl.exp2(-difference))


@triton.jit
def _finish(
    rest,
    result,
    anchored_sum,
    anchored_part,
    plain,
    real,
    batch,
    query_head,
    token,
    first_token,
    tokens,
    query_heads,
    bias,
    target,
    sinks,
    out,
    mass,
    anchored_out,
    anchored_lse,
    rest_lse,
    bias_batch,
    target_batch,
    PARTS: tl.constexpr,
    FACTORS: tl.constexpr,
    EXACT: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Applies what steers to the parts of some rows and writes the results."""
    columns = tl.arange(0, BLOCK_VALUE)
    start = (batch * tokens + first_token) * query_heads * VALUE_SIZE
    # Offsets within a block are small: 32 bits save registers.
    place = ((token - first_token) * query_heads + query_head)[:, None] * VALUE_SIZE
    place = place + columns[None, :]
    written = real[:, None] & (columns < VALUE_SIZE)[None, :]
    flat = (batch * query_heads + query_head) * tokens + token
    if sinks is not None:
        # The sink belongs to the rest and has no value: it only takes weight from it.
        sink = tl.load(sinks + query_head, mask=real, other=0.0).to(tl.float32) * LOG2E
        top = tl.maximum(rest, sink)
        shift = tl.where(top == NEGATIVE_INFINITY, 0.0, top)
        with_sink = log_sum(shift, tl.exp2(rest - shift) + tl.exp2(sink - shift))
        kept = tl.where(rest == NEGATIVE_INFINITY, 0.0, tl.exp2(rest - with_sink))
        result = result * kept[:, None]
        rest = with_sink
    if anchored_out is not None:
        tl.store(anchored_out + start + place, anchored_part, mask=written)
        tl.store(anchored_lse + flat, anchored_sum / LOG2E, mask=real)
        tl.store(rest_lse + flat, rest / LOG2E, mask=real)
    share = tl.zeros_like(rest)
    if PARTS == 2 and anchored_out is None:
        steered = anchored_sum
        if not FACTORS:
            plain = anchored_sum
            if bias is not None:
                added = tl.load(bias + batch * bias_batch + query_head, mask=real, other=0.0)
                steered += added * LOG2E
        share = _share(plain, rest)
        after = _share(steered, rest)
        if target is not None:
            wanted = tl.load(target + batch * target_batch + query_head, mask=real, other=0.5)
            if not EXACT:
                wanted = tl.maximum(wanted, share)
            # Where one part is empty no bias can reach the target: left alone.
            reachable = (plain != NEGATIVE_INFINITY) & (rest != NEGATIVE_INFINITY)
            after = tl.where(reachable, wanted, share)
        result = result * (1.0 - after)[:, None] + anchored_part * after[:, None]
    tl.store(out + start + place, result, mask=written)
    if mass is not None:
        tl.store(mass + flat, share, mask=real)


@triton.jit
def _store_part(partial, lse, cell, part, sums, real, columns, VALUE_SIZE: tl.constexpr):
    tl.store(lse + cell, sums, mask=real)
    # Parts without a key are never read by the merge, so they need not be written.
    tl.store(
        partial + cell[:, None] * VALUE_SIZE + columns[None, :],
        part,
        mask=(real & (sums != NEGATIVE_INFINITY))[:, None] & (columns < VALUE_SIZE)[None, :],
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
        "value_batch",
        "value_head",
        "value_step",
        "anchors_batch",
        "bias_batch",
        "target_batch",
        "mask_batch",
        "mask_head",
        "mask_query",
        "most_splits",
    ],
    do_not_specialize_on_alignment=[
        "anchors",
        "bias",
        "target",
        "sinks",
        "mask",
        "key_lengths",
        "mass",
        "anchored_lse",
        "rest_lse",
    ],
)
def attention_kernel(
    query,
    key,
    value,
    anchors,
    bias,
    target,
    sinks,
    mask,
    key_lengths,
    partial,
    lse,
    out,
    mass,
    anchored_out,
    anchored_lse,
    rest_lse,
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
    value_batch,
    value_head,
    value_step,
    anchors_batch,
    bias_batch,
    target_batch,
    mask_batch,
    mask_head,
    mask_query,
    most_splits,
    UNIT: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    FACTORS: tl.constexpr,
    EXACT: tl.constexpr,
    FULL_MASK: tl.constexpr,
    DIRECT: tl.constexpr,
    PRECISION: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """One stretch of keys of one row and key head, for up to BLOCK_ROWS of its query rows.

    Grid: (batch * key heads * ceil(tokens * group / BLOCK_ROWS), splits). Strides of query, key
    and value come in steps of UNIT elements, so that 16-byte loads stay provable without
    specialising on strides that change with the number of keys. With one part and anchors the bias
    is added as the logits come: a fused multiply-add in place of the scale's multiplication. With
    FACTORS (float anchors, a bias and two parts) it is added to the anchored part's.
    """
    blocks = tl.cdiv(tokens * group, BLOCK_ROWS)
    program = tl.program_id(0)
    split = tl.program_id(1)
    batch = (program // (heads * blocks)).to(tl.int64)
    head = program // blocks % heads
    # The last queries see most keys under causality: they start first.
    first_row = (blocks - 1 - program % blocks) * BLOCK_ROWS
    row = first_row + tl.arange(0, BLOCK_ROWS)
    real = row < tokens * group
    token = row // group
    query_heads = head * group + row % group

    length = keys if key_lengths is None else tl.minimum(tl.load(key_lengths + batch), keys)
    last_token = tl.minimum((first_row + BLOCK_ROWS - 1) // group, tokens - 1)
    first, last, all_begin, all_end = row_range(
        length, first_row // group, last_token, tokens, causal, window
    )
    own = length - tokens + token
    limit = tl.where(causal != 0, own, length - 1)
    # Tiles begin at multiples of their size, where the words of a packed mask do.
    begin = first // BLOCK_KEYS * BLOCK_KEYS
    end = last
    if not DIRECT:
        stretch = tl.cdiv(tl.cdiv(last - begin, most_splits), BLOCK_KEYS) * BLOCK_KEYS
        stretch = tl.maximum(stretch, MIN_KEYS)
        begin += split * stretch
        end = tl.minimum(begin + stretch, last)
    all_end = tl.minimum(all_end, end)

    step = tl.arange(0, BLOCK_KEYS)
    far = step.to(tl.int64)
    depth = tl.arange(0, BLOCK_SIZE)
    columns = tl.arange(0, BLOCK_VALUE)
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
        + (batch * key_batch + head.to(tl.int64) * key_head + far[None, :] * key_step) * UNIT
        + depth[:, None]
    )
    value_tile = (
        value
        + (batch * value_batch + head.to(tl.int64) * value_head + far[:, None] * value_step) * UNIT
        + columns[None, :]
    )
    scale = tl.cast(scale, tl.float32)
    if anchors is not None:
        anchors += batch * anchors_batch
        if PARTS == 1 or FACTORS:
            added = tl.load(bias + batch * bias_batch + query_heads, mask=real, other=0.0) * LOG2E
    if PARTS == 2:
        anchored_top = tl.full([BLOCK_ROWS], NEGATIVE_INFINITY, tl.float32)
        anchored_total = tl.zeros([BLOCK_ROWS], tl.float32)
        anchored_part = tl.zeros([BLOCK_ROWS, BLOCK_VALUE], tl.float32)
        if FACTORS:
            plain_top = tl.full([BLOCK_ROWS], NEGATIVE_INFINITY, tl.float32)
            plain_total = tl.zeros([BLOCK_ROWS], tl.float32)
    if mask is not None:
        mask += batch * mask_batch
    top = tl.full([BLOCK_ROWS], NEGATIVE_INFINITY, tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    part = tl.zeros([BLOCK_ROWS, BLOCK_VALUE], tl.float32)

    # Flags of one byte a key cannot be copied asynchronously, so they are read a tile ahead.
    if anchors is not None:
        next_factors = tl.load(anchors + begin + step, mask=begin + step < end, other=0)
    if FULL_MASK:
        mask += query_heads.to(tl.int64) * mask_head + token.to(tl.int64) * mask_query
        word, second, any_first, any_second = _words(mask, begin, end, real, BLOCK_KEYS)
    elif mask is not None:
        next_readable = tl.load(mask + begin + step, mask=begin + step < end, other=0)
    for start in range(begin, end, BLOCK_KEYS):
        edge = (start < all_begin) | (start + BLOCK_KEYS > all_end)
        position = start + step
        inside = (position >= first) & (position < end)
        ahead = position + BLOCK_KEYS
        readable = inside
        if FULL_MASK:
            any_bits = _bits(any_first, any_second, start, BLOCK_KEYS)
            readable &= any_bits
            now, now_second = word, second
            word, second, any_first, any_second = _words(
                mask, start + BLOCK_KEYS, end, real, BLOCK_KEYS
            )
        elif mask is not None:
            readable &= next_readable != 0
            next_readable = tl.load(mask + ahead, mask=ahead < end, other=0)
        tile = tl.cast(start, tl.int64)
        key_block = tl.load(
            key_tile + tile * key_step * UNIT,
            mask=inside[None, :] & (depth < HEAD_SIZE)[:, None],
            other=0.0,
        )
        value_block = tl.load(
            value_tile + tile * value_step * UNIT,
            mask=readable[:, None] & (columns < VALUE_SIZE)[None, :],
            other=0.0,
        )
        scores = scaled_scores(query_tile, key_block, scale, softcap, PRECISION)
        if anchors is not None:
            factors = next_factors
            next_factors = tl.load(anchors + ahead, mask=ahead < end, other=0)
            if PARTS == 1:
                scores += added[:, None] * factors.to(tl.float32)[None, :]
        if FULL_MASK:
            attends = _bits(now[:, None], now_second[:, None], start, BLOCK_KEYS)
            scores = tl.where(attends, scores, NEGATIVE_INFINITY)
        elif mask is not None:
            scores = tl.where(readable[None, :], scores, NEGATIVE_INFINITY)
        if edge:
            within = (position[None, :] <= limit[:, None]) & (
                position[None, :] > (limit - window)[:, None]
            )
            scores = tl.where(within & inside[None, :], scores, NEGATIVE_INFINITY)
        if PARTS == 1:
            top, total, part = _update_part(scores, value_block, top, total, part, PRECISION)
        else:
            anchored = (factors != 0) & readable
            rest = tl.where(anchored[None, :], NEGATIVE_INFINITY, scores)
            top, total, part = _update_part(rest, value_block, top, total, part, PRECISION)
            if tl.max(anchored.to(tl.int32), 0) > 0:
                scores = tl.where(anchored[None, :], scores, NEGATIVE_INFINITY)
                if FACTORS:
                    _, plain_top, plain_total, _ = update_sum(scores, plain_top, plain_total)
                    scores += added[:, None] * factors.to(tl.float32)[None, :]
                anchored_top, anchored_total, anchored_part = _update_part(
                    scores,
                    value_block,
                    anchored_top,
                    anchored_total,
                    anchored_part,
                    PRECISION,
                )

    sums = log_sum(top, total)
    part = part / tl.where(total == 0, 1.0, total)[:, None]
    if PARTS == 2:
        anchored_sums = log_sum(anchored_top, anchored_total)
        anchored_part = anchored_part / tl.where(anchored_total == 0, 1.0, anchored_total)[:, None]
        if FACTORS:
            plain_sums = log_sum(plain_top, plain_total)
    if DIRECT:
        _finish(
            sums,
            part,
            anchored_sums if PARTS == 2 else sums,
            anchored_part if PARTS == 2 else part,
            plain_sums if FACTORS else sums,
            real,
            batch,
            query_heads,
            token,
            first_row // group,
            tokens,
            heads * group,
            bias,
            target,
            sinks,
            out,
            mass,
            anchored_out,
            anchored_lse,
            rest_lse,
            bias_batch,
            target_batch,
            PARTS,
            FACTORS,
            EXACT,
            VALUE_SIZE,
            BLOCK_VALUE,
        )
    else:
        splits = tl.num_programs(1)
        rows = (tl.num_programs(0) // blocks).to(tl.int64) * tokens * group
        cell = (batch * heads + head) * tokens * group + row
        _store_part(partial, lse, cell * splits + split, part, sums, real, columns, VALUE_SIZE)
        if PARTS == 2:
            cell += rows
            _store_part(
                partial,
                lse,
                cell * splits + split,
                anchored_part,
                anchored_sums,
                real,
                columns,
                VALUE_SIZE,
            )
            if FACTORS:
                tl.store(lse + (cell + rows) * splits + split, plain_sums, mask=real)


@triton.jit
def _merged_log_sum(lse, row, splits, MAX_SPLITS: tl.constexpr):
    split = tl.arange(0, MAX_SPLITS)
    sums = tl.load(lse + row * splits + split, mask=split < splits, other=NEGATIVE_INFINITY)
    top = tl.max(sums, 0)
    shift = tl.where(top == NEGATIVE_INFINITY, 0.0, top)
    return log_sum(shift, tl.sum(tl.exp2(sums - shift), 0))


@triton.jit
def _merged_out(
    partial,
    lse,
    row,
    splits,
    merged,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_VALUE)
    shift = tl.where(merged == NEGATIVE_INFINITY, 0.0, merged)
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


@triton.jit(
    do_not_specialize=["keys", "words", "mask_batch", "mask_head", "mask_query", "heads", "tokens"],
    do_not_specialize_on_alignment=["mask"],
)
def pack_kernel(
    mask,
    packed,
    keys,
    words,
    heads,
    tokens,
    mask_batch,
    mask_head,
    mask_query,
    BLOCK_WORDS: tl.constexpr,
):
    """Packs a mask of bytes into words of 32 bits. Grid: (batch * heads * tokens, word blocks)."""
    program = tl.program_id(0).to(tl.int64)
    place = (
        program // (heads * tokens) * mask_batch
        + program // tokens % heads * mask_head
        + program % tokens * mask_query
    )
    word = tl.program_id(1) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    bit = tl.arange(0, 32)
    position = word[:, None] * 32 + bit[None, :]
    seen = tl.load(mask + place + position, mask=position < keys, other=0) != 0
    bits = tl.sum(seen.to(tl.int32) << bit[None, :], 1)
    tl.store(packed + program * words + word, bits, mask=word < words)


@triton.jit(
    do_not_specialize=["rows", "splits", "tokens", "group", "heads", "bias_batch", "target_batch"],
    do_not_specialize_on_alignment=["bias", "target", "sinks", "mass", "anchored_lse", "rest_lse"],
)
def merge_kernel(
    partial,
    lse,
    bias,
    target,
    sinks,
    out,
    mass,
    anchored_out,
    anchored_lse,
    rest_lse,
    rows,
    splits,
    tokens,
    group,
    heads,
    bias_batch,
    target_batch,
    PARTS: tl.constexpr,
    FACTORS: tl.constexpr,
    EXACT: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Merges the stretches of one query row. Grid: (batch * key heads * tokens * group)."""
    row = tl.program_id(0).to(tl.int64)
    place = row // (tokens * group)
    inner = row % (tokens * group)
    one = tl.zeros([1], tl.int64)
    batch = place // heads
    query_head = one.to(tl.int32) + (place % heads * group + inner % group).to(tl.int32)
    sums = _merged_log_sum(lse, row, splits, MAX_SPLITS)
    part = _merged_out(partial, lse, row, splits, sums, VALUE_SIZE, BLOCK_SPLITS, BLOCK_VALUE)
    anchored_sums = sums
    anchored_part = part
    plain_sums = sums
    if PARTS == 2:
        row += rows
        anchored_sums = _merged_log_sum(lse, row, splits, MAX_SPLITS)
        anchored_part = _merged_out(
            partial, lse, row, splits, anchored_sums, VALUE_SIZE, BLOCK_SPLITS, BLOCK_VALUE
        )
        if FACTORS:
            plain_sums = _merged_log_sum(lse, row + rows, splits, MAX_SPLITS)
    _finish(
        one.to(tl.float32) + sums,
        part[None, :],
        one.to(tl.float32) + anchored_sums,
        anchored_part[None, :],
        one.to(tl.float32) + plain_sums,
        one == 0,
        batch,
        query_head,
        one.to(tl.int32) + (inner // group).to(tl.int32),
        (inner // group).to(tl.int32),
        tokens,
        heads * group,
        bias,
        target,
        sinks,
        out,
        mass,
        anchored_out,
        anchored_lse,
        rest_lse,
        bias_batch,
        target_batch,
        PARTS,
        FACTORS,
        EXACT,
        VALUE_SIZE,
        BLOCK_VALUE,
    )
