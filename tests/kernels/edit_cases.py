"""Calls of `edit_keys`, and what their results must be, for every backend's tests."""

import torch
from hypothesis import strategies as st

from radar_kernels import edit_keys
from radar_kernels.testing import assert_within, edit_keys_oracle

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make_edit(
    batch=2, heads=3, keys=11, size=8, rank=None, dtype=torch.float32, share=0.4, seed=0, layout=0
):
    """key, anchors, projection and gain; `layout` 1 stores tokens before heads, 2 leaves gaps."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=draw)

    key = normal(batch, heads, keys, size).to(dtype)
    if layout == 1:
        key = key.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == 2:
        wide = torch.full((batch, heads, keys, size + 5), float("nan"), dtype=dtype)
        wide[..., 2 : 2 + size] = key
        key = wide[..., 2 : 2 + size]
    anchors = torch.rand(batch, keys, generator=draw) < share
    # What is not anchored is neither read as a number nor changed.
    key.masked_fill_(~anchors[:, None, :, None] & (normal(batch, 1, keys, 1) > 1), float("nan"))
    if rank is None:
        projection = normal(heads, size, size) / size**0.5
    else:
        projection = (
            normal(heads, size, rank),
            torch.rand(heads, rank, generator=draw),
            normal(heads, size, rank) / max(1, rank) ** 0.5,
        )
    return key, anchors, projection, normal(heads)


@st.composite
def edits(draw, most_keys=60, most_size=140, most_rank=40):
    """Any call."""
    return make_edit(
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.integers(0, most_keys)),
        draw(st.integers(1, most_size)),
        draw(st.one_of(st.none(), st.integers(1, most_rank))),
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
        draw(st.integers(0, 1000)),
        draw(st.integers(0, 2)),
    )


def check_edit(call, backend):
    """The oracle's values to float32 rounding of every sum, and one rounding to the dtype."""
    key, anchors, projection, gain = call
    before = key.clone()
    edited = edit_keys(*call, backend=backend)
    assert edited.dtype == key.dtype and edited.is_contiguous()
    assert torch.equal(key.nan_to_num(7), before.nan_to_num(7))
    mark = anchors[:, None, :, None].expand_as(key)
    assert torch.equal(edited[~mark].nan_to_num(7), key[~mark].nan_to_num(7))
    assert torch.equal(edited[~mark].isnan(), key[~mark].isnan())
    matrix, size = projection, projection
    if isinstance(projection, tuple):
        left, singular, right = (one.double() for one in projection)
        matrix = left @ torch.diag_embed(singular) @ right.mT
        size = left.abs() @ torch.diag_embed(singular.abs()) @ right.mT.abs()
    known = key.double().masked_fill(~mark, 0)
    expected = edit_keys_oracle(known, anchors, matrix, gain)
    strength = gain.double().abs().view(-1, 1, 1)
    budget = 2.0**-20 * (known.abs() + strength * (known.abs() @ size.double().abs()))
    half = torch.finfo(key.dtype).eps / 2
    if backend == "triton" and key.dtype == torch.bfloat16:
        half *= 2  # Triton's interpreter cuts float32 off to bfloat16 where a GPU rounds
    smallest = torch.finfo(key.dtype).smallest_normal * 2 * half
    found = edited.double().masked_fill(~mark, 0)
    assert_within(found, expected, half * expected.abs() + budget + smallest)
    return edited
