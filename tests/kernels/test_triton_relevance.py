"""Relevance's Triton kernels in Triton's interpreter, against float64; and compiled ahead of time.

Triton decides at import whether it interprets, so in an ordinary run one test runs those of the
interpreter in a process of their own. ``TRITON_INTERPRET=1 pytest`` with this file runs them
directly.
"""

import math

import pytest
import torch

from radar_kernels.relevance import triton as backend
from tests.kernels.interpreted import INTERPRETED, explains_itself_without_triton, run_interpreted

if not INTERPRETED:

    def test_kernels_in_the_interpreter() -> None:
        run_interpreted(__file__)

    def test_imports_and_explains_itself_without_triton() -> None:
        explains_itself_without_triton("relevance")

else:
    from hypothesis import given, settings

    from radar_kernels import explain, relevance_scores, select_relevant
    from tests.kernels.relevance_cases import (
        DTYPES,
        calls,
        check_scores,
        check_selection,
        make_call,
    )

    @settings(max_examples=60, deadline=None)
    @given(calls(most_sentences=150, most_queries=66, most_size=70))
    def test_any_call(case) -> None:
        call, named, chosen = case
        scores = check_scores(call, named, "triton")
        check_selection(call, named, chosen, scores, "triton")

    def test_stretches_merge_into_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
        # Whole tiles: NumPy's matmul may round a row otherwise at another place of its tile.
        monkeypatch.setattr(backend, "STRETCH", 128)
        for equal in (False, True):
            call, named = make_call(300, 3, 8, equal=equal)
            scores = relevance_scores(*call, **named, backend="triton")
            for top_k in (1, 9, 299):
                check_selection(call, named, {"threshold": None, "top_k": top_k}, scores, "triton")

    @pytest.mark.parametrize("dtype", DTYPES[:3])
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0])
    def test_embeddings_that_are_not_finite_or_zero(dtype: torch.dtype, value: float) -> None:
        call, named = make_call(70, 5, 40, dtype=dtype)
        call[0][7, 3] = value
        call[0][69] = value
        call[1][4] = value
        expected = relevance_scores(*call, **named, backend="reference")
        scores = relevance_scores(*call, **named, backend="triton")
        torch.testing.assert_close(scores, expected, atol=4e-6, rtol=0, equal_nan=True)
        for chosen in ({"threshold": None, "top_k": 69}, {"threshold": 0.1, "top_k": None}):
            check_selection(call, named, chosen, scores, "triton")

    def test_rows_with_a_gap_between_them() -> None:
        call, named = make_call(50, 3, 24)
        wide = torch.full((50, 40), math.nan)
        wide[:, 3:27] = call[0]
        assert torch.equal(
            relevance_scores(wide[:, 3:27], *call[1:], **named, backend="triton"),
            relevance_scores(*call, **named, backend="triton"),
        )

    def test_what_triton_does_not_serve() -> None:
        call, named = make_call(12, 2, 6, dtype=torch.float64)
        with pytest.raises(ValueError, match="float64"):
            select_relevant(*call, **named, backend="triton")
        refused = explain("relevance_scores", *make_call()[0]).refused
        assert "cuda tensors only" in refused["triton"]
