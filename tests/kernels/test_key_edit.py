"""Key edits against the float64 oracle."""

import math

import pytest
import torch

from radar_kernels import edit_keys
from radar_kernels.testing import assert_within, edit_keys_oracle


def inputs(dtype=torch.float32, rank=None):
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(2, 3, 11, 8, generator=generator).to(dtype)
    anchors = torch.rand(2, 11, generator=generator) < 0.4
    if rank is None:
        return key, anchors, torch.randn(3, 8, 8, generator=generator)
    left, right = torch.randn(2, 3, 8, rank, generator=generator)
    return key, anchors, (left, torch.rand(3, rank, generator=generator), right)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
@pytest.mark.parametrize("gain", [0.8, -1.0, torch.tensor([0.0, 1.0, 2.5])], ids=str)
@pytest.mark.parametrize("rank", [None, 2])
def test_edits_equal_the_oracle(dtype, gain, rank):
    key, anchors, projection = inputs(dtype, rank)
    matrix = projection
    if rank is not None:
        left, singular, right = projection
        matrix = left.double() @ torch.diag_embed(singular.double()) @ right.double().mT
    edited = edit_keys(key, anchors, projection, gain)
    expected = edit_keys_oracle(key, anchors, matrix, gain)
    assert edited.dtype == dtype
    size = key.double().abs() + 2.5 * key.double().abs() @ matrix.double().abs()
    accumulated = 2.0**-20 if dtype != torch.float64 else 2.0**-48
    assert_within(edited, expected, torch.finfo(dtype).eps * expected.abs() + accumulated * size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_keys_keep_their_bits_and_the_input_is_not_written(dtype):
    key, anchors, projection = inputs(dtype)
    key.masked_fill_(~anchors[:, None, :, None] & (torch.arange(11) == 3)[:, None], math.nan)
    before = key.clone()
    edited = edit_keys(key, anchors, projection, 0.8)
    assert torch.equal(key.nan_to_num(7), before.nan_to_num(7))
    kept = ~anchors[:, None, :, None].expand_as(key)
    assert torch.equal(edited[kept].nan_to_num(7), key[kept].nan_to_num(7))
    assert not torch.equal(edited[~kept], key[~kept])


def test_edits_that_change_nothing():
    key, anchors, projection = inputs()
    assert torch.equal(edit_keys(key, torch.zeros_like(anchors), projection, 0.8), key)
    assert torch.equal(edit_keys(key, anchors, projection, 0.0), key)
    assert edit_keys(key[:, :, :0], anchors[:, :0], projection, 0.8).shape == (2, 3, 0, 8)


def test_one_row_of_anchors_serves_all():
    key, anchors, projection = inputs()
    torch.testing.assert_close(
        edit_keys(key, anchors[:1], projection, 0.8),
        edit_keys(key, anchors[:1].expand(2, 11), projection, 0.8),
    )


@pytest.mark.parametrize("rank", [None, 2])
def test_gradients(rank):
    key, anchors, projection = inputs(torch.float64, rank)
    key.requires_grad_()
    assert torch.autograd.gradcheck(lambda key: edit_keys(key, anchors, projection, 0.8), (key,))


BAD = {
    "key": ((torch.zeros(3, 11, 8),), "key"),
    "anchors": ((None, torch.zeros(2, 10, dtype=torch.bool)), "anchors"),
    "float anchors": ((None, torch.zeros(2, 11)), "anchors"),
    "projection": ((None, None, torch.zeros(2, 8, 8)), "projection"),
    "low rank": (
        (None, None, (torch.zeros(3, 8, 2), torch.zeros(3, 2), torch.zeros(3, 2, 8))),
        "projection",
    ),
    "gain": ((None, None, None, math.nan), "gain"),
    "gains": ((None, None, None, torch.zeros(2)), "gain"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_naming_the_argument(name):
    given, match = BAD[name]
    call = [*inputs(), 0.8]
    for place, bad in enumerate(given):
        call[place] = call[place] if bad is None else bad
    with pytest.raises(ValueError, match=match):
        edit_keys(*call)
