"""Steered models compiled in place: as many graphs as unsteered ones, the same results."""

from __future__ import annotations

import pytest
import torch

from radar_core import SPA, Steered
from tests.models.test_compile import (
    ANCHORS,
    METHODS,
    PROMPT,
    SECOND_PROMPTS,
    counting,
    fresh,
    graphs_of,
    model_of_two_layers,
)

__all__ = ["fresh"]


@pytest.mark.parametrize("name", ["bias of some"])
def test_a_model_compiled_in_place_with_a_static_cache(name):
    methods = METHODS.get(name, (None, None))
    counts = graphs_of(model_of_two_layers(), methods, cache_implementation="static")
    assert counts == [2, 2, 2, 2]


@pytest.mark.parametrize("name", [None, "SPA", "CAD", "CFG"])
def test_a_model_compiled_in_place_with_a_growing_cache(name):
    """The prompt, the first step and one graph for all others, whatever the answer's length.

    A second prompt of another length adds none: it runs as it is, before the first.
    """
    methods = (METHODS | SECOND_PROMPTS).get(name, (None, None))
    assert graphs_of(model_of_two_layers(), methods) == [3, 3, 3, 3]


def test_beams_and_embeddings_on_a_compiled_model():
    model, plain = model_of_two_layers(), model_of_two_layers()
    model.compile(backend=counting, fullgraph=True)
    embeds = model.get_input_embeddings()(PROMPT["input_ids"]).detach()
    for options in (dict(num_beams=2, **PROMPT), dict(inputs_embeds=embeds)):
        options |= dict(anchors=ANCHORS, max_new_tokens=4, do_sample=False)
        expected = Steered(plain, method=SPA(2.0)).generate(**options)
        assert torch.equal(Steered(model, method=SPA(2.0)).generate(**options), expected)
