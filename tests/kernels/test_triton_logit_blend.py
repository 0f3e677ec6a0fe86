"""The Triton blend and draw in Triton's interpreter, against float64 and the reference.

Triton decides at import whether it interprets, so in an ordinary run this file has few tests, one
of which runs the others in a process of their own. ``TRITON_INTERPRET=1 pytest`` with this file
runs them directly.
"""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from radar_kernels.logit_blend.arguments import SampleArguments
from tests.kernels.interpreted import INTERPRETED, explains_itself_without_triton, run_interpreted

if not INTERPRETED:
    from radar_kernels.logit_blend import triton as backend

    def test_kernels_in_the_interpreter() -> None:
        run_interpreted(__file__)

    def test_imports_and_explains_itself_without_triton() -> None:
        explains_itself_without_triton("logit_blend")

    def call(dtype: torch.dtype, tokens: int, rows: int, limits: str, blended: bool) -> Any:
        """A call without memory."""

        def tensor(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=of, device="meta")

        full = tensor(rows, tokens, of=dtype)
        row, whole = tensor(rows), tensor(rows, of=torch.int64)
        return SampleArguments(
            full,
            full if blended else None,
            row,
            row,
            whole if "k" in limits else None,
            row if "p" in limits else None,
            row if "m" in limits else None,
            whole,
            whole,
        )

    def test_other_sizes_never_recompile() -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler.compiler import make_backend
        from triton.runtime.jit import create_function_from_signature

        machine = make_backend(GPUTarget("cuda", 90, 32))

        def looked_up(launch: Any) -> Any:
            kernel = launch.kernel
            bind = create_function_from_signature(kernel.signature, kernel.params, machine)
            return bind(**launch.values)[1]

        first: list[Any] = []
        for tokens in (1, 16, 17, 1024, 50_257, 151_936):
            for rows in (1, 3):
                launches, _ = backend._sample_launches(
                    call(torch.bfloat16, tokens, rows, "kpm", True)
                )
                found = [looked_up(launch) for launch in launches]
                first = first or found
                assert found == first, f"{tokens} tokens, {rows} rows"

else:
    from triton.runtime.interpreter import InterpretedFunction

    import radar_kernels
    from radar_kernels import blend_logits, sample_logits
    from radar_kernels.logit_blend import reference
    from radar_kernels.logit_blend import triton as backend
    from radar_kernels.logit_blend.api import prepare_sample_logits
    from radar_kernels.testing import assert_within, blend_oracle, sample_oracle
    from tests.kernels.test_cpp_logit_blend import (
        FEATURES,
        STRENGTHS,
        kept_and_border,
        logits,
        rows_of_logits,
    )

    @pytest.fixture(scope="module", autouse=True)
    def _quick_device_functions() -> Iterator[None]:
        """The interpreter patches all of Triton's language in each call of a device function.

        Once is enough; the patches of the first kernel stay.
        """
        backend.sample(prepare_sample_logits(torch.zeros(1, 3), top_p=0.5))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                InterpretedFunction,
                "__call__",
                lambda function, *values, **named: function.rewrite()(*values, **named),
            )
            yield

    @settings(max_examples=80, deadline=None)
    @given(rows_of_logits(300), st.booleans(), STRENGTHS, FEATURES)
    def test_any_draw_is_one_that_float64_allows(pair, blended, strength, features):
        call = (*pair, strength) if blended else (pair[0],)
        tokens = sample_logits(*call, **features, backend="triton")
        for token, allowed in zip(tokens.tolist(), sample_oracle(*call, **features), strict=True):
            assert token in allowed

    @settings(max_examples=40, deadline=None)
    @given(rows_of_logits(2500), st.booleans(), FEATURES)
    def test_exactly_what_the_reference_keeps_is_kept(pair, blended, features):
        features = features | {"temperature": features["temperature"] or 1.0}
        pair = pair.masked_fill(pair == math.inf, 1.0)
        call = prepare_sample_logits(*((*pair, 1.4) if blended else (pair[0],)), **features)
        warm, expected, _ = kept_and_border(call)
        launches, out = backend._sample_launches(call)
        backend._run(launches, out)
        floors = launches[-2].values["floors"]
        floors = torch.full((len(warm),), -math.inf) if floors is None else floors
        kept = (warm >= floors[:, None]) & (warm > -math.inf)
        finite = warm.amax(-1).isfinite()  # nothing is cut where something is infinite
        assert torch.equal(kept[finite], expected[finite])

    @settings(max_examples=80, deadline=None)
    @given(rows_of_logits(), STRENGTHS, st.booleans())
    def test_any_blend(pair, strength, modulated):
        full, masked = pair.nan_to_num(1.0, math.inf, -math.inf)
        if modulated:
            full = full.masked_fill(full == math.inf, 3.0)  # no probability to weigh by
        blended = blend_logits(full, masked, strength, modulated=modulated, backend="triton")
        if not modulated:
            expected = blend_logits(full, masked, strength, backend="reference")
            assert torch.equal(blended, expected)  # to the last bit: ties stay ties
        expected = blend_oracle(full, masked, strength, modulated=modulated)
        size = expected.masked_fill(expected.isinf(), 0).abs()
        move = (full.double() - masked.double()).nan_to_num(0, 0, 0).abs() * abs(strength - 1)
        assert_within(blended, expected, 2.0**-21 * (size + move))

    @pytest.mark.parametrize("dtype", backend.DTYPES)
    def test_a_modulated_blend_spreads_nan_as_pytorch_does(dtype):
        full, masked = logits(dtype=dtype)
        full[0, 5], full[1, 6], masked[2, 7] = math.nan, math.inf, math.nan
        full[:, 9] = -math.inf
        for strength in (1.4, 0.5):
            mine = blend_logits(full, masked, strength, modulated=True, backend="triton")
            theirs = blend_logits(full, masked, strength, modulated=True, backend="reference")
            torch.testing.assert_close(mine, theirs, equal_nan=True)

    @pytest.mark.parametrize(
        "features",
        [{}, {"temperature": 0}, {"top_k": 9, "top_p": 0.9}, {"top_p": 0.95}, {"min_p": 0.02}],
        ids=str,
    )
    def test_several_tiles_draw_what_the_reference_draws_alone_or_together(features):
        full, masked = logits(3, 2 * backend.TILE + 5)
        seeds = torch.tensor([3, -1, 4])
        call = prepare_sample_logits(full, masked, 1.4, seed=seeds, offset=2**40, **features)
        tokens = backend.sample(call)
        assert torch.equal(tokens, reference.sample(call))
        for row in range(3):
            one = slice(row, row + 1)
            alone = prepare_sample_logits(
                full[one], masked[one], 1.4, seed=seeds[one], offset=2**40, **features
            )
            assert torch.equal(backend.sample(alone), tokens[one])

    def test_frequencies_follow_the_distribution():
        draws = 150
        row = torch.tensor([[1.5, 0.3, -1.0, 2.0, 0.0, -math.inf, 1.0, -2.0, 0.7, -0.5]])
        probability = row.double().softmax(-1)[0]
        tokens = sample_logits(row.expand(draws, -1), seed=7, backend="triton")
        counts = torch.bincount(tokens, minlength=10).double()
        assert (counts[probability == 0] == 0).all()
        expected = draws * probability[probability > 0]
        statistic = ((counts[probability > 0] - expected).square() / expected).sum()
        assert statistic < 39.3  # chi-square with 9 degrees of freedom, the 1 - 1e-5 quantile

    def test_memory_that_was_never_written_is_never_read(monkeypatch):
        full, masked = logits(2, 1500)
        calls = [
            prepare_sample_logits(full, masked, 1.4, seed=1, **features)
            for features in ({}, {"top_k": 5, "top_p": 0.9}, {"top_p": 0.9})
        ]
        expected = [backend.sample(call) for call in calls]
        empty = torch.empty

        def poisoned(*shape: Any, **options: Any) -> Tensor:
            made = empty(*shape, **options)
            return made.fill_(math.nan) if made.is_floating_point() else made.fill_(-7)

        monkeypatch.setattr(torch, "empty", poisoned)
        monkeypatch.setattr(torch, "empty_like", lambda like: poisoned(like.shape))
        assert all(map(torch.equal, expected, [backend.sample(call) for call in calls]))

    def test_strides_and_what_is_left_to_others():
        full, masked = logits(4, 301)
        wide = torch.zeros(4, 400, dtype=torch.bfloat16)
        wide[:, 50:351] = masked
        mine = sample_logits(
            full.t().contiguous().t(), wide[:, 50:351], 1.4, seed=1, top_k=9, backend="triton"
        )
        call = prepare_sample_logits(full, masked.bfloat16(), 1.4, seed=1, top_k=9)
        assert torch.equal(mine, reference.sample(call))
        assert sample_logits(full[:0], backend="triton").shape == (0,)
        with pytest.raises(ValueError, match="float64"):
            sample_logits(full.double(), backend="triton")
        assert radar_kernels.explain("sample_logits", full).chosen != "triton"
