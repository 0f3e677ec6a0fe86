"""What methods print as: the call that made them, in errors and reports too."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import pytest
import torch

from radar_core import CAD, CFG, GUIDE, PASTA, AttentionBias, InstABoost, Steered, TargetMass  # noqa: F401  # by eval
from tests.models.tiny import prompts, tiny_model

CALLS = [
    "PASTA(alpha=0.01)",
    "PASTA(alpha=0.3, heads={1: [0, 2]}, queries='generated', keep_generated=True)",
    "InstABoost(multiplier=3.0)",
    "InstABoost(multiplier=2.0, layers=[-1])",
    "GUIDE(delta=1.5, heads=[0])",
    "CFG(guidance_scale=1.7, negative_prompt_ids=[[5, 6]])",
    "CAD(alpha=0.5)",
    "CAD(alpha=[0.5, 1.0], context=[(2, 9)])",
    "AttentionBias(bias=2.0)",
    "AttentionBias(bias=2.0, queries='generated')",
    "TargetMass(mass=0.3, mode='exact')",
]


@pytest.mark.parametrize("call", CALLS)
def test_a_method_prints_as_the_call_that_made_it(call):
    method = eval(call)
    name = call.partition("(")[0]
    assert repr(method) == call and method.name == name
    for other in (copy.copy(method), copy.deepcopy(method), pickle.loads(pickle.dumps(method))):
        assert other == method and repr(other) == call


def test_a_name_is_no_part_of_the_method():
    named, plain = PASTA(0.1, layers=(1,)), AttentionBias(-math.log(0.1), layers=(1,))
    assert named == plain and hash(named) == hash(plain)
    other = dataclasses.replace(named, bias=1.0)
    assert repr(other) == "AttentionBias(bias=1.0, layers=(1,))"
    assert dataclasses.replace(named) == named
    assert repr(dataclasses.replace(CAD(0.5), strength=2.0)).startswith("SecondPrompt(strength=2.0")


def test_long_arguments_are_cut():
    method = AttentionBias(1.0, heads={layer: list(range(9)) for layer in range(30)})
    assert repr(method).startswith("AttentionBias(bias=1.0, heads={0: [0, 1,")
    assert len(repr(method)) < 240 and repr(method).endswith("...)")
    ids = torch.arange(500)[None]
    assert repr(CFG(2.0, ids)).endswith("...)") and len(repr(CFG(2.0, ids))) < 260


def test_errors_and_reports_name_the_call():
    model, inputs = tiny_model("Llama"), prompts([20], [[5, 6]])
    anchors, ids = inputs["anchors"], inputs["input_ids"]
    steered = Steered(model, method=PASTA(0.3))
    steered.generate(**inputs, max_new_tokens=2)
    assert steered.report().method == "PASTA(alpha=0.3)"
    with (
        InstABoost(3.0).applied_to(model, anchors),
        pytest.raises(RuntimeError, match="already steered by InstABoost in this thread"),
        GUIDE(2.0).applied_to(model, anchors),
    ):
        pass
    with torch.no_grad(), PASTA(0.3).applied_to(model, anchors):
        out = model(ids)
    cache = out["cache"] if "cache" in out else out["past_key_values"]
    with pytest.raises(RuntimeError, match=r"made under PASTA\(alpha=0\.3\) with 2 anchored"):
        model(ids[:, :1], past_key_values=cache)
    with (
        GUIDE(2.0).applied_to(model, anchors),
        pytest.raises(ValueError, match=r"under PASTA\(alpha=0\.3\).*under GUIDE\(delta=2\.0\)"),
    ):
        model(ids[:, :1], past_key_values=cache)
