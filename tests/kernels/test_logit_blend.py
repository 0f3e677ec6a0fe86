"""Blending and sampling against the float64 oracle, transformers' warpers and statistics."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radar_kernels import blend_logits, sample_logits
from radar_kernels.logit_blend.philox import gumbel, gumbel_rows, philox
from radar_kernels.testing import assert_within, blend_oracle


@pytest.fixture(params=["cpp", "reference"], autouse=True)
def served_by(request, monkeypatch):
    """Every test runs on both; a call that needs gradients falls back."""
    monkeypatch.setenv("RADAR_BACKEND", request.param)


def logits(rows=3, vocabulary=101, seed=0, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(2, rows, vocabulary, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("modulated", [False, True])
@pytest.mark.parametrize(
    "strength", [1.4, 0.0, 1.0, -1.5, 20.0, torch.tensor([1.0, 0.3, 5.0])], ids=str
)
def test_blend_equals_the_oracle(dtype, modulated, strength):
    full, masked = logits().to(dtype)
    full[:, 5] = -math.inf
    masked[:, 6] = -math.inf
    blended = blend_logits(full, masked, strength, modulated=modulated)
    expected = blend_oracle(full, masked, strength, modulated=modulated)
    assert blended.dtype == torch.float32
    finite = expected.masked_fill(expected.isinf(), 0).abs()
    rounding = 2.0**-22 * (finite + 25 * (full - masked).nan_to_num(0, 0, 0).abs().double())
    assert_within(blended, expected, rounding)


def test_blend_is_the_weighted_sum():
    full, masked = logits()
    expected = 1.4 * full + (1 - 1.4) * masked
    torch.testing.assert_close(blend_logits(full, masked, 1.4), expected)


def test_infinite_logits_are_rules_that_stay():
    full, masked = logits()
    full[:, 0], masked[:, 1] = -math.inf, -math.inf
    full[:, 2] = masked[:, 2] = -math.inf
    for modulated in (False, True):
        for strength in (1.4, 0.2, -3.0):
            blended = blend_logits(full, masked, strength, modulated=modulated)
            assert (blended[:, [0, 2]] == -math.inf).all()
            assert torch.equal(blended[:, 1], full[:, 1])
            assert not blended.isnan().any()


def test_a_strength_of_one_reads_nothing_of_the_masked_row():
    full, masked = logits()
    masked[1] = math.nan
    blended = blend_logits(full, masked, torch.tensor([1.4, 1.0, 1.4]))
    assert torch.equal(blended[1], full[1])


def test_the_modulated_blend_of_a_row_does_not_depend_on_its_batch():
    full, masked = logits()
    together = blend_logits(full, masked, 5.0, modulated=True)
    for row in range(3):
        alone = blend_logits(full[row, None], masked[row, None], 5.0, modulated=True)
        assert torch.equal(together[row, None], alone)


def test_the_gradient_of_a_blend():
    full, masked = (one.requires_grad_() for one in logits())
    blend_logits(full, masked, 1.4).sum().backward()
    torch.testing.assert_close(full.grad, torch.full_like(full, 1.4))
    torch.testing.assert_close(masked.grad, torch.full_like(full, -0.4))


@pytest.mark.parametrize("modulated", [False, True])
def test_the_gradient_is_finite_beside_infinite_logits(modulated):
    full = torch.tensor([[1.0, -math.inf, 2.0, 0.5]], requires_grad=True)
    masked = torch.tensor([[0.0, 0.0, 0.5, -math.inf]])
    blended = blend_logits(full, masked, 2.0, modulated=modulated)
    (gradient,) = torch.autograd.grad(blended[blended.isfinite()].sum(), full)
    assert gradient.isfinite().all() and bool((gradient[0, [0, 2]] != 0).all())


def warped(scores, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """What transformers' own warpers leave, in generate's order."""
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    chain = [TemperatureLogitsWarper(temperature)]
    if top_k:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        chain.append(TopPLogitsWarper(top_p))
    if min_p:
        chain.append(MinPLogitsWarper(min_p))
    for warper in chain:
        scores = warper(None, scores)
    return scores


SETTINGS = [
    {"temperature": 0.7},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 500},
    {"top_p": 0.01},
    {"top_k": 1},
    {"min_p": 1.0},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.7, "min_p": 0.05},
    {"temperature": 0.4, "top_p": 0.95, "min_p": 0.3},
]


@pytest.mark.parametrize("features", SETTINGS, ids=str)
def test_the_draw_is_gumbels_argmax_over_what_transformers_keeps(features):
    full, masked = logits(rows=40)
    kept = warped(blend_logits(full, masked, 1.4), **features)
    noise = gumbel_rows(torch.arange(5, 45), torch.full((40,), 9), 101)
    token = sample_logits(full, masked, 1.4, seed=5, offset=9, **features)
    assert torch.equal(token, (kept + noise).argmax(-1))


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 2**62),
    vocabulary=st.integers(1, 40),
    temperature=st.floats(0.1, 3),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.05, 1),
    min_p=st.floats(0, 1),
)
def test_any_truncation_keeps_what_transformers_keeps(
    seed, vocabulary, temperature, top_k, top_p, min_p
):
    full = logits(1, vocabulary, seed=seed % 1000)[0]
    token = sample_logits(
        full, seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    noise = gumbel(torch.tensor(seed), torch.tensor(0), torch.arange(vocabulary))
    # A token whose mass is at the border to rounding may be kept or dropped.
    allowed = {
        int((warped(full, temperature, top_k, top_p * p, min_p * m) + noise).argmax())
        for p in (1 - 1e-5, 1, 1 + 1e-5)
        for m in (1 - 1e-5, 1, min(1 + 1e-5, 1 / max(min_p, 1e-9)))
    }
    assert int(token) in allowed


def test_parameters_per_row():
    full, _ = logits(rows=4)
    rows = sample_logits(
        full,
        temperature=torch.tensor([0.0, 1.0, 0.5, 2.0]),
        top_k=torch.tensor([0, 3, 0, 50]),
        top_p=torch.tensor([1.0, 1.0, 0.5, 0.9]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.2]),
        seed=torch.tensor([4, 4, 7, 9]),
        offset=torch.tensor([0, 1, 2, 3]),
    )
    one = [
        sample_logits(full[:1], temperature=0),
        sample_logits(full[1:2], top_k=3, seed=4, offset=1),
        sample_logits(full[2:3], temperature=0.5, top_p=0.5, seed=7, offset=2),
        sample_logits(full[3:], temperature=2.0, top_k=50, top_p=0.9, min_p=0.2, seed=9, offset=3),
    ]
    assert torch.equal(rows, torch.cat(one))


def test_a_temperature_of_zero_is_the_first_largest():
    full, masked = logits()
    assert torch.equal(
        sample_logits(full, masked, 1.4, temperature=0, top_p=0.5),
        blend_logits(full, masked, 1.4).argmax(-1),
    )
    assert sample_logits(torch.tensor([[1.0, 3.0, 3.0]]), temperature=0) == 1


def test_ties_with_the_last_kept_are_kept():
    full = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]]).expand(4000, 5)
    for features, kept in (
        ({"top_k": 2}, {0, 1, 2, 3}),
        ({"top_p": 0.5}, {0, 1, 2, 3}),
        ({"min_p": math.exp(-1) * 0.999}, {0, 1, 2, 3}),
        ({"top_k": 1}, {0}),
    ):
        assert set(sample_logits(full, seed=0, **features).tolist()) == kept


@pytest.mark.parametrize(
    "features", [{}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.8, "min_p": 0.05}], ids=str
)
def test_frequencies_follow_the_distribution(features):
    draws = 60_000
    row = torch.tensor([[1.5, 0.3, -1.0, 2.0, 0.0, -math.inf, 1.0, -2.0, 0.7, -0.5]])
    probability = torch.softmax(warped(row, **features), -1)[0].double()
    token = sample_logits(row.expand(draws, -1), seed=1234, **features)
    counts = torch.bincount(token, minlength=10).double()
    assert (counts[probability == 0] == 0).all()
    expected = draws * probability[probability > 0]
    statistic = ((counts[probability > 0] - expected).square() / expected).sum()
    # The 1 - 1e-5 quantile of chi-square with 9 degrees of freedom is 39.3.
    assert statistic < 39.3


def test_offsets_are_independent_draws():
    row = torch.zeros(1, 16)
    token = torch.cat([sample_logits(row, seed=3, offset=place) for place in range(2000)])
    counts = torch.bincount(token, minlength=16).double()
    assert (counts - 125).square().sum() / 125 < 56.5  # chi-square, 15 degrees, 1 - 1e-6
    # Successive draws are no more often equal than chance has it: 125 of 2000.
    assert 70 < int((token[1:] == token[:-1]).sum()) < 190


def test_the_draw_of_a_row_does_not_depend_on_its_batch():
    full, masked = logits(rows=6)
    features = {"top_k": 30, "top_p": 0.9, "offset": 3}
    seeds = torch.tensor([3, 1, 4, 1, 5, 9])
    together = sample_logits(full, masked, 1.4, seed=seeds, **features)
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    shuffled = sample_logits(full[order], masked[order], 1.4, seed=seeds[order], **features)
    assert torch.equal(shuffled, together[order])
    for row in range(6):
        one = slice(row, row + 1)
        alone = sample_logits(full[one], masked[one], 1.4, seed=seeds[one], **features)
        assert torch.equal(alone, together[one])


def test_a_scalar_seed_means_seed_plus_row():
    full, _ = logits()
    assert torch.equal(
        sample_logits(full, seed=7), sample_logits(full, seed=torch.tensor([7, 8, 9]))
    )
    assert torch.equal(sample_logits(full, seed=torch.tensor(7)), sample_logits(full, seed=7))


def test_without_a_seed_torchs_generator_decides():
    full = torch.zeros(8, 1000)
    torch.manual_seed(0)
    first, second = sample_logits(full), sample_logits(full)
    torch.manual_seed(0)
    assert torch.equal(sample_logits(full), first)
    assert not torch.equal(first, second)


def test_what_is_no_number_is_never_drawn():
    full = torch.full((500, 6), -math.inf)
    full[:, 1], full[:, 2], full[:, 4] = math.nan, 0.5, 0.0
    assert set(sample_logits(full, seed=0).tolist()) == {2, 4}
    assert set(sample_logits(full, seed=0, top_p=0.99, top_k=5).tolist()) == {2, 4}
    full[:, [2, 4]] = -math.inf
    for features in ({}, {"temperature": 0}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}):
        assert (sample_logits(full[:3], seed=0, **features) == -1).all()


def test_nan_raises_where_that_is_asked_for():
    full, masked = logits()
    sample_logits(full, masked, 1.4, nan="raise")
    full[0, 0] = math.inf
    masked[1, 3] = math.nan
    sample_logits(full, nan="raise")
    sample_logits(full, masked, torch.tensor([1.4, 1.0, 1.4]), nan="raise")
    with pytest.raises(ValueError, match=r"NaN in rows \[1\]"):
        sample_logits(full, masked, 1.4, nan="raise")
    full[2, 4] = math.nan
    with pytest.raises(ValueError, match=r"NaN in rows \[1, 2\]"):
        sample_logits(full, masked, 1.4, nan="raise")
    traced = torch.compile(sample_logits, fullgraph=True, backend="eager")
    with pytest.raises(ValueError, match=r"NaN in rows \[2\]"):
        traced(full, nan="raise")
    with pytest.raises(ValueError, match="nan is 'stop'; expected 'ignore' or 'raise'"):
        sample_logits(full, nan="stop")


def test_philox_gives_the_published_numbers():
    """Known answers of Philox4x32-10 from the authors' Random123 distribution."""
    answers = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, expected in answers:
        words = philox(
            tuple(torch.tensor(one) for one in counter), tuple(torch.tensor(one) for one in key)
        )
        assert words.tolist() == list(expected)


def test_noise_is_the_same_token_by_token_and_for_negative_seeds():
    seed, offset = torch.tensor([-1, 2**62 + 5]), torch.tensor([2**40 + 3, 0])
    rows = gumbel_rows(seed, offset, 11)
    assert torch.equal(rows, gumbel(seed[:, None], offset[:, None], torch.arange(11)))
    assert rows.isfinite().all() and len(rows.unique()) == 22


BAD = {
    "full": ((torch.zeros(3),), {}, "full"),
    "integers": ((torch.zeros(1, 3).int(),), {}, "full"),
    "masked": ((torch.zeros(1, 3), torch.zeros(1, 4)), {}, "masked"),
    "strength alone": ((torch.zeros(1, 3), None, 1.4), {}, "strength"),
    "strength": ((torch.zeros(1, 3), torch.zeros(1, 3), math.inf), {}, "strength"),
    "strength rows": ((torch.zeros(1, 3), torch.zeros(1, 3), torch.ones(2)), {}, "strength"),
    "temperature": ((torch.zeros(1, 3),), {"temperature": -1.0}, "temperature"),
    "top_k": ((torch.zeros(1, 3),), {"top_k": -1}, "top_k"),
    "float top_k": ((torch.zeros(1, 3),), {"top_k": torch.tensor(2.0)}, "top_k"),
    "top_p": ((torch.zeros(1, 3),), {"top_p": 1.1}, "top_p"),
    "top_p in a tensor": ((torch.zeros(1, 3),), {"top_p": torch.tensor([1.1])}, "top_p"),
    "min_p": ((torch.zeros(1, 3),), {"min_p": -0.1}, "min_p"),
    "seed": ((torch.zeros(1, 3),), {"seed": torch.zeros(2, dtype=torch.int64)}, "seed"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_naming_the_argument(name):
    arguments, features, match = BAD[name]
    with pytest.raises(ValueError, match=match):
        sample_logits(*arguments, **features)
