"""The C++ attention on every instruction set of this machine, against float64.

Up to eight query tokens are decode, more are prefill: the tests go through both.
"""

import ctypes
import math
import mmap
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from radar_kernels import anchor_attention, available_backends, native, segment_mass
from radar_kernels.anchor_attention import cpp
from radar_kernels.testing import assert_within, attention_oracle
from tests.kernels.instruction_sets import SETS, instruction_set

assert native.absent() is None, native.absent()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tensors(
    rows=2, heads=6, key_heads=2, tokens=1, keys=150, size=64, value_size=None, dtype=None, seed=0
):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype or torch.float32)

    query = normal(rows, heads, tokens, size)
    key = normal(rows, key_heads, keys, size)
    value = normal(rows, key_heads, keys, value_size or size)
    anchors = torch.zeros(rows, keys, dtype=torch.bool)
    for row in range(rows):  # anchors come in runs
        start = int(torch.randint(0, max(keys - 5, 1), (), generator=generator))
        anchors[row, start : start + 9] = True
    return query, key, value, anchors


def attend(*tensors, **options):
    return anchor_attention(*tensors, backend="cpp", **options)


def check(query, key, value, anchors, **options):
    """One call with and one without the mass, both within the budget of float64."""
    out, mass = attend(query, key, value, anchors, return_mass=True, **options)
    alone = attend(query, key, value, anchors, **options)
    expected = attention_oracle(query, key, value, anchors, **options)
    limits = torch.finfo(query.dtype)
    budget = expected.out_budget + limits.smallest_normal * limits.eps  # subnormal results
    assert_within(out, expected.out, budget)
    assert_within(alone, expected.out, budget)
    assert_within(mass, expected.mass, expected.mass_budget)
    assert out.dtype == query.dtype and mass.dtype == torch.float32


def token_major(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def with_gaps(x: Tensor) -> Tensor:
    wide = x.new_full((*x.shape[:2], x.shape[2] * 2, x.shape[3] + 3), math.nan)
    wide[:, :, ::2, 1:-2] = x
    return wide[:, :, ::2, 1:-2]


def dense(query, key, value, logits_added):
    """softmax(scale * q k + added) v in float64, [B, Hq, q, Dv]."""
    group = query.shape[1] // key.shape[1]
    key, value = (one.double().repeat_interleave(group, 1) for one in (key, value))
    logits = query.double() @ key.transpose(2, 3) * query.shape[3] ** -0.5 + logits_added
    return torch.softmax(logits, -1) @ value


def test_the_library_is_built_and_preferred_on_the_cpu():
    assert available_backends("anchor_attention")["cpp"] is None
    assert SETS[-1] == "baseline"
    query, key, value, anchors = tensors()
    automatic = anchor_attention(query, key, value, anchors, bias=1.0)
    assert torch.equal(automatic, attend(query, key, value, anchors, bias=1.0))


@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 11])
def test_head_sizes(every_set, tokens, dtype, size):
    check(*tensors(rows=1, keys=70, tokens=tokens, size=size, dtype=dtype), bias=1.5)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_query_heads_of_a_group(every_set, group, tokens):
    given = tensors(rows=1, heads=2 * group, tokens=tokens, keys=66, size=32, value_size=48)
    check(*given, bias=torch.linspace(-2, 3, 2 * group), causal=True)


@pytest.mark.parametrize(("group", "tokens"), [
    (1, 1), (2, 1), (3, 1), (7, 1), (8, 1), (3, 3), (8, 2), (17, 1), (7, 8),
])  # fmt: skip
@pytest.mark.parametrize("options", [{"bias": 1.5}, {"target_mass": 0.3, "causal": True}])
def test_bfloat16_rows_of_any_number(every_set, group, tokens, options):
    """Where the matrix units of a CPU take part: whole tiles, and what is left of them."""
    sizes = ((32, 32, 64), (64, 64, 9), (80, 96, 131), (96, 80, 77), (128, 130, 80), (256, 256, 65))
    for size, value_size, keys in (*sizes, (37, 13, 150)):
        given = tensors(1, 2 * group, 2, tokens, keys, size, value_size, torch.bfloat16)
        check(*given, **options)
        query, key, value, anchors = given
        for changed in (token_major, with_gaps):
            other = attend(changed(query), changed(key), changed(value), anchors, **options)
            assert torch.equal(other, attend(*given, **options))


@pytest.mark.parametrize("tokens", [17, 20, 21, 22, 23, 24, 25, 67])
def test_bfloat16_prompts_of_any_length(every_set, tokens):
    """Where the products are ours: whole blocks of rows and columns, and what is left of them."""
    for size, value_size, keys in ((64, 64, 130), (37, 13, 300), (96, 80, tokens)):
        for group in (1, 3):
            given = tensors(1, 2 * group, 2, tokens, keys, size, value_size, torch.bfloat16)
            check(*given, bias=1.5, causal=keys == tokens)


@pytest.mark.parametrize("tokens", [1, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_of_huge_logits_takes_all(every_set, tokens, dtype):
    generator = torch.Generator().manual_seed(0)
    key = (1e10 + 9e10 * torch.rand(40, 1, 3, 1, generator=generator)).to(dtype)
    key[:, :, 1] *= 2  # no two are equal
    key[:, :, 2] *= 4
    value = torch.tensor([1.0, 2.0, 4.0]).to(dtype).view(1, 1, 3, 1).expand_as(key)
    query = torch.ones(40, 1, tokens, 1, dtype=dtype)
    out = anchor_attention(query, key, value, scale=1.0, backend="cpp")
    largest = value.gather(2, key.argmax(2, keepdim=True))
    assert torch.equal(out, largest.expand_as(out))
    segments = torch.arange(3, dtype=torch.int32)[None]
    mass = segment_mass(query, key, segments, 3, scale=1.0, backend="cpp")
    torch.testing.assert_close(mass[:, 0], (key == key.amax(2, keepdim=True))[:, 0, :, 0].float())


@pytest.mark.parametrize("tokens", [1, 12])
@pytest.mark.parametrize("bias", [torch.finfo(torch.float32).min, -1e30, 1e30, 3e38])
@pytest.mark.parametrize("scale", [None, 1e-15, 2.0])
def test_a_huge_bias_decides_everything(every_set, tokens, bias, scale):
    query, key, value, anchors = tensors(tokens=tokens)
    for anchored in (anchors, torch.ones_like(anchors), anchors.float()):
        call = {"bias": bias, "scale": scale, "causal": True}
        out = anchor_attention(query, key, value, anchored, backend="cpp", **call)
        expected = anchor_attention(query, key, value, anchored, backend="reference", **call)
        torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 12])
def test_values_of_no_size_and_sinks_that_take_all(every_set, tokens):
    query, key, value, anchors = tensors(tokens=tokens)
    for options in ({"bias": 1.0}, {"target_mass": 0.5}):
        out, mass = attend(query, key, value[..., :0], anchors, return_mass=True, **options)
        assert out.shape == (2, 6, tokens, 0)
        assert torch.equal(mass, attend(query, key, value, anchors, return_mass=True, **options)[1])
    out = attend(query, key, value, anchors, bias=1.0, sinks=torch.full((6,), 2.5e38))
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("group", [3, 7, 12])
def test_bfloat16_weights_keep_their_precision(every_set, group):
    """The mean of equal values is that value, whatever the weights are."""
    query, key, value, anchors = tensors(1, group, 1, 1, 1000, 64, dtype=torch.bfloat16)
    for one in (1.0, 1.9921875):
        out = attend(query, key, torch.full_like(value, one), anchors, bias=1.0)
        assert bool(out.eq(one).all())


FEATURES = {
    "nothing": {},
    "bias": {"bias": 2.0},
    "large bias": {"bias": 150.0},
    "large negative bias": {"bias": -150.0},
    "bias per head": {"bias": torch.linspace(-3, 3, 6)},
    "bias per row": {"bias": torch.tensor([[1.0], [-2.0]])},
    "bias per row and head": {"bias": torch.linspace(-3, 3, 12).view(2, 6)},
    "at least": {"target_mass": 0.3},
    "exactly": {"target_mass": torch.linspace(0.01, 0.99, 6), "target_mode": "exact"},
    "at least per row": {"target_mass": torch.linspace(0.01, 0.99, 12).view(2, 6)},
    "scale": {"bias": 1.0, "scale": 0.7},
    "no scale": {"bias": 1.0, "scale": 0.0},
    "negative scale": {"bias": 1.0, "scale": -1e-3},
    "softcap": {"bias": 1.0, "softcap": 2.0, "scale": 1.0},
    "sinks": {"bias": 1.0, "sinks": torch.linspace(-2, 4, 6)},
    "target with sinks": {"target_mass": 0.4, "sinks": torch.linspace(-2, 9, 6)},
    "causal": {"bias": 1.0, "causal": True},
    "window": {"bias": 1.0, "causal": True, "window": 20},
    "window over a tile": {"target_mass": 0.5, "causal": True, "window": 70},
    "key lengths": {"bias": 1.0, "key_lengths": torch.tensor([150, 77])},
    "window in key lengths": {
        "bias": 1.0,
        "causal": True,
        "window": 66,
        "key_lengths": torch.tensor([131, 2]),
    },
    "everything": {
        "target_mass": 0.6,
        "causal": True,
        "window": 90,
        "key_lengths": torch.tensor([149, 80]),
        "softcap": 3.0,
        "sinks": torch.linspace(-2, 2, 6),
    },
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("tokens", [1, 4, 70])
def test_features(every_set, feature, tokens):
    check(*tensors(tokens=tokens, size=32), **FEATURES[feature])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        {"bias": torch.linspace(-3, 3, 6)},
        {"bias": 1.0, "window": 130},
        {"target_mass": 0.4, "sinks": torch.linspace(-2, 4, 6)},
        {"target_mass": 0.4, "key_lengths": torch.tensor([520, 380])},
    ],
)
def test_prefill_over_several_blocks(every_set, dtype, options):
    check(*tensors(2, 6, 2, 150, 530, 24, 40, dtype), causal=True, **options)


@pytest.mark.parametrize("feature", FEATURES)
def test_features_in_bfloat16(every_set, feature):
    check(*tensors(tokens=4, size=64, dtype=torch.bfloat16), **FEATURES[feature])


MASKS = {
    "[B, k]": (2, 150),
    "row": (2, 1, 1, 150),
    "head": (1, 6, 1, 150),
    "query": (1, 1, "tokens", 150),
    "full": (2, 6, "tokens", 150),
}


@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("options", [{"bias": 2.0}, {"target_mass": 0.5, "causal": True}])
@pytest.mark.parametrize("tokens", [4, 24])
def test_masks(every_set, tokens, shape, options):
    sizes = [tokens if size == "tokens" else size for size in MASKS[shape]]
    mask = torch.rand(sizes, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[..., :70] = False  # a whole tile
    given = tensors(tokens=tokens, size=32)
    check(*given, mask=mask, **options)
    strided = mask.repeat_interleave(2, -1)[..., ::2]
    assert torch.equal(
        attend(*given, mask=strided, **options), attend(*given, mask=mask, **options)
    )


@pytest.mark.parametrize("options", [{}, {"bias": 0.7}])
@pytest.mark.parametrize("tokens", [2, 12])
def test_float_anchors_are_factors_of_the_bias(every_set, tokens, options):
    query, key, value, anchors = tensors(tokens=tokens, size=32)
    factors = torch.where(anchors, torch.linspace(-2, 2, 150), torch.zeros(()))
    check(query, key, value, factors, **options)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_call(data):
    draw = data.draw
    group, key_heads = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    rows, tokens = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 5, 8, 9, 20, 33]))
    keys = draw(st.one_of(st.integers(1, 140), st.sampled_from([255, 257, 600])))
    heads = group * key_heads
    keys = min(keys, 4000 // tokens)  # the oracle takes one query at a time
    query, key, value, anchors = tensors(
        rows,
        heads,
        key_heads,
        tokens,
        keys,
        draw(st.integers(1, 70)),
        draw(st.integers(1, 70)),
        draw(st.sampled_from(DTYPES)),
        draw(st.integers(0, 1000)),
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    options = {"causal": draw(st.booleans())}
    steering = draw(st.sampled_from(["none", "bias", "factors", "target"]))
    if steering == "factors":
        anchors = anchors * torch.randn(rows, keys, generator=generator)
    if steering in ("bias", "factors"):
        options["bias"] = torch.randn(rows, heads, generator=generator) * 3
    if steering == "target":
        options["target_mass"] = torch.rand(rows, heads, generator=generator) * 0.9 + 0.05
        options["target_mode"] = draw(st.sampled_from(["at_least", "exact"]))
    if options["causal"] and draw(st.booleans()):
        options["window"] = draw(st.integers(1, keys + 3))
    if draw(st.booleans()):
        options["key_lengths"] = torch.randint(0, keys + 1, (rows,), generator=generator)
    if draw(st.booleans()):
        full = (rows, heads, tokens, keys)
        shape = [draw(st.sampled_from([1, n])) for n in full[:3]] + [keys]
        options["mask"] = torch.rand(shape, generator=generator) < 0.7
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([1.0, 30.0]))
    if draw(st.booleans()):
        options["sinks"] = torch.randn(heads, generator=generator) * 3
    with instruction_set(draw(st.sampled_from(SETS))):
        check(query, key, value, anchors, **options)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize(
    "options",
    [{"bias": 1.0}, {"target_mass": 0.5}, {"causal": True}, {"causal": True, "window": 40}],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [3, 21])
def test_what_may_not_be_attended_to_does_not_leak(every_set, tokens, dtype, options, poison):
    query, key, value, anchors = tensors(tokens=tokens, size=40, dtype=dtype)
    mask = torch.rand(2, 1, 1, 150, generator=torch.Generator().manual_seed(2)) < 0.6
    lengths = torch.tensor([131, 70])
    hidden = ~mask.expand(2, 2, 1, 150).squeeze(2) | (torch.arange(150) >= lengths[:, None, None])
    if "window" in options:
        hidden |= torch.arange(150) <= (lengths - tokens - 40)[:, None, None]
    clean = attend(query, key, value, anchors, mask=mask, key_lengths=lengths, **options)
    for one in (key, value):
        one[hidden] = poison
    dirty = attend(query, key, value, anchors, mask=mask, key_lengths=lengths, **options)
    assert torch.equal(clean, dirty) and bool(dirty.isfinite().all())


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_lies_beyond_the_lengths_does_not_leak(every_set, dtype, poison):
    query, key, value, anchors = tensors(4, size=40, dtype=dtype)
    lengths = torch.tensor([131, 70, 64, 5])
    clean = attend(query, key, value, anchors, bias=1.0, key_lengths=lengths)
    for one in (key, value):
        one.transpose(1, 2)[torch.arange(150) >= lengths[:, None]] = poison
    dirty = attend(query, key, value, anchors, bias=1.0, key_lengths=lengths)
    assert torch.equal(clean, dirty) and bool(dirty.isfinite().all())


def test_a_key_that_only_some_queries_see_stays_out_of_the_others(every_set):
    query, key, value, anchors = tensors(tokens=4, size=32)
    value[:, :, -1] = math.nan
    out = attend(query, key, value, anchors, bias=1.0, causal=True)
    assert bool(out[:, :, :3].isfinite().all()) and bool(out[:, :, 3].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_what_is_attended_to_comes_out(every_set, dtype):
    query, key, value, anchors = tensors(dtype=dtype)
    key[0, 0, 100, 3] = math.nan
    value[1, 1, 20, 5] = math.nan
    out = attend(query, key, value, anchors, bias=1.0)
    assert bool(out[0, :3].isnan().all()) and bool(out[0, 3:].isfinite().all())
    assert out[1].isnan().sum() == 3 and bool(out[1, 3:, 0, 5].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinite_values_come_out_where_they_are(every_set, dtype):
    query, key, value, anchors = tensors(dtype=dtype)
    expected = attend(query, key, value, anchors, bias=1.0)
    value[:, 1, 20, 5], value[:, 1, 70, 8] = math.inf, -math.inf
    out = attend(query, key, value, anchors, bias=1.0)
    assert bool((out[:, 3:, :, 5] == math.inf).all() and (out[:, 3:, :, 8] == -math.inf).all())
    finite = out.isfinite()
    assert int((~finite).sum()) == 2 * 3 * 2
    limits = 4 * torch.finfo(dtype).eps * expected.double().abs() + 1e-6
    assert_within(out[finite], expected[finite].double(), limits[finite])


@pytest.mark.parametrize("tokens", [2, 19])
def test_rows_that_may_attend_to_nothing_are_zero(every_set, tokens):
    query, key, value, anchors = tensors(tokens=tokens)
    lengths = torch.tensor([0, 1])
    for options in ({}, {"sinks": torch.zeros(6)}):
        out, mass = attend(
            query, key, value, anchors, bias=1.0, causal=True, key_lengths=lengths,
            return_mass=True, **options,
        )  # fmt: skip
        assert out[0].eq(0).all() and mass[0].eq(0).all()
        assert out[1, :, :-1].eq(0).all() and out[1, :, -1].ne(0).all()
    none = attend(query, key[:, :, :0], value[:, :, :0], anchors[:, :0])
    assert none.shape == (2, 6, tokens, 64) and none.eq(0).all()


def test_one_key(every_set):
    query, key, value, _ = tensors(keys=1)
    anchors = torch.ones(2, 1, dtype=torch.bool)
    out, mass = attend(query, key, value, anchors, target_mass=0.2, return_mass=True)
    assert torch.equal(out, value.repeat_interleave(3, 1)) and mass.eq(1).all()


@pytest.mark.parametrize(
    "options", [{"bias": 1.0}, {"target_mass": 0.3}, {"bias": 1.0, "window": 300}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 25])
def test_a_row_does_not_depend_on_its_batch(every_set, tokens, dtype, options):
    options = {"causal": True, "key_lengths": torch.tensor([700, 30, 0, 411, 257, 700]), **options}
    query, key, value, anchors = tensors(6, 12, 4, tokens, keys=700, dtype=dtype)
    together = attend(query, key, value, anchors, **options)
    for row in range(6):
        options["key_lengths"] = torch.tensor([700, 30, 0, 411, 257, 700])[row : row + 1]
        one = (x[row : row + 1] for x in (query, key, value, anchors))
        assert torch.equal(attend(*one, **options)[0], together[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 200])
def test_a_row_does_not_depend_on_the_number_of_threads(every_set, tokens, dtype):
    given = tensors(heads=6, tokens=tokens, keys=3000, dtype=dtype)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(attend(*given, target_mass=0.4))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 30])
def test_python_threads_do_not_disturb_each_other(every_set, tokens, dtype):
    calls = [
        tensors(tokens=tokens, keys=200 + 90 * i, size=32 + 16 * i, dtype=dtype, seed=i)
        for i in range(6)
    ]
    alone = [attend(*one, bias=1.0) for one in calls]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(5):
            together = list(pool.map(lambda one: attend(*one, bias=1.0), calls))
            assert all(map(torch.equal, alone, together))


@pytest.mark.parametrize("keys", [4097, 131072])
def test_long_rows(every_set, keys):
    query, key, value, anchors = tensors(1, 3, 1, 1, keys, 16)
    out = attend(query, key, value, anchors, bias=4.0)
    expected = dense(query, key, value, 4.0 * anchors[:, None, None])
    assert_within(out, expected, 2e-6)


@pytest.mark.parametrize("tokens", [2, 10])
def test_layouts(every_set, tokens):
    """Token-major caches, expanded batches and views with gaps give what packed ones give."""
    query, key, value, anchors = tensors(tokens=tokens)
    expected = attend(query, key, value, anchors, bias=1.0)

    for changed in (token_major, with_gaps):
        given = [changed(x) for x in (query, key, value)]
        assert torch.equal(attend(*given, anchors, bias=1.0), expected)
    one_row = [x[:1].expand(2, -1, -1, -1) for x in (query, key, value)]
    shared = attend(*one_row, anchors[:1].expand(2, -1), bias=1.0)
    assert torch.equal(shared[0], expected[0]) and torch.equal(shared[1], expected[0])


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
@pytest.mark.parametrize("tokens", [2, 13])
def test_nothing_beyond_the_tensors_is_read(every_set, tokens, dtype):
    for size, value_size in ((64, 64), (37, 13)):
        given = tensors(1, 6, 2, tokens, 131, size, value_size, dtype)
        mask = torch.rand(1, 1, tokens, 131) < 0.9
        guarded = [before_unreadable_memory(one) for one in given]
        bias = torch.linspace(-1, 1, 6)
        for options in ({"bias": bias}, {"target_mass": 0.5, "causal": True, "window": 40}):
            expected = attend(*given, mask=mask, **options)
            actual = attend(*guarded, mask=before_unreadable_memory(mask), **options)
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 15])
def test_fresh_memory_is_never_read(every_set, tokens, dtype):
    """What earlier calls left in the scratch memory and in freed outputs does not come back."""
    query, key, value, anchors = tensors(tokens=tokens, keys=700, dtype=dtype)
    expected = attend(query, key, value, anchors, target_mass=0.4)
    poisoned = [torch.full_like(x, math.nan) for x in (query, key, value)]
    for _ in range(3):
        attend(*poisoned, anchors, target_mass=0.4)
        torch.full_like(expected, math.nan)
        assert torch.equal(attend(query, key, value, anchors, target_mass=0.4), expected)


def test_wide_logits_stay_accurate(every_set):
    """Exponentials over the whole range, not only near 1."""
    query, key, value, anchors = tensors(rows=1, keys=100, size=8)
    check(query * 20, key, value, anchors, bias=3.0)
    for gap in (-1e-3, -0.35, -1.0, -19.757, -20.442, -80.0, -87.0, -120.0):
        query = torch.ones(1, 1, 1, 1)
        key = torch.tensor([0.0, gap]).view(1, 1, 2, 1)
        value = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1)
        gap = float(key[0, 0, 1, 0])  # as float32 holds it
        expected = math.exp(gap) / (1 + math.exp(gap))
        assert_within(attend(query, key, value, scale=1.0).double().flatten(),
                      torch.tensor([expected], dtype=torch.float64),
                      3e-7 * expected + 2e-38)  # fmt: skip


def test_gradients_are_refused():
    query, key, value, anchors = tensors()
    key.requires_grad_(True)
    with pytest.raises(ValueError, match="gradients"):
        attend(query, key, value, anchors)
    with torch.no_grad():
        attend(query, key, value, anchors)
    arguments = (query, key, value, None, None, None, False, None, None, False, 1.0)
    with pytest.raises(RuntimeError, match="computes no gradients"):
        torch.ops.radar_cpp.anchor_attention(*arguments, None, None, None, False)


def test_refusals_name_the_reason():
    query, key, value, _ = tensors(tokens=9)
    double = [x[:, :, :4].double() for x in (query, key, value)]
    with pytest.raises(ValueError, match="float64"):
        attend(*double)
    query, key, value, _anchors = tensors(keys=20)
    with pytest.raises(RuntimeError, match="key_lengths\\[1\\] = 21"):
        cpp._attend(
            query, key, value, None, None, None, False, None,
            torch.tensor([3, 21], dtype=torch.int32), False, 1.0, None, None, None, False,
        )  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 3, 12])
def test_opcheck(tokens):
    query, key, value, anchors = tensors(tokens=tokens)
    bias = torch.ones(1, 6)
    arguments = (query, key, value, anchors, bias, None, False, None, None, True, 0.1)
    torch.library.opcheck(cpp._attend, (*arguments, 30, 5.0, torch.zeros(6), True))
    torch.library.opcheck(cpp._attend, (*arguments, None, None, None, False))


def test_the_environment_forces_an_instruction_set():
    code = (
        "import torch; from radar_kernels import native; assert native.absent() is None;"
        "print(torch.ops.radar_cpp.instruction_set())"
    )
    environment = {**os.environ, "RADAR_CPU_ISA": "baseline"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "baseline"


def test_an_unknown_instruction_set_makes_the_library_absent_with_a_reason():
    code = "from radar_kernels import native; print(native.absent())"
    environment = {**os.environ, "RADAR_CPU_ISA": "avx3"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert "RADAR_CPU_ISA=avx3" in done.stdout and "avx2" in done.stdout
