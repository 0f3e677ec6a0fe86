"""Drawn calls of the attention operators, for the property-based tests of their backends."""

from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor


class AttentionCase(NamedTuple):
    """Tensors and options of one call.

    Args:
        query: ``[B, Hq, q, D]``.
        key: ``[B, Hkv, k, D]``.
        value: ``[B, Hkv, k, Dv]``.
        anchors: bool ``[B, k]``.
        options: mask, key_lengths, causal, window, softcap, scale and sinks, each now and then.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    anchors: Tensor
    options: dict[str, Any]


@st.composite
def attention_cases(draw: Any, dtypes: tuple[torch.dtype, ...], work: int = 4000) -> AttentionCase:
    """Draw a call.

    Args:
        draw: hypothesis' own.
        dtypes: to choose from.
        work: about how many query tokens times keys; the oracle takes one query at a time.

    Returns:
        The call.
    """
    group, key_heads = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    rows, tokens = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 5, 8, 9, 20, 33, 70]))
    keys = min(
        draw(st.one_of(st.integers(1, 140), st.sampled_from([255, 257, 600]))), work // tokens
    )
    heads, dtype = group * key_heads, draw(st.sampled_from(dtypes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    size, value_size = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    options: dict[str, Any] = {"causal": draw(st.booleans())}
    if options["causal"] and draw(st.booleans()):
        options["window"] = draw(st.integers(1, keys + 3))
    if draw(st.booleans()):
        options["key_lengths"] = torch.randint(0, keys + 1, (rows,), generator=generator)
    if draw(st.booleans()):
        shape = [draw(st.sampled_from([1, n])) for n in (rows, heads, tokens)]
        options["mask"] = torch.rand([*shape, keys], generator=generator) < 0.7
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([1.0, 30.0]))
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.5, 0.0, -0.2]))
    if draw(st.booleans()):
        options["sinks"] = torch.randn(heads, generator=generator) * 3
    return AttentionCase(
        normal(rows, heads, tokens, size),
        normal(rows, key_heads, keys, size),
        normal(rows, key_heads, keys, value_size),
        torch.rand(rows, keys, generator=generator) < draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
        options,
    )
