"""The C++ linear layer on few rows, on every instruction set of this machine, against float64."""

import ctypes
import math
import mmap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear

from radar_kernels import native
from radar_kernels.linear_rows import cpp, linear_rows
from radar_kernels.testing import assert_within
from tests.kernels.instruction_sets import SETS, instruction_set

assert native.absent() is None, native.absent()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tensors(rows, inputs, outputs, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, inputs), (outputs, inputs), (outputs,))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def check(input, weight, bias):
    """One rounding to the dtype, and float32 rounding of every product and sum."""
    exact = input.double() @ weight.double().T
    size = input.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact += bias.double()
        size += bias.double().abs()
    half_ulp = torch.finfo(input.dtype).eps / 2
    smallest = torch.finfo(input.dtype).smallest_normal * 2 * half_ulp
    budget = half_ulp * exact.abs() + 2**-22 * size + smallest
    out = linear_rows(input, weight, bias, backend="cpp")
    assert out.dtype == input.dtype
    assert_within(out, exact, budget)


@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(576, 192), (1536, 65), (100, 37)])
def test_rows(every_set, shape, dtype, rows):
    check(*tensors(rows, *shape, dtype))


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 8),
    st.integers(1, 300),
    st.integers(1, 100),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.sampled_from(SETS),
    st.integers(0, 1000),
)
def test_any_call(rows, inputs, outputs, dtype, with_bias, name, seed):
    input, weight, bias = tensors(rows, inputs, outputs, dtype, seed)
    with instruction_set(name):
        check(input, weight, bias if with_bias else None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_leading_dimensions_and_strides(every_set, dtype):
    input, weight, bias = tensors(6, 70, 33, dtype)
    expected = linear_rows(input, weight, bias, backend="cpp")
    shaped = linear_rows(input.view(2, 3, 1, 70), weight, bias, backend="cpp")
    assert shaped.shape == (2, 3, 1, 33) and torch.equal(shaped.view(6, 33), expected)
    strided = input.t().contiguous().t()
    assert not strided.is_contiguous()
    assert torch.equal(linear_rows(strided, weight, bias, backend="cpp"), expected)
    one = linear_rows(input[0], weight, bias, backend="cpp")
    assert one.shape == (33,)
    storage = torch.empty(33 * 70 + 1, dtype=dtype)
    unaligned = storage[1:].view(33, 70).copy_(weight)
    assert torch.equal(linear_rows(input, unaligned, bias, backend="cpp"), expected)


def before_unreadable_memory(tensor: Tensor) -> Tensor:
    """A copy that ends where the process may read no further: reading on is a crash."""
    size = (tensor.nbytes // mmap.PAGESIZE + 2) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    end = size - mmap.PAGESIZE
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + end), mmap.PAGESIZE, 0) == 0
    copy = torch.frombuffer(
        memory, dtype=tensor.dtype, count=tensor.numel(), offset=end - tensor.nbytes
    )
    return copy.view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_nothing_beyond_the_tensors_is_read(every_set, rows, dtype):
    for inputs, outputs in ((37, 21), (64, 17)):
        given = tensors(rows, inputs, outputs, dtype)
        guarded = [before_unreadable_memory(one) for one in given]
        assert torch.equal(linear_rows(*guarded, backend="cpp"), linear_rows(*given, backend="cpp"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_propagate(every_set, dtype):
    input, weight, bias = tensors(4, 50, 20, dtype)
    input[0, 7], input[1, 49], weight[3, 2] = math.nan, math.inf, -math.inf
    bias[5] = math.inf
    out = linear_rows(input, weight, bias, backend="cpp")
    expected = linear(input, weight, bias)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.isinf(), expected.isinf())
    assert torch.equal(out[out.isinf()], expected[expected.isinf()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_round_to_nearest_even(every_set, dtype):
    """Halfway cases, subnormals and overflow round as torch rounds them."""
    bits = torch.arange(-(2**15), 2**15, 7, dtype=torch.int32).to(torch.int16)
    halves = bits.view(dtype)
    next_up = (bits + 1).view(dtype)
    middle = (halves.double() + next_up.double()) / 2
    big, small = middle.to(dtype), (middle - middle.to(dtype).double()).to(dtype)
    ok = big.isfinite() & small.isfinite()
    weight = torch.stack([big[ok], small[ok]], 1)
    exact = weight.float().sum(1)
    out = linear_rows(torch.ones(1, 2, dtype=dtype), weight, backend="cpp")[0]
    normal = exact.abs() > torch.finfo(torch.float32).smallest_normal
    assert torch.equal(out[normal], exact.to(dtype)[normal])
    assert int(normal.sum()) > 5000


def test_a_row_does_not_depend_on_the_threads_or_on_chance(every_set):
    input, weight, bias = tensors(2, 500, 700)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(linear_rows(input, weight, bias, backend="cpp"))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_python_threads_do_not_disturb_each_other(every_set):
    calls = [tensors(1 + i, 200 + 30 * i, 500, seed=i) for i in range(6)]
    alone = [linear_rows(*one, backend="cpp") for one in calls]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(5):
            together = list(pool.map(lambda one: linear_rows(*one, backend="cpp"), calls))
            assert all(map(torch.equal, alone, together))


def test_what_the_kernel_cannot_serve_goes_to_pytorch():
    input, weight, bias = tensors(9, 30, 20)
    with pytest.raises(ValueError, match="1 to 8 rows, got 9"):
        linear_rows(input, weight, bias, backend="cpp")
    assert torch.equal(linear_rows(input, weight, bias), linear(input, weight, bias))
    reasons = {
        "contiguous": (input[:2], weight.t().contiguous().t(), bias),
        "one dtype": (input[:2].double(), weight.double(), None),
        "does not fit": (input[:2, :5], weight, bias),
        "bias": (input[:2], weight, bias[:3]),
        "got 0": (input[:0], weight, bias),
    }
    for reason, call in reasons.items():
        with pytest.raises(ValueError, match=reason):
            linear_rows(*call, backend="cpp")
    with pytest.raises(ValueError, match="expected one of cpp, reference"):
        linear_rows(input, weight, backend="blas")


def test_gradients_are_refused_and_left_to_pytorch():
    input, weight, bias = tensors(2, 30, 20)
    weight.requires_grad_(True)
    with pytest.raises(ValueError, match="gradients"):
        linear_rows(input, weight, bias, backend="cpp")
    with pytest.raises(RuntimeError, match="computes no gradients"):
        cpp.run(input, weight, bias)
    linear_rows(input, weight, bias).sum().backward()
    assert weight.grad is not None
    with torch.no_grad():
        check(input, weight, bias)


def test_opcheck():
    input, weight, bias = tensors(2, 30, 20)
    torch.library.opcheck(cpp._linear, (input, weight, bias))
    torch.library.opcheck(cpp._linear, (input.view(1, 2, 1, 30), weight, None))
