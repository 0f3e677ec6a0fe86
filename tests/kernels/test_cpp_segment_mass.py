"""The C++ segment masses on every instruction set of this machine, against float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from radar_kernels import segment_mass
from radar_kernels.segment_mass import cpp
from radar_kernels.testing import assert_within, attention_oracle
from tests.kernels.attention_cases import AttentionCase, attention_cases
from tests.kernels.instruction_sets import SETS, instruction_set

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def measure(*arguments, **options) -> Tensor:
    return segment_mass(*arguments, backend="cpp", **options)


def check(case: AttentionCase, segments: Tensor, count: int) -> None:
    """Every segment's mass is that of its keys if they were the anchors."""
    query, key, _, _, options = case
    found = measure(query, key, segments, count, **options)
    assert found.shape == (*query.shape[:2], count) and found.dtype == torch.float32
    for segment in range(count):
        expected = attention_oracle(query, key, key, segments == segment, **options)
        assert_within(
            found[..., segment], expected.mass.mean(2), expected.mass_budget.mean(2) + 1e-37
        )


@settings(max_examples=300, deadline=None)
@given(attention_cases(DTYPES, work=1200), st.integers(1, 3), st.integers(0, 99), st.data())
def test_any_call(case, count, seed, data):
    generator = torch.Generator().manual_seed(seed)
    shape = case.anchors.shape
    segments = torch.randint(-1, count, shape, generator=generator, dtype=torch.int32)
    if data.draw(st.booleans()):
        segments = segments.sort(-1).values  # sentences are runs of keys
    with instruction_set(data.draw(st.sampled_from(SETS))):
        check(case, segments, count)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 16, 64, 150])
def test_long_rows(every_set, tokens, dtype):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 14, tokens, 64, generator=generator).to(dtype)
    key = torch.randn(1, 2, 5000, 64, generator=generator).to(dtype)
    segments = (torch.arange(5000) * 401 // 5000 - 1)[None]
    found = measure(query, key, segments, 400, causal=True)
    logits = query.double() @ key.double().repeat_interleave(7, 1).mT / 8
    hidden = torch.ones(tokens, 5000, dtype=torch.bool).triu(5000 - tokens + 1)
    weights = logits.masked_fill(hidden, -math.inf).softmax(-1).mean(2)
    expected = torch.zeros(1, 14, 401, dtype=torch.float64).index_add_(2, segments[0] + 1, weights)
    assert_within(found, expected[..., 1:], 1e-5 * expected[..., 1:] + 1e-9)


def test_segments_of_any_stride():
    query, key = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 7, 16)
    wide = torch.arange(28).view(2, 14) % 3
    expected = measure(query, key, wide[:, ::2].contiguous(), 3)
    for segments in (wide[:, ::2], wide[:, ::2].t().contiguous().t(), wide[:, ::2].int()):
        assert torch.equal(measure(query, key, segments, 3), expected)


@pytest.mark.parametrize("tokens", [3, 40])
def test_a_row_does_not_depend_on_its_batch_or_the_threads(every_set, tokens):
    query, key = torch.randn(3, 6, tokens, 32), torch.randn(3, 2, 700, 32)
    segments = torch.randint(-1, 50, (3, 700))
    lengths = torch.tensor([700, 60, 411])
    together = measure(query, key, segments, 50, causal=True, key_lengths=lengths)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for row in range(3):
                one = (x[row : row + 1] for x in (query, key, segments))
                alone = measure(*one, 50, causal=True, key_lengths=lengths[row : row + 1])
                assert torch.equal(alone[0], together[row])
    finally:
        torch.set_num_threads(before)


def test_what_may_not_be_attended_to_does_not_leak(every_set):
    query, key = torch.randn(1, 4, 9, 32), torch.randn(1, 2, 300, 32)
    mask = torch.rand(1, 300) < 0.6
    segments = torch.arange(300)[None] // 10
    clean = measure(query, key, segments, 30, mask=mask)
    key[:, :, ~mask[0]] = math.nan
    assert torch.equal(measure(query, key, segments, 30, mask=mask), clean)
    assert bool(clean.isfinite().all())


def test_bad_segments_are_refused_in_words():
    query, key = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)
    arguments = (query, key, torch.tensor([[0, 1, 2, 3, 4]]), 4, None, None, False, 1.0)
    with pytest.raises(RuntimeError, match=r"segments\[0, 4\] = 4 is not between -1 and 3"):
        cpp._measure(*arguments, None, None, None)


@pytest.mark.parametrize("tokens", [1, 12])
def test_opcheck(tokens):
    query, key = torch.randn(2, 4, tokens, 16), torch.randn(2, 2, 50, 16)
    segments = torch.randint(-1, 7, (2, 50))
    arguments = (query, key, segments, 7, None, None, True, 0.1, 30, 5.0, torch.zeros(4))
    torch.library.opcheck(cpp._measure, arguments)
