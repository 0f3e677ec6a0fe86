"""Joining softmax parts in C++ against float64, on every instruction set."""

from __future__ import annotations

import pytest
import torch

from radar_kernels import native
from radar_kernels.anchor_attention.merge import join_parts

assert native.absent() is None, native.absent()


def parts(dtype, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    outs = [torch.randn(2, 7, 3, size, generator=generator).to(dtype) for _ in range(2)]
    sums = [torch.randn(2, 3, 7, generator=generator) * 5 for _ in range(2)]
    sums[0][0, 0, 0] = sums[1][0, 0, 1] = -torch.inf
    sums[0][1, 2, 6] = sums[1][1, 2, 6] = -torch.inf
    sums[0][0, 1, 1], sums[1][0, 1, 1] = 80.0, -80.0
    first, second = (out.transpose(1, 2) for out in outs)
    return first, sums[0], second, sums[1]


@pytest.mark.parametrize("size", [1, 8, 63, 64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_float64(every_set, dtype, size):
    first, first_lse, second, second_lse = parts(dtype, size)
    out, lse = join_parts(first, first_lse, second, second_lse)
    both = torch.stack([first_lse, second_lse]).double()
    weights = torch.nan_to_num(both.softmax(0)).unsqueeze(-1)
    expected = weights[0] * first.double() + weights[1] * second.double()
    tolerance = 2 * torch.finfo(dtype).eps
    assert out.dtype == dtype and out.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), both.logsumexp(0), atol=1e-5, rtol=1e-6)


def test_an_empty_part_counts_nothing(every_set):
    first, first_lse, second, second_lse = parts(torch.float32, 64)
    out, lse = join_parts(first, first_lse, second, second_lse)
    assert torch.equal(out[0, 0, 0], second[0, 0, 0]) and torch.equal(out[0, 0, 1], first[0, 0, 1])
    assert not out[1, 2, 6].any() and lse[1, 2, 6] == -torch.inf


def test_gradients_and_double_take_the_differentiable_way():
    first, first_lse, second, second_lse = parts(torch.float32, 8)
    first = first.clone().requires_grad_()
    join_parts(first, first_lse, second, second_lse)[0].sum().backward()
    assert first.grad is not None and first.grad.abs().sum() > 0
    with pytest.raises(RuntimeError, match="no gradients"):
        torch.ops.radar_cpp.merge_parts(first, first_lse, second, second_lse)
    out, _ = join_parts(first.detach().double(), first_lse, second.double(), second_lse)
    assert out.dtype == torch.float64


def test_shapes_that_do_not_fit_are_refused():
    first, first_lse, second, second_lse = parts(torch.float32, 8)
    with pytest.raises(RuntimeError, match="must agree"):
        torch.ops.radar_cpp.merge_parts(first, first_lse, second[..., :4], second_lse)
    with pytest.raises(RuntimeError, match="log-sum-exps"):
        torch.ops.radar_cpp.merge_parts(first, first_lse[:1], second, second_lse)
