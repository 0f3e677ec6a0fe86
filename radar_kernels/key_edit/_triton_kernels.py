"""The Triton kernel of key edits; imported only where Triton is."""

# Triton compiles these functions; the annotations that mypy asks for would change their types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=[
        "keys",
        "heads",
        "key_batch",
        "key_head",
        "key_step",
        "anchors_batch",
        "anchors_step",
    ],
    do_not_specialize_on_alignment=["anchors", "gain"],
)
def edit_kernel(
    key,
    anchors,
    left,
    right,
    gain,
    out,
    keys,
    heads,
    key_batch,
    key_head,
    key_step,
    anchors_batch,
    anchors_step,
    UNIT: tl.constexpr,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """Copies a tile of keys; multiplies it only where it holds an anchor."""
    row = tl.program_id(0)
    batch = (row // heads).to(tl.int64)
    head = row % heads
    place = tl.program_id(1) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    there = place < keys
    source = key + (batch * key_batch + head.to(tl.int64) * key_head) * UNIT
    lines = place.to(tl.int64)[:, None] * key_step * UNIT
    target = out + row.to(tl.int64) * keys * SIZE + place.to(tl.int64)[:, None] * SIZE
    marks = anchors + batch * anchors_batch + place.to(tl.int64) * anchors_step
    anchored = tl.load(marks, mask=there, other=0) != 0
    some = tl.max(anchored.to(tl.int32), 0)
    strength = tl.load(gain + head)
    matrix = left + head.to(tl.int64) * SIZE * RANK

    ranks = tl.arange(0, BLOCK_RANK)
    inner = tl.zeros([BLOCK_KEYS, BLOCK_RANK], tl.float32)
    # Two conditions: the first one is known to the compiler.
    if right is not None:  # noqa: SIM102
        if some != 0:
            for start in range(0, SIZE, BLOCK_DEPTH):
                depth = start + tl.arange(0, BLOCK_DEPTH)
                x = tl.load(
                    source + lines + depth[None, :],
                    mask=anchored[:, None] & (depth < SIZE)[None, :],
                    other=0.0,
                ).to(tl.float32)
                y = tl.load(
                    matrix + depth[:, None] * RANK + ranks[None, :],
                    mask=(depth < SIZE)[:, None] & (ranks < RANK)[None, :],
                    other=0.0,
                )
                inner = tl.dot(x, y, inner, input_precision="ieee")
    for first in range(0, SIZE, BLOCK_COLUMNS):
        column = first + tl.arange(0, BLOCK_COLUMNS)
        inside = there[:, None] & (column < SIZE)[None, :]
        old = tl.load(source + lines + column[None, :], mask=inside, other=0.0)
        new = old
        if some != 0:
            moved = tl.zeros([BLOCK_KEYS, BLOCK_COLUMNS], tl.float32)
            if right is not None:
                y = tl.load(
                    right
                    + head.to(tl.int64) * RANK * SIZE
                    + ranks[:, None] * SIZE
                    + column[None, :],
                    mask=(ranks < RANK)[:, None] & (column < SIZE)[None, :],
                    other=0.0,
                )
                moved = tl.dot(inner, y, moved, input_precision="ieee")
            else:
                for start in range(0, SIZE, BLOCK_DEPTH):
                    depth = start + tl.arange(0, BLOCK_DEPTH)
                    x = tl.load(
                        source + lines + depth[None, :],
                        mask=anchored[:, None] & (depth < SIZE)[None, :],
                        other=0.0,
                    ).to(tl.float32)
                    y = tl.load(
                        matrix + depth[:, None] * SIZE + column[None, :],
                        mask=(depth < SIZE)[:, None] & (column < SIZE)[None, :],
                        other=0.0,
                    )
                    moved = tl.dot(x, y, moved, input_precision="ieee")
            edited = (old.to(tl.float32) + strength * moved).to(old.dtype)
            new = tl.where(anchored[:, None], edited, old)
        tl.store(target + column[None, :], new, mask=inside)
