"""What a decoding step does on the host: it reads nothing from the device, and keeps nothing."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache

from tests.models.oracle import ANCHORS, INPUTS, METHODS
from tests.models.tiny import FAMILIES, tiny_model

READS = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "_unique2"}


class NoReads(TorchDispatchMode):
    """Raises where a value is read from a device, which no CUDA graph can do."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        assert name not in READS, f"{name} reads from the device"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2"])
def test_a_decoding_step_reads_nothing_from_the_device(method, family):
    model = tiny_model(family, "eager" if family == "Gemma2" else "sdpa")
    token = INPUTS["input_ids"][:, -1:]
    for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=32)):
        with torch.no_grad(), method.applied_to(model, ANCHORS):
            model(**INPUTS, past_key_values=cache, logits_to_keep=1)
            model(token, past_key_values=cache)
            with NoReads():
                model(token, past_key_values=cache)
    with pytest.raises(AssertionError, match="reads from the device"), NoReads():
        bool(token.any())


def held(model, method, cache):
    """Return what is held after 200, 600 and 1,000 tokens.

    That is the bytes of what this package has made and kept in pieces of more than 256, such as a
    long list, and the number of Python's blocks of memory. Small pieces are not weighed: torch
    leaves some hundred strings of 18 characters behind where the blend calls it, now more and now
    fewer whatever the number of tokens, which looked like ten bytes a token to `tracemalloc`.
    """
    token, weighed = INPUTS["input_ids"][:, -1:], []
    ours = tracemalloc.Filter(True, "*/radar_*")
    with torch.no_grad(), method.applied_to(model, ANCHORS):
        model(**INPUTS, past_key_values=cache, logits_to_keep=1)
        tracemalloc.start()
        for steps in (200, 400, 400):
            for _ in range(steps):
                model(token, past_key_values=cache)
            gc.collect()
            blocks = sys.getallocatedblocks()
            traces = tracemalloc.take_snapshot().filter_traces([ours]).traces
            weighed.append((sum(one.size for one in traces if one.size > 256), blocks))
            del traces
        tracemalloc.stop()
    return weighed


@pytest.mark.parametrize("method", METHODS[:1] + METHODS[2:4])
def test_memory_stays_constant_over_a_thousand_tokens(method):
    shape = FAMILIES["Llama"] | {"num_hidden_layers": 1, "max_position_embeddings": 2048}
    model, cache = tiny_model("Llama", shape=shape), DynamicCache()
    size, blocks = zip(*held(model, method, cache), strict=True)
    assert cache.get_seq_length() == 1020
    # A list of the tokens would grow by more each time; what is only made once would not.
    assert min(after - before for before, after in pairwise(size)) < 400 * 4, size
    # An object kept for each token would be as many blocks.
    assert min(after - before for before, after in pairwise(blocks)) < 200, blocks
