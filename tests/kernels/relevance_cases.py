"""Calls of the relevance operators, and what their results must be, for every backend's tests."""

from itertools import pairwise

import torch
from hypothesis import strategies as st

from radar_kernels import relevance_scores, select_relevant
from radar_kernels.testing import assert_within, relevance_oracle

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
# float32 rounding of a sum of products whose absolute values sum to at most 1, and of the decay.
BUDGET = 2e-6


def make_call(
    sentences=40, queries=3, size=12, agents=5, rounds=6, dtype=torch.float32, seed=0, equal=False
):
    """Positional and named arguments of a call; `equal` sentences come from four different ones."""
    draw = torch.Generator().manual_seed(seed)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=draw)

    said = torch.randn(min(4, sentences) if equal else sentences, size, generator=draw)
    if equal and sentences:
        said = said[integers(0, len(said), sentences)]
    asked = torch.randn(queries, size, generator=draw)
    named = {}
    if dtype == torch.int8:
        named["scales"] = 0.01 + torch.rand(sentences, generator=draw)
        said = (40 * said).round().clamp(-128, 127).to(dtype)
    else:
        said, asked = said.to(dtype), asked.to(dtype)
    one = 1 if equal else agents
    call = (
        said,
        asked,
        integers(0, one, sentences),
        integers(0, 1 if equal else rounds, sentences),
        integers(-1, 5, queries, agents),
        integers(0, rounds + 2, queries),
    )
    return call, named


@st.composite
def calls(draw, most_sentences=300, most_queries=70, most_size=80):
    """Any call: positional arguments, named ones of `relevance_scores`, those of a selection."""
    policy = draw(st.sampled_from(["clamp", "exclude", "literal"]))
    # Literal boosts of far newer rounds leave float32's range.
    rounds = draw(st.sampled_from([1, 6] if policy == "literal" else [1, 6, 3000]))
    call, named = make_call(
        draw(st.integers(0, most_sentences)),
        draw(st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 33, most_queries])),
        draw(st.integers(1, most_size)),
        draw(st.integers(1, 6)),
        rounds,
        draw(st.sampled_from(DTYPES)),
        draw(st.integers(0, 10_000)),
        draw(st.booleans()),
    )
    named |= {
        "self_policy": policy,
        "spatial_decay": draw(st.sampled_from([0.92, 0.5, 1.0])),
        "temporal_decay": draw(st.sampled_from([0.92, 0.999, 1.0])),
    }
    chosen = {
        "threshold": draw(st.sampled_from([None, -0.2, 0.0, 0.3, 0.65, 2.0])),
        "top_k": draw(st.sampled_from([None, 1, 2, 5, 50, 1000])),
    }
    return call, named, chosen


def check_scores(call, named, backend):
    """Scores against the oracle; exponents below 0 scale the rounding of the cosine up."""
    scores = relevance_scores(*call, **named, backend=backend)
    expected = relevance_oracle(*call, **named)
    assert scores.dtype == torch.float32
    boost = 1.0
    if named.get("self_policy") == "literal":
        # Nothing here lies further back than one hop and the newest round.
        newest = int(call[3].max() if len(call[3]) else 0)
        oldest = int(call[5].min() if len(call[5]) else 0)
        boost /= named.get("spatial_decay", 0.92)
        boost /= named.get("temporal_decay", 0.92) ** max(0, newest + 1 - oldest)
    assert_within(scores, expected, BUDGET * boost)
    return scores


def check_selection(call, named, chosen, scores, backend):
    """A selection is exactly what the backend's own scores say, in the order of the sentences."""
    found = select_relevant(*call, **named, **chosen, backend=backend)
    assert found.offsets.dtype == found.indices.dtype == torch.int64
    bounds = found.offsets.tolist()
    assert len(bounds) == len(call[1]) + 1 and bounds[0] == 0
    assert bounds[-1] == len(found.indices) == len(found.scores)
    for row, (start, stop) in zip(scores, pairwise(bounds), strict=True):
        passing = row > -torch.inf
        if chosen["threshold"] is not None:
            passing &= row >= chosen["threshold"]
        expected = passing.nonzero()[:, 0]
        if chosen["top_k"] is not None:
            order = row[expected].sort(descending=True, stable=True).indices[: chosen["top_k"]]
            expected = expected[order].sort().values
        assert found.indices[start:stop].tolist() == expected.tolist()
        assert torch.equal(found.scores[start:stop], row[expected])
    return found
