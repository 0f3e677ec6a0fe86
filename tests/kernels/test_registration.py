"""The operators under torch.ops.radar, under torch.compile, and in a fresh process."""

import subprocess
import sys

import pytest
import torch

import radar_kernels
from radar_kernels import (
    anchor_attention,
    blend_logits,
    edit_keys,
    merge_partition,
    partition_attention,
    relevance_scores,
    sample_logits,
    segment_mass,
    select_relevant,
)


def attention_inputs(tokens=4, keys=9):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, tokens, 16, generator=generator)
    key = torch.randn(2, 2, keys, 16, generator=generator)
    value = torch.randn(2, 2, keys, 16, generator=generator)
    return query, key, value, torch.rand(2, keys, generator=generator) < 0.4


def relevance_inputs(sentences=30):
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(sentences, 8, generator=generator),
        torch.randn(3, 8, generator=generator),
        torch.randint(0, 4, (sentences,), generator=generator),
        torch.randint(0, 5, (sentences,), generator=generator),
        torch.randint(-1, 4, (3, 4), generator=generator),
        torch.tensor([5, 4, 2]),
    )


BIAS = torch.linspace(-1, 2, 4)[None]
LENGTHS = torch.tensor([5, 9], dtype=torch.int32)
ROW = torch.full((2,), 0.8)
LOGITS = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
SEGMENTS = torch.arange(9).remainder(4).expand(2, 9) - 1
SEEDS, OFFSETS = torch.tensor([1, 2]), torch.tensor([0, 7])
KEY, ANCHORS = attention_inputs()[1], attention_inputs()[3]
NONE = (None, None)
CALLS = {
    "anchor_attention": [
        (*attention_inputs(), BIAS, None, False, None, LENGTHS, True, 0.25, *NONE, None, True),
        (*attention_inputs(1), BIAS, None, False, *NONE, True, 0.25, *NONE, None, False),
        (*attention_inputs(), None, BIAS.sigmoid(), True, *NONE, True, 0.25, 3, 2.0, BIAS[0], True),
        (*attention_inputs()[:3], None, *NONE, False, *NONE, False, 0.25, *NONE, None, False),
    ],
    "partition_attention": [
        (*attention_inputs(), None, LENGTHS, True, 0.25, *NONE, BIAS[0]),
        (*attention_inputs(1), *NONE, False, 0.25, None, 2.0, None),
    ],
    "segment_mass": [
        (*attention_inputs()[:2], SEGMENTS, 3, None, LENGTHS, True, 0.25, *NONE, None),
    ],
    "blend_logits": [(LOGITS, LOGITS.flip(1).half(), ROW, False), (LOGITS, LOGITS, ROW, True)],
    "sample_logits": [
        (LOGITS, LOGITS.flip(1), ROW, ROW, OFFSETS, ROW, ROW / 9, SEEDS, OFFSETS),
        (LOGITS, None, ROW, ROW, *NONE, None, SEEDS, OFFSETS),
    ],
    "relevance_scores": [(*relevance_inputs(), 0.9, 0.8, "clamp")],
    "select_relevant": [
        (*relevance_inputs(), 0.9, 0.8, "clamp", 0.2, None),
        (*relevance_inputs(), 0.9, 0.8, "exclude", None, 4),
    ],
    "edit_keys": [
        (KEY, ANCHORS, torch.randn(2, 16, 16), None, torch.ones(2)),
        (KEY, ANCHORS, torch.randn(2, 16, 3), torch.randn(2, 3, 16), torch.ones(2)),
    ],
}


def test_every_operator_is_registered():
    public = set(radar_kernels.__all__)
    public -= {"Partition", "Selection", "available_backends", "explain", "merge_partition"}
    assert public == set(CALLS)
    for name in public:
        assert hasattr(torch.ops.radar, name)


@pytest.mark.parametrize(
    ("name", "arguments"), [(name, one) for name, calls in CALLS.items() for one in calls]
)
def test_opcheck(name, arguments):
    torch.library.opcheck(getattr(torch.ops.radar, name).default, arguments)


def compiled(function, *arguments, **features):
    """Result of a compiled public function, checked against eager, for two sizes."""
    torch._dynamo.reset()
    fast = torch.compile(function, fullgraph=True, backend="eager", dynamic=True)
    result, expected = fast(*arguments, **features), function(*arguments, **features)
    torch.testing.assert_close(result, expected, equal_nan=True)
    return fast


@pytest.mark.parametrize(
    "features",
    [
        {"bias": 1.5, "causal": True},
        {"bias": torch.linspace(-1, 2, 4), "key_lengths": LENGTHS, "return_mass": True},
        {"target_mass": 0.4, "mask": torch.ones(2, 9, dtype=torch.bool), "softcap": 3.0},
    ],
    ids=lambda features: " ".join(features),
)
def test_anchor_attention_compiles_to_one_graph(features):
    compiled(anchor_attention, *attention_inputs(), **features)


def test_one_compiled_graph_serves_a_growing_cache():
    fast = compiled(anchor_attention, *attention_inputs(1, 9), bias=1.5, causal=True)
    for keys in (10, 11, 30):
        inputs = attention_inputs(1, keys)
        with torch.compiler.set_stance("fail_on_recompile"):
            out = fast(*inputs, bias=1.5, causal=True)
        expected = anchor_attention(*inputs, bias=1.5, causal=True)
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("features", [{"bias": 1.5}, {"target_mass": 0.5}], ids=str)
def test_gradients_flow_through_a_compiled_call(features):
    query, *others = attention_inputs()

    def loss(query):
        return anchor_attention(query, *others, causal=True, **features).square().sum()

    torch._dynamo.reset()
    # AOTAutograd, as the real backends use it, sees no gradient inside an operator.
    fast = torch.compile(loss, fullgraph=True, backend="aot_eager")
    eager, traced = query.clone().requires_grad_(), query.clone().requires_grad_()
    loss(eager).backward()
    fast(traced).backward()
    torch.testing.assert_close(traced.grad, eager.grad)


def test_the_other_operators_compile_to_one_graph():
    query, key, value, anchors = attention_inputs()

    def merged(query, key, value, anchors):
        return merge_partition(partition_attention(query, key, value, anchors, causal=True), 1.5)

    compiled(merged, query, key, value, anchors)
    compiled(segment_mass, query, key, torch.zeros(2, 9, dtype=torch.int32), 3, causal=True)
    compiled(blend_logits, LOGITS, LOGITS.flip(1), 1.4)
    compiled(sample_logits, LOGITS, LOGITS.flip(1), 1.4, top_k=5, top_p=0.9, seed=3)
    compiled(edit_keys, key, anchors, torch.randn(2, 16, 16), 0.5)
    compiled(relevance_scores, *relevance_inputs())


def test_a_selection_compiles_although_its_size_depends_on_the_data():
    def selected(*inputs):
        return select_relevant(*inputs, threshold=0.2)

    compiled(selected, *relevance_inputs())


def test_a_fresh_process_needs_torch_only():
    """The first call is a compiled one, and neither transformers nor triton is imported."""
    program = """
import sys
import radar_kernels
for name in ("transformers", "sentence_transformers", "networkx", "triton"):
    assert name not in sys.modules, f"radar_kernels imports {name}"
import torch
key = torch.randn(1, 2, 8, 16)
call = (torch.randn(1, 4, 1, 16), key, key, torch.ones(1, 8, dtype=torch.bool))
fast = torch.compile(radar_kernels.anchor_attention, fullgraph=True, backend="eager")
first = fast(*call, bias=1.5)
torch.testing.assert_close(first, radar_kernels.anchor_attention(*call, bias=1.5))
print("served by", radar_kernels.explain("anchor_attention", *call, bias=1.5).chosen)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "served by" in done.stdout
