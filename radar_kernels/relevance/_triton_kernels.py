"""The Triton kernels of relevance; imported only where Triton is.

A program scores a tile of sentences for a block of queries: products and squared norms in one pass
over the embeddings, then the decays of each pair. ``scores_kernel`` stores the scores.
``select_kernel`` runs twice with the same code, so with the same bits: it counts what passes in
each tile, and, once the counts have been summed, writes it where it belongs.
"""

# Triton compiles these functions; the annotations that mypy asks for would change their types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

import triton
import triton.language as tl

HIDDEN = tl.constexpr(float("-inf"))


@triton.jit
def _tile_scores(
    sentences,
    scales,
    queries,
    factors,
    sender,
    round,
    hops,
    now,
    spatial_log,
    temporal_log,
    count,
    asked,
    agents,
    row_units,
    UNIT: tl.constexpr,
    SIZE: tl.constexpr,
    POLICY: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_SENTENCES: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Scores [BLOCK_QUERIES, BLOCK_SENTENCES], -inf for pairs that are not scored or not there."""
    place = tl.program_id(0).to(tl.int64) * BLOCK_SENTENCES + tl.arange(0, BLOCK_SENTENCES)
    query = tl.program_id(1) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    is_said = place < count
    is_asked = query < asked
    rows = sentences + place[:, None] * (row_units * UNIT).to(tl.int64)
    asked_rows = queries + query[:, None].to(tl.int64) * SIZE
    scale = tl.full([BLOCK_SENTENCES], 1.0, tl.float32)
    if scales is not None:
        scale = tl.load(scales + place, mask=is_said, other=0.0)
    product = tl.zeros([BLOCK_QUERIES, BLOCK_SENTENCES], tl.float32)
    squares = tl.zeros([BLOCK_SENTENCES], tl.float32)
    for start in range(0, SIZE, BLOCK_SIZE):
        column = start + tl.arange(0, BLOCK_SIZE)
        inside = column < SIZE
        said = tl.load(rows + column[None, :], mask=is_said[:, None] & inside[None, :], other=0.0)
        ask = tl.load(
            asked_rows + column[None, :], mask=is_asked[:, None] & inside[None, :], other=0.0
        )
        exact = said.to(tl.float32)
        if scales is not None:
            exact = exact * scale[:, None]
            said = exact
        squares += tl.sum(exact * exact, 1)
        if PRECISION == "interpreted":
            # Triton's interpreter multiplies the bit patterns of bfloat16.
            product = tl.dot(ask.to(tl.float32), tl.trans(exact), product)
        else:
            product = tl.dot(ask, tl.trans(said), product, input_precision=PRECISION)
    norm = tl.sqrt(squares)
    # Not a maximum: a NaN stays one.
    norm = tl.where(norm < 1e-12, 1e-12, norm)
    factor = tl.load(factors + query, mask=is_asked, other=0.0)
    cosine = product * factor[:, None] / norm[None, :]

    agent = tl.load(sender + place, mask=is_said, other=0)
    pair = is_asked[:, None] & is_said[None, :]
    distance = tl.load(
        hops + query[:, None].to(tl.int64) * agents + agent[None, :], mask=pair, other=-1
    )
    when = tl.load(round + place, mask=is_said, other=0)
    asked_when = tl.load(now + query, mask=is_asked, other=0)
    away = distance - 1
    ago = asked_when[:, None] - when[None, :] - 1
    scored = distance >= 0
    if POLICY == "exclude":
        scored = scored & (away >= 0) & (ago >= 0)
    if POLICY == "clamp":
        away = tl.maximum(away, 0)
        ago = tl.maximum(ago, 0)
    decay = tl.exp2(away.to(tl.float32) * spatial_log) * tl.exp2(ago.to(tl.float32) * temporal_log)
    return tl.where(scored, cosine * decay, HIDDEN), place, query, pair


@triton.jit(do_not_specialize=["count", "asked", "agents", "row_units"])
def scores_kernel(
    sentences,
    scales,
    queries,
    factors,
    sender,
    round,
    hops,
    now,
    out,
    spatial_log,
    temporal_log,
    count,
    asked,
    agents,
    row_units,
    UNIT: tl.constexpr,
    SIZE: tl.constexpr,
    POLICY: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_SENTENCES: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    score, place, query, pair = _tile_scores(
        sentences,
        scales,
        queries,
        factors,
        sender,
        round,
        hops,
        now,
        spatial_log,
        temporal_log,
        count,
        asked,
        agents,
        row_units,
        UNIT,
        SIZE,
        POLICY,
        PRECISION,
        BLOCK_SENTENCES,
        BLOCK_QUERIES,
        BLOCK_SIZE,
    )
    tl.store(out + query[:, None].to(tl.int64) * count + place[None, :], score, mask=pair)


@triton.jit(do_not_specialize=["count", "asked", "agents", "row_units", "write"])
def select_kernel(
    sentences,
    scales,
    queries,
    factors,
    sender,
    round,
    hops,
    now,
    tiles,
    indices,
    scores,
    spatial_log,
    temporal_log,
    threshold,
    count,
    asked,
    agents,
    row_units,
    write,
    UNIT: tl.constexpr,
    SIZE: tl.constexpr,
    POLICY: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_SENTENCES: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """``tiles`` [Q, tiles] takes how many pass, or holds the place of the first of them."""
    score, place, query, pair = _tile_scores(
        sentences,
        scales,
        queries,
        factors,
        sender,
        round,
        hops,
        now,
        spatial_log,
        temporal_log,
        count,
        asked,
        agents,
        row_units,
        UNIT,
        SIZE,
        POLICY,
        PRECISION,
        BLOCK_SENTENCES,
        BLOCK_QUERIES,
        BLOCK_SIZE,
    )
    passing = pair & (score > HIDDEN) & (score >= threshold)
    cell = tiles + query.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    if write == 0:
        tl.store(cell, tl.sum(passing.to(tl.int64), 1), mask=query < asked)
    else:
        first = tl.load(cell, mask=query < asked, other=0)
        target = first[:, None] + tl.cumsum(passing.to(tl.int32), 1) - 1
        indexed = tl.zeros([BLOCK_QUERIES, 1], tl.int64) + place[None, :]
        tl.store(indices + target, indexed, mask=passing)
        tl.store(scores + target, score, mask=passing)
