"""The C++ partition of attention on every instruction set of this machine, against float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radar_kernels import partition_attention
from radar_kernels.partition_attention import cpp
from radar_kernels.testing import assert_within, attention_oracle
from tests.kernels.attention_cases import AttentionCase, attention_cases
from tests.kernels.instruction_sets import SETS, instruction_set

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(case: AttentionCase) -> None:
    """Both parts are attention with the other one hidden."""
    query, key, value, anchors, options = case
    parts = partition_attention(query, key, value, anchors, backend="cpp", **options)
    limits = torch.finfo(query.dtype)
    mask = options.get("mask", torch.ones(1, 1, 1, 1, dtype=torch.bool))
    plain = {name: one for name, one in options.items() if name not in ("mask", "sinks")}
    for out, lse, kept, sinks in (
        (parts.anchored, parts.anchored_lse, anchors, None),
        (parts.rest, parts.rest_lse, ~anchors, options.get("sinks")),
    ):
        seen = mask & kept[:, None, None]
        oracle = attention_oracle(query, key, value, mask=seen, sinks=sinks, **plain)
        assert_within(out, oracle.out, oracle.out_budget + limits.smallest_normal * limits.eps)
        assert_within(lse, oracle.lse, oracle.lse_budget)


@settings(max_examples=300, deadline=None)
@given(attention_cases(DTYPES, work=2000), st.sampled_from(SETS))
def test_any_call(case, name):
    with instruction_set(name):
        check(case)


@pytest.mark.parametrize("size", [64, 80])
@pytest.mark.parametrize(("group", "tokens"), [(3, 1), (7, 1), (4, 5)])
def test_bfloat16_rows(every_set, group, tokens, size):
    generator = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(2, heads, count, size, generator=generator).bfloat16()
        for heads, count in ((2 * group, tokens), (2, 203), (2, 203))
    )
    anchors = torch.zeros(2, 203, dtype=torch.bool)
    anchors[0, 60:70], anchors[1, 190:] = True, True
    check(AttentionCase(query, key, value, anchors, {"causal": True, "scale": 0.2}))


@pytest.mark.parametrize("tokens", [1, 40])
def test_empty_parts(every_set, tokens):
    query, key = torch.randn(1, 2, tokens, 8), torch.randn(1, 2, 30, 8)
    none = torch.zeros(1, 30, dtype=torch.bool)
    parts = partition_attention(query, key, key, none, backend="cpp")
    assert bool((parts.anchored_lse == -math.inf).all()) and bool((parts.anchored == 0).all())
    parts = partition_attention(query, key, key, ~none, backend="cpp")
    assert bool((parts.rest_lse == -math.inf).all()) and bool((parts.rest == 0).all())


@pytest.mark.parametrize("tokens", [1, 3, 12])
def test_opcheck(tokens):
    query, key = torch.randn(2, 4, tokens, 16), torch.randn(2, 2, 50, 16)
    anchors = torch.rand(2, 50) < 0.3
    arguments = (query, key, key, anchors, None, None, True, 0.1, 30, 5.0, torch.zeros(4))
    torch.library.opcheck(cpp._partition, arguments)
