"""Every public operator names an argument of the wrong type, what came and what was expected."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

import radar_kernels

ROWS = torch.ones(2, 3)
KEYS = torch.ones(1, 2, 5, 4)
ANCHORS = torch.tensor([[True, False, False, True, False]])
ATTENTION = {
    "query": torch.ones(1, 2, 1, 4),
    "key": KEYS,
    "value": KEYS,
    "anchors": ANCHORS,
    "mask": torch.ones(1, 5, dtype=torch.bool),
    "key_lengths": torch.tensor([5]),
    "sinks": torch.zeros(2),
}
RELEVANCE = {
    "sentences": ROWS,
    "queries": ROWS,
    "sender": torch.tensor([0, 1]),
    "round": torch.tensor([0, 1]),
    "hops": torch.ones(2, 2, dtype=torch.int64),
    "now": torch.tensor([2, 2]),
}
# A call that works, then its arguments that are numbers, with what each must not be.
CALLS = {
    "anchor_attention": (
        ATTENTION,
        {"bias": "2", "target_mass": [0.5], "scale": "1", "window": 1.5, "softcap": [1.0]},
    ),
    "partition_attention": (ATTENTION, {"scale": "1"}),
    "segment_mass": (
        {name: ATTENTION[name] for name in ("query", "key", "mask", "key_lengths", "sinks")}
        | {"segments": torch.zeros(1, 5, dtype=torch.int32), "num_segments": 2},
        {"num_segments": 1.5, "scale": "1"},
    ),
    "edit_keys": (
        {"key": KEYS, "anchors": ANCHORS, "projection": torch.ones(2, 4, 4), "gain": 0.5},
        {"gain": "1"},
    ),
    "blend_logits": ({"full": ROWS, "masked": ROWS, "strength": 1.5}, {"strength": [1.0, 2.0]}),
    "sample_logits": (
        {"full": ROWS, "masked": ROWS},
        {
            "strength": "1",
            "temperature": [1.0],
            "top_k": 1.5,
            "top_p": "0.9",
            "min_p": [0.1],
            "seed": 0.5,
            "offset": True,
        },
    ),
    "relevance_scores": (RELEVANCE, {"spatial_decay": "0.9", "temporal_decay": [0.9]}),
    "select_relevant": (RELEVANCE, {"threshold": "0.6", "top_k": 1.5, "spatial_decay": "0.9"}),
}


def test_every_operator_is_here():
    public = {
        name for name in radar_kernels.__all__ if inspect.isfunction(getattr(radar_kernels, name))
    }
    assert set(CALLS) == public - {"available_backends", "explain", "merge_partition"}


@pytest.mark.parametrize("name", CALLS)
def test_what_should_be_a_tensor(name):
    operator, (arguments, _) = getattr(radar_kernels, name), CALLS[name]
    operator(**arguments)
    for argument in (name for name, value in arguments.items() if torch.is_tensor(value)):
        for wrong in (arguments[argument].tolist(), arguments[argument].numpy(), 2):
            with pytest.raises(ValueError, match=rf"^{argument} (is|are) .*; expected a"):
                operator(**arguments | {argument: wrong})


@pytest.mark.parametrize("name", CALLS)
def test_what_should_be_a_number(name):
    operator, (arguments, wrong) = getattr(radar_kernels, name), CALLS[name]
    for argument, value in wrong.items():
        for given in (value, True):
            with pytest.raises(ValueError, match=rf"^{argument} is .*; expected a"):
                operator(**arguments | {argument: given})


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("anchor_attention", "bias"),
        ("anchor_attention", "target_mass"),
        ("edit_keys", "gain"),
        ("blend_logits", "strength"),
        ("sample_logits", "temperature"),
    ],
)
def test_what_should_be_a_tensor_of_numbers(name, argument):
    operator, (arguments, _) = getattr(radar_kernels, name), CALLS[name]
    operator(**arguments | {argument: torch.tensor(0.5)})
    with pytest.raises(ValueError, match=rf"^{argument} is a tensor of torch.bool; expected one"):
        operator(**arguments | {argument: torch.tensor(True)})


def test_numbers_of_numpy_are_numbers():
    blended = radar_kernels.blend_logits(ROWS, 2 * ROWS, np.float32(1.5))
    assert torch.equal(blended, radar_kernels.blend_logits(ROWS, 2 * ROWS, 1.5))
    kept = radar_kernels.sample_logits(ROWS, top_k=np.int64(2), seed=np.int32(3))
    assert torch.equal(kept, radar_kernels.sample_logits(ROWS, top_k=2, seed=3))


def test_parts_of_a_projection_and_of_a_partition():
    call = CALLS["edit_keys"][0]
    for wrong in ("P", (torch.ones(2, 4, 4),), (1, 2, 3)):
        with pytest.raises(ValueError, match=r"^(projection|U) is .*; expected a"):
            radar_kernels.edit_keys(**call | {"projection": wrong})
    with pytest.raises(ValueError, match=r"^partition is tuple; expected what partition_attention"):
        radar_kernels.merge_partition((KEYS, KEYS, KEYS, KEYS))
