"""Steered models that `generate` compiles: as many graphs as unsteered ones, the same results."""

from __future__ import annotations

import contextlib

import pytest
import torch
from transformers import CompileConfig

from radar_core import CAD, CFG, SPA, AttentionBias, SecondPrompt, TargetMass
from tests.models.tiny import FAMILIES, prompts, tiny_model

PROMPT = prompts([12, 9], [[3, 4, 7], [2, 3]])
ANCHORS = PROMPT.pop("anchors")
OTHERS = prompts([12, 9], [[5], [4, 5, 6]])["anchors"]
METHODS = {
    "SPA": (SPA(1.4), SPA([3.0, 0.5])),
    "bias": (AttentionBias(2.0), AttentionBias(-1.0)),
    "bias of some": (
        AttentionBias(2.0, layers=[1], heads=[0, 3], queries="generated"),
        AttentionBias(3.0, layers=[1], heads=[2], queries="generated"),
    ),
    "mass": (TargetMass(0.3), TargetMass(0.5)),
    "mass of some": (
        TargetMass(0.3, mode="exact", heads=[1], queries="generated"),
        TargetMass(0.6, mode="exact", heads=[2], queries="generated"),
    ),
}
NEGATIVE = prompts([6, 4], [[], []], seed=9)
# They take no static cache, so that only a model compiled in place serves them.
SECOND_PROMPTS = {
    "CAD": (CAD(0.5), CAD([0.7, 0.2])),
    "CFG": (CFG(1.7, NEGATIVE["input_ids"], NEGATIVE["attention_mask"]), CFG(0.4, [[3, 4, 5]])),
}
graphs = 0


def counting(graph, example_inputs):
    """A backend of torch.compile that runs the graph as it is."""
    global graphs
    graphs += 1
    return graph.forward


@pytest.fixture(autouse=True)
def fresh():
    global graphs
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs = 0
    yield
    torch._dynamo.reset()


def model_of_two_layers(family="Llama"):
    return tiny_model(family, shape=FAMILIES[family] | {"num_hidden_layers": 2})


def run(model, method, anchors, **options):
    """Return the logits of a few greedy steps; no method leaves the model as it is."""
    block = contextlib.nullcontext()
    if method is not None:
        block = method.applied_to(model, None if method.name == "CFG" else anchors)
    with block as steering:
        out = model.generate(
            **PROMPT,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            **({"max_new_tokens": 4} | options),
        )
    if method is not None:
        passes = len(out.logits) + isinstance(method, SecondPrompt)  # which has a prompt more
        assert steering.calls == {0: passes, 1: passes}
    return torch.stack(out.logits)


def graphs_of(model, methods, **options):
    """Return the graphs after each step of a sequence that compiling must not get in the way of.

    The steps are a block, another with new anchors and parameters, a longer answer, and the first
    answer's length again. Whatever follows, the model without a method included, is right too.
    """
    method, other = methods
    longer = {"max_new_tokens": 9}
    steps = [(method, ANCHORS, {}), (other, OTHERS, {}), (method, OTHERS, longer)]
    steps += [(other, ANCHORS, {}), (None, None, {}), (method, ANCHORS, {}), (None, None, longer)]
    expected = [run(model, *step[:2], **step[2], **options, disable_compile=True) for step in steps]
    if "compile_config" not in options:
        model.compile(backend=counting, fullgraph=True)
    counts = []
    for (method, anchors, more), logits in zip(steps, expected, strict=True):
        compiled = run(model, method, anchors, **more, **options)
        torch.testing.assert_close(compiled, logits, atol=1e-4, rtol=0)
        counts.append(graphs)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert counts[5] == counts[4], "compiled again for a method that was compiled before"
    return counts[:4]


def by_generate():
    config = CompileConfig(backend=counting, fullgraph=True, mode=None)
    config._compile_all_devices = True
    return dict(cache_implementation="static", compile_config=config)


@pytest.mark.parametrize("name", [None, "SPA", "bias of some", "mass"])
def test_generate_compiles_the_decoding_step(name):
    """One graph for each length of a static cache, with and without steering."""
    methods = METHODS.get(name, (None, None))
    assert graphs_of(model_of_two_layers(), methods, **by_generate()) == [1, 1, 1, 1]


@pytest.mark.parametrize("name", ["SPA"])
def test_windowed_layers(name):
    """Past the window, where a static cache rolls."""
    methods = METHODS.get(name, (None, None))
    counts = graphs_of(model_of_two_layers("Mistral"), methods, **by_generate())
    assert counts == [2, 2, 2, 2]


@pytest.mark.parametrize("name", list(SECOND_PROMPTS))
def test_a_second_prompt_is_refused_where_generate_compiles(name):
    """By a static cache, before anything runs or is compiled."""
    with pytest.raises(ValueError, match="a second prompt needs a DynamicCache"):
        run(model_of_two_layers(), SECOND_PROMPTS[name][0], ANCHORS, **by_generate())
    assert graphs == 0


def test_another_prompt_adds_no_graph():
    model = model_of_two_layers()
    cache = dict(max_new_tokens=5, **by_generate())
    prompt = prompts([14, 8], [[1, 2], [7]])
    anchors = prompt.pop("anchors")
    for method, _ in METHODS.values():
        before = graphs
        run(model, method, ANCHORS, **(cache | {"max_new_tokens": 6}))
        with method.applied_to(model, anchors):
            model.generate(**prompt, do_sample=False, **(cache | {"max_new_tokens": 4}))
        assert graphs == before + 1
