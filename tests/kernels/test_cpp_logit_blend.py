"""The C++ blend and draw, on every instruction set of this machine, against float64 and PyTorch."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radar_kernels import blend_logits, native, sample_logits
from radar_kernels.logit_blend import cpp, reference
from radar_kernels.logit_blend.api import prepare_sample_logits
from radar_kernels.logit_blend.arguments import BlendArguments
from radar_kernels.testing import assert_within, blend_oracle, sample_oracle
from tests.kernels.instruction_sets import SETS, instruction_set
from tests.kernels.test_cpp_linear_rows import before_unreadable_memory

assert native.absent() is None, native.absent()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def logits(rows=3, vocabulary=700, seed=0, spread=3.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(2, rows, vocabulary, generator=generator)).to(dtype)


@st.composite
def rows_of_logits(draw, most=700):
    """Rows of every kind: ties, flat rows, huge ones, holes, whole rows of -inf, NaN."""
    rows, vocabulary = draw(st.integers(1, 3)), draw(st.integers(1, most))
    dtype = draw(st.sampled_from(DTYPES))
    spread = draw(st.sampled_from([0.0, 1e-3, 1.0, 3.0, 20.0, 1e4]))
    pair = logits(rows, vocabulary, draw(st.integers(0, 9999)), spread, dtype)
    if draw(st.booleans()):  # ties
        pair = pair.round()
    holes = draw(st.sampled_from([0.0, 0.0, 0.5, 0.99]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    kind = torch.rand(pair.shape, generator=generator)
    pair[kind < holes] = draw(st.sampled_from([-math.inf, math.nan]))
    if draw(st.integers(0, 9)) == 0:
        pair[:, 0] = -math.inf
    if draw(st.integers(0, 9)) == 0:
        pair[0, :, vocabulary // 2 :: 3] = math.inf
    return pair


OFF = st.none()
FEATURES = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1.0, 0.0, 0.7, 0.05, 3.0, 1e-30, 1e30]),
        "top_k": OFF | st.integers(0, 60) | st.just(650),
        "top_p": OFF | st.floats(0, 1, width=32) | st.sampled_from([0.9, 0.95, 1.0]),
        "min_p": OFF | st.floats(0, 1, width=32) | st.sampled_from([0.05, 1.0]),
        "seed": st.integers(0, 2**62),
        "offset": st.integers(0, 2**62),
    }
)
STRENGTHS = st.sampled_from([1.4, 0.0, 1.0, -1.5, 20.0])


@settings(max_examples=400, deadline=None)
@given(rows_of_logits(300), st.booleans(), STRENGTHS, FEATURES, st.sampled_from(SETS))
def test_any_draw_is_one_that_float64_allows(pair, blended, strength, features, name):
    call = (*pair, strength) if blended else (pair[0],)
    with instruction_set(name):
        tokens = sample_logits(*call, **features, backend="cpp")
    for token, allowed in zip(tokens.tolist(), sample_oracle(*call, **features), strict=True):
        assert token in allowed


def kept_and_border(call):
    """What the reference keeps, and the tokens whose mass is at top_p to within rounding."""
    warm = call.full.float()
    if call.masked is not None:
        warm = reference.blend(BlendArguments(call.full, call.masked, call.strength, False))
    warm = warm.masked_fill(warm.isnan(), -math.inf) / call.temperature[:, None]
    border = torch.zeros_like(warm, dtype=torch.bool)
    if call.top_p is not None:
        order, places = warm.sort(-1, descending=True)
        weight = order.double().softmax(-1)
        near = (weight.cumsum(-1) - weight - call.top_p[:, None]).abs() < 1e-6
        border.scatter_(1, places, near)
    return warm, reference._truncated(warm, call) > -math.inf, border


@settings(max_examples=400, deadline=None)
@given(rows_of_logits(6000), st.booleans(), FEATURES, st.sampled_from(SETS))
def test_exactly_what_the_reference_keeps_is_kept(pair, blended, features, name):
    features = features | {"temperature": features["temperature"] or 1.0}
    pair = pair.masked_fill(pair == math.inf, 1.0)
    call = prepare_sample_logits(*((*pair, 1.4) if blended else (pair[0],)), **features)
    warm, expected, border = kept_and_border(call)
    with instruction_set(name):
        floors = torch.ops.radar_cpp.sample_floors(*cpp.operands(call))
    kept = (warm >= floors[:, None]) & (warm > -math.inf)
    wrong = kept != expected
    wrong &= (warm.amax(-1).isfinite())[:, None]  # nothing is cut where something is infinite
    if call.top_k is not None and 0 < int(call.top_k[0]) < warm.shape[1]:
        assert not wrong.any()  # in double precision, as the reference
    else:
        # A token at the border takes those equal to it along.
        for row in range(len(warm)):
            near = warm[row][border[row]]
            assert torch.isin(warm[row][wrong[row]], near).all()


@settings(max_examples=300, deadline=None)
@given(rows_of_logits(), STRENGTHS, st.booleans(), st.sampled_from(SETS))
def test_any_blend(pair, strength, modulated, name):
    full, masked = pair.nan_to_num(1.0, math.inf, -math.inf)
    if modulated:
        full = full.masked_fill(full == math.inf, 3.0)  # no probability to weigh by
    with instruction_set(name):
        blended = blend_logits(full, masked, strength, modulated=modulated, backend="cpp")
    assert blended.dtype == torch.float32 and blended.is_contiguous()
    if not modulated:
        expected = blend_logits(full, masked, strength, backend="reference")
        assert torch.equal(blended, expected)  # to the last bit: ties stay ties
    expected = blend_oracle(full, masked, strength, modulated=modulated)
    size = expected.masked_fill(expected.isinf(), 0).abs()
    move = (full.double() - masked.double()).nan_to_num(0, 0, 0).abs() * abs(strength - 1)
    assert_within(blended, expected, 2.0**-21 * (size + move))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_modulated_blend_spreads_nan_as_pytorch_does(every_set, dtype):
    full, masked = logits(dtype=dtype)
    full[0, 5], full[1, 6], masked[2, 7] = math.nan, math.inf, math.nan
    full[:, 9] = -math.inf
    for strength in (1.4, 0.5):
        mine = blend_logits(full, masked, strength, modulated=True, backend="cpp")
        theirs = blend_logits(full, masked, strength, modulated=True, backend="reference")
        torch.testing.assert_close(mine, theirs, equal_nan=True)


FEATURES_AT_LARGE = [
    {},
    {"temperature": 0},
    {"temperature": 0.6},
    {"top_k": 50, "top_p": 0.95, "temperature": 0.7},
    {"top_p": 0.95},
    {"top_p": 0.95, "min_p": 0.01},
    {"min_p": 0.02},
    {"top_k": 20_000},
    {"top_k": 20_000, "top_p": 0.9},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", FEATURES_AT_LARGE, ids=str)
def test_large_vocabularies_draw_what_the_reference_draws(every_set, features, dtype):
    full, masked = logits(2, 50_257, dtype=dtype)
    for offset in range(3):
        call = prepare_sample_logits(full, masked, 1.4, seed=7, offset=offset, **features)
        mine, theirs = cpp.sample(call), reference.sample(call)
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("features", FEATURES_AT_LARGE, ids=str)
def test_a_draw_does_not_depend_on_the_threads_or_on_the_batch(every_set, features):
    full, masked = logits(5, 40_003)
    seeds = torch.tensor([3, 1, 4, 1, 5])
    before = torch.get_num_threads()
    tokens, floors = [], []

    def draw(rows):
        call = prepare_sample_logits(full[rows], masked[rows], 1.4, seed=seeds[rows], **features)
        return cpp.sample(call), torch.ops.radar_cpp.sample_floors(*cpp.operands(call))

    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            alone = [draw(slice(row, row + 1)) for row in range(5)]
            for together in (draw(slice(0, 5)), tuple(map(torch.cat, zip(*alone, strict=True)))):
                tokens.append(together[0])
                floors.append(together[1])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(tokens[0], one) for one in tokens)
    assert all(torch.equal(floors[0], one) for one in floors)


def test_python_threads_do_not_disturb_each_other(every_set):
    calls = [logits(2, 900 + 700 * i, seed=i) for i in range(6)]

    def draw(pair):
        return sample_logits(*pair, 1.4, top_k=40, top_p=0.9, seed=1, backend="cpp")

    alone = [draw(one) for one in calls]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(5):
            assert all(map(torch.equal, alone, pool.map(draw, calls)))


@pytest.mark.parametrize("features", FEATURES_AT_LARGE, ids=str)
def test_nothing_of_an_earlier_call_is_left(every_set, features):
    """A larger row of NaN, and one of huge logits, have filled all memory that calls reuse."""
    full, masked = logits(2, 333)
    expected = sample_logits(full, masked, 1.4, seed=1, backend="reference", **features)
    for stale in (math.nan, 3e38, -3e38):
        poison = torch.full((2, 5000), stale)
        poison[:, 0] = 0.0
        sample_logits(poison, seed=1, backend="cpp", **features)
        assert sample_logits(full, masked, 1.4, seed=1, backend="cpp", **features).equal(expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_beyond_the_logits_is_read(every_set, dtype):
    for vocabulary in (1, 37, 256, 300):
        full, masked = logits(2, vocabulary, dtype=dtype)
        guarded = [before_unreadable_memory(one) for one in (full, masked)]
        for features in ({}, {"top_k": 5, "top_p": 0.9}, {"top_p": 0.9}):
            mine = sample_logits(*guarded, 1.4, seed=1, backend="cpp", **features)
            assert mine.equal(sample_logits(full, masked, 1.4, seed=1, backend="cpp", **features))
        for modulated in (False, True):
            mine = blend_logits(*guarded, 1.4, modulated=modulated, backend="cpp")
            theirs = blend_logits(full, masked, 1.4, modulated=modulated, backend="cpp")
            assert mine.equal(theirs)


def test_strides_and_mixed_dtypes(every_set):
    full, masked = logits(4, 301)
    expected = sample_logits(full, masked, 1.4, seed=1, top_k=9, backend="cpp")
    columns = full.t().contiguous().t()
    wide = torch.zeros(4, 400)
    wide[:, 50:351] = masked
    mine = sample_logits(columns, wide[:, 50:351], 1.4, seed=1, top_k=9, backend="cpp")
    assert mine.equal(expected)
    assert blend_logits(columns, masked, 1.4, backend="cpp").equal(
        blend_logits(full, masked, 1.4, backend="cpp")
    )
    halves = masked.bfloat16()
    mine = sample_logits(full, halves, 1.4, seed=1, backend="cpp")
    assert mine.equal(sample_logits(full, halves.float(), 1.4, seed=1, backend="cpp"))
    assert sample_logits(full[:0], backend="cpp").shape == (0,)
    assert blend_logits(full[:0], masked[:0], 1.4, backend="cpp").shape == (0, 301)


@pytest.mark.parametrize("features", [{}, {"top_k": 6}, {"top_p": 0.9}, {"min_p": 0.05}], ids=str)
def test_frequencies_follow_the_distribution(every_set, features):
    draws = 30_000
    row = torch.tensor([[1.5, 0.3, -1.0, 2.0, 0.0, -math.inf, 1.0, -2.0, 0.7, -0.5]])
    call = prepare_sample_logits(row, **features)
    probability = reference._truncated(row, call).double().softmax(-1)[0]
    tokens = sample_logits(row.expand(draws, -1), seed=99, backend="cpp", **features)
    counts = torch.bincount(tokens, minlength=10).double()
    assert (counts[probability == 0] == 0).all()
    expected = draws * probability[probability > 0]
    statistic = ((counts[probability > 0] - expected).square() / expected).sum()
    # The 1 - 1e-5 quantile of chi-square with 9 degrees of freedom is 39.3.
    assert statistic < 39.3


def test_noise_is_the_references_for_every_token(every_set):
    """Equal logits leave nothing but the noise to decide; every place of a block gets to win."""
    full = torch.zeros(1, 5000)
    for offset in range(60):
        call = prepare_sample_logits(full, seed=-5, offset=2**40 + offset)
        listed = prepare_sample_logits(full, seed=-5, offset=2**40 + offset, min_p=0.5)
        expected = reference.sample(call)
        assert cpp.sample(call).equal(expected) and cpp.sample(listed).equal(expected)


def test_the_largest_of_equals_is_the_first(every_set):
    full = torch.full((1, 3000), -1.0)
    full[0, [700, 1400, 2999]] = 2.0
    assert sample_logits(full, temperature=0, backend="cpp") == 700
    full[0, [800, 90]] = math.inf
    for features in ({}, {"temperature": 0}, {"top_k": 2}, {"top_p": 0.5}):
        assert sample_logits(full, backend="cpp", **features) == 90
    assert sample_logits(full, temperature=1e-38, backend="cpp") == 90


def test_what_the_kernel_cannot_serve_goes_to_pytorch():
    full, masked = logits().double()
    with pytest.raises(ValueError, match="float64"):
        sample_logits(full, backend="cpp")
    with pytest.raises(ValueError, match="float64"):
        blend_logits(full.float(), masked, 1.4, backend="cpp")
    sample_logits(full)
    full = full.float().requires_grad_()
    with pytest.raises(ValueError, match="gradients"):
        blend_logits(full, masked.float(), 1.4, backend="cpp")
    with pytest.raises(RuntimeError, match="computes no gradients"):
        cpp._blend(full, masked.float(), torch.ones(3), False)
    with pytest.raises(RuntimeError, match="seed must be contiguous"):
        row = torch.ones(3)
        cpp._sample(full.detach(), None, row, row, None, None, None, row, row.long())


def test_opcheck():
    full, masked = logits(2, 50)
    row, whole = torch.full((2,), 0.7), torch.tensor([3, 9])
    torch.library.opcheck(cpp._blend, (full, masked, row, True))
    torch.library.opcheck(cpp._sample, (full, masked, row, row, whole, row, row, whole, whole))
    torch.library.opcheck(cpp._sample, (full, None, row, row, None, None, None, whole, whole))
