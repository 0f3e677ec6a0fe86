"""Segment mass's Triton kernels in Triton's interpreter, against float64."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.interpreted import (
    INTERPRETED,
    counted,
    never_read,
    quick_device_functions,
    run_interpreted,
)

if not INTERPRETED:

    def test_kernels_in_the_interpreter() -> None:
        run_interpreted(__file__)

else:
    import radar_kernels
    from radar_kernels.segment_mass import triton as backend
    from radar_kernels.segment_mass.api import prepare_segment_mass
    from radar_kernels.testing import assert_within, attention_oracle

    @pytest.fixture(scope="module", autouse=True)
    def _quick() -> Iterator[None]:
        query = torch.randn(1, 1, 1, 64)
        backend.run(prepare_segment_mass(query, query, torch.zeros(1, 1, dtype=torch.int32), 1))
        with quick_device_functions():
            yield

    def make(
        tokens: int = 3,
        keys: int = 130,
        heads: int = 4,
        key_heads: int = 2,
        size: int = 64,
        dtype: torch.dtype = torch.float32,
        count: int = 5,
        mask: tuple[int, ...] | None = None,
        sinks: bool = False,
        sort: bool = False,
        seed: int = 0,
        **features: Any,
    ) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(seed)
        segments = torch.randint(-1, count, (2, keys), generator=draw, dtype=torch.int32)
        if mask is not None:
            features["mask"] = torch.rand(mask, generator=draw) < 0.6
        if sinks:
            features["sinks"] = torch.randn(heads, generator=draw)
        return {
            "query": torch.randn(2, heads, tokens, size, generator=draw).to(dtype),
            "key": torch.randn(2, key_heads, keys, size, generator=draw).to(dtype),
            "segments": segments.sort(1).values if sort else segments,
            "num_segments": count,
            **features,
        }

    def oracle(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """One segment at a time: the mass of anchors that are its keys; with the budget."""
        others = {k: v for k, v in call.items() if k not in ("segments", "num_segments")}
        found, budgets = [], []
        for segment in range(call["num_segments"]):
            one = attention_oracle(value=call["key"], anchors=call["segments"] == segment, **others)
            found.append(one.mass.mean(-1))
            budgets.append(one.mass_budget.mean(-1))
        return torch.stack(found, -1), torch.stack(budgets, -1)

    def check(call: dict[str, Any]) -> None:
        got = radar_kernels.segment_mass(**call, backend="triton")
        assert got.dtype == torch.float32
        wanted, budget = oracle(call)
        assert_within(got, wanted, budget)

    @st.composite
    def calls(draw: st.DrawFn) -> dict[str, Any]:
        heads, key_heads = draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 1)]))
        tokens = draw(st.one_of(st.integers(1, 8), st.integers(9, 70)))
        keys = draw(st.integers(1, 150))
        causal = draw(st.booleans())
        masks = [(2, keys), (2, 1, tokens, keys), (1, heads, 1, keys), (2, heads, tokens, keys)]
        features: dict[str, Any] = {"causal": causal}
        if causal and draw(st.booleans()):
            features["window"] = draw(st.integers(1, 160))
        if draw(st.booleans()):
            lengths = draw(st.lists(st.integers(0, keys), min_size=2, max_size=2))
            features["key_lengths"] = torch.tensor(lengths, dtype=torch.int32)
        if draw(st.booleans()):
            features["softcap"] = draw(st.floats(0.5, 50))
        return make(
            tokens=tokens,
            keys=keys,
            heads=heads,
            key_heads=key_heads,
            size=draw(st.sampled_from([64, 8, 80, 41, 128])),
            dtype=draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
            count=draw(st.sampled_from([1, 2, 4])),
            mask=draw(st.sampled_from([None, *masks])),
            sinks=draw(st.booleans()),
            sort=draw(st.booleans()),
            seed=draw(st.integers(0, 2**16)),
            **features,
        )

    @settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @given(calls())
    def test_any_call(call: dict[str, Any]) -> None:
        check(call)

    @pytest.mark.parametrize("size", [96, 256])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_head_sizes(size: int, dtype: torch.dtype) -> None:
        check(make(size=size, dtype=dtype, keys=70, tokens=20))

    def test_many_segments_that_are_few_keys_or_none() -> None:
        call = make(tokens=2, keys=300, heads=2, key_heads=1, count=400, sort=True)
        got = radar_kernels.segment_mass(**call, backend="triton")
        other = radar_kernels.segment_mass(**call, backend="reference")
        torch.testing.assert_close(got, other, rtol=0, atol=2e-7)

    @pytest.mark.parametrize("sort", [False, True])
    def test_masses_of_all_segments_sum_to_one(sort: bool) -> None:
        call = make(keys=700, sort=sort)
        call["segments"].clamp_(min=0)
        got = radar_kernels.segment_mass(**call, backend="triton")
        torch.testing.assert_close(got.sum(-1), torch.ones(2, 4), rtol=0, atol=1e-6)

    def test_numbers_that_are_no_segment_count_for_none() -> None:
        call = make()
        arguments = prepare_segment_mass(**call)
        strange = torch.where(arguments.segments == 3, 5, arguments.segments)
        strange = torch.where(strange == 2, -7, strange)
        got = backend.run(replace(arguments, segments=strange))
        wanted = backend.run(arguments)
        assert (got[..., 2:4] == 0).all()
        for kept in (0, 1, 4):
            assert torch.equal(got[..., kept], wanted[..., kept])

    def test_memory_does_not_grow_with_the_queries() -> None:
        sizes = []
        for tokens in (1, 64):
            call = make(tokens=tokens, keys=4096, size=8)
            work, _ = backend.launches(prepare_segment_mass(**call), "sm_90")
            tensors = {
                id(value): value.numel() * value.element_size()
                for launch in work
                for name, value in launch.values.items()
                if isinstance(value, Tensor) and name not in ("query", "key")
            }
            sizes.append(sum(tensors.values()))
        # Only the log-sum-exps have a place for each query: 2 rows x 4 heads x 64 x 17 floats.
        assert sizes[1] - sizes[0] <= 2 * 4 * 64 * 17 * 4

    def test_bits_do_not_depend_on_the_batch_or_the_run() -> None:
        call = make(tokens=5, keys=600, key_lengths=torch.tensor([600, 300]), causal=True)
        both = radar_kernels.segment_mass(**call, backend="triton")
        assert torch.equal(both, radar_kernels.segment_mass(**call, backend="triton"))
        for row in range(2):
            one = {
                name: value[row : row + 1] if isinstance(value, Tensor) else value
                for name, value in call.items()
            }
            assert torch.equal(
                both[row : row + 1], radar_kernels.segment_mass(**one, backend="triton")
            )

    def test_floats_are_never_added_by_atomics() -> None:
        with counted("create_atomic_rmw") as atomics:
            radar_kernels.segment_mass(**make(keys=100), backend="triton")
        # First and last key of a segment, once for each of the two rows: integers.
        assert atomics[0] == 4

    def test_the_tail_of_a_static_cache_is_never_read() -> None:
        call = make(tokens=9, key_lengths=torch.tensor([70, 0]), causal=True)
        with never_read(call["key"][0, :, 70:], call["key"][1]):
            check(call)

    def test_hidden_keys_may_be_nan() -> None:
        call = make(mask=(2, 130), causal=True, tokens=5)
        call["key"].masked_fill_(~call["mask"][:, None, :, None], math.nan)
        got = radar_kernels.segment_mass(**call, backend="triton")
        clean = {**call, "key": call["key"].nan_to_num()}
        wanted, budget = oracle(clean)
        assert_within(got, wanted, budget)

    def test_nothing_to_measure_is_zero() -> None:
        for shape in ({"tokens": 0}, {"keys": 0}):
            got = radar_kernels.segment_mass(**make(**shape), backend="triton")
            assert got.shape == (2, 4, 5) and (got == 0).all()

    def test_refusals_name_their_reason() -> None:
        wide = prepare_segment_mass(**make(size=300, keys=3))
        assert "300" in str(backend.unsupported(wide))
        double = prepare_segment_mass(**make(dtype=torch.float64, keys=3))
        assert "float64" in str(backend.unsupported(double))
