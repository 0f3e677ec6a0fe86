"""Whatever a policy or a selector is made of, changing it changes how it is described."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radar_core.discussion.baselines import DebatePolicy
from radar_core.discussion.settings import described
from radar_core.methods import SPA
from radar_core.policies import (
    AgentRadarPolicy,
    Compaction,
    FullContext,
    Importance,
    RCRRouter,
    RoleProfile,
)
from radar_core.relevance import Attention, Combined, Dense, Lexical, Mentions, Relevance
from tests.models.tiny import tiny_model


class Encoder:
    """Stands for an encoder of one's own."""

    def __init__(self, size: int) -> None:
        self.size = size

    def encode(self, texts: list[str]) -> np.ndarray:
        return np.ones((len(texts), self.size))


class Tokenizer:
    """Stands for a tokenizer of one's own."""

    def __init__(self, name: str) -> None:
        self.name_or_path = name

    def encode(self, text: str) -> list[str]:
        return text.split()

    def decode(self, ids: list[int]) -> str:
        return ""


class Foreign(Tokenizer):
    """Of another library, so that its attributes are not looked at."""


Foreign.__module__ = "transformers.tokens"


def attention(**changes: Any) -> Attention:
    options = dict(model=model("one"), tokenizer=Foreign("one")) | changes
    return Attention(options.pop("model"), options.pop("tokenizer"), **options)


@functools.cache
def model(name: str) -> Any:
    made = tiny_model("Llama")
    made.name_or_path = name
    return made


# By class: how one is made, and for every parameter other values than the one it is made with.
CHANGES: dict[type, tuple[Callable[..., Any], dict[str, list[Any]]]] = {
    AgentRadarPolicy: (
        AgentRadarPolicy,
        {
            "encoder": ["folder/of/one", Encoder(2), Encoder(3), Relevance(language="de")],
            "selector": [Lexical(), Dense(), attention(), attention(layers=[1])],
            "method": [SPA(strength=1.4), SPA(strength=1.5)],
            "spatial_decay": [0.5],
            "temporal_decay": [0.5],
            "threshold": [0.1],
            "top_k": [3],
            "anchor_query": [False],
            "self_policy": ["exclude"],
            "appended": [True],
        },
    ),
    FullContext: (FullContext, {"neighbours_only": [True]}),
    DebatePolicy: (DebatePolicy, {"revision": ["Again."]}),
    Compaction: (
        Compaction,
        {
            "max_new_tokens": [7],
            "keep_last": [2],
            "threshold": [1],
            "tokenizer": [Tokenizer("one"), Foreign("one"), Foreign("two")],
        },
    ),
    RCRRouter: (
        RCRRouter,
        {
            "encoder": ["folder/of/one", Encoder(2), Encoder(3)],
            "hard": [False],
            "method": [SPA(strength=1.4)],
            "anchor_query": [True],
            "importance": [Importance(gamma=0.5)],
            "base_budget": [100],
            "roles": [{}, {"writer": RoleProfile(3)}],
            "default_role": [RoleProfile(2)],
            "stages": [{}],
            "item_tokens": [5],
            "near_duplicate": [0.5],
            "tokenizer": [Tokenizer("one"), Foreign("one"), Foreign("two")],
        },
    ),
    Relevance: (
        Relevance,
        {"encoder": ["folder/of/one", Encoder(2), Encoder(3)], "language": ["de"]},
    ),
    Dense: (Dense, {"relevance": ["folder/of/one", Encoder(2)], "title": [True]}),
    Lexical: (Lexical, {"language": ["de"], "title": [True]}),
    Combined: (
        lambda **changes: Combined(**{"selectors": [Lexical()], **changes}),
        {
            "selectors": [[Dense()], [(Lexical(), 2.0), Dense()], [attention()]],
            "by": ["rank"],
        },
    ),
    Mentions: (
        lambda **changes: Mentions(**{"selector": Lexical(), **changes}),
        {"selector": [Dense(), attention()], "best": [2], "weight": [0.5]},
    ),
    Attention: (
        attention,
        {
            "model": [model("two")],
            "tokenizer": [Foreign("two")],
            "layers": [[0], [1], [0, 1]],
            "heads": [[0], {1: [0]}],
            "baseline_query": ["Nothing"],
            "template": [{"enable_thinking": False}],
            "language": ["de"],
        },
    ),
}


@pytest.mark.parametrize("kind", CHANGES, ids=lambda kind: kind.__name__)
def test_every_parameter_is_told(kind: type):
    make, changes = CHANGES[kind]
    assert list(changes) == list(inspect.signature(kind).parameters)
    told = [described(make())]
    told += [described(make(**{name: value})) for name in changes for value in changes[name]]
    texts = [json.dumps(one, sort_keys=True) for one in told]
    assert len(set(texts)) == len(texts)
    assert described(make()) == told[0] and " at 0x" not in "".join(texts)


def test_no_policy_and_no_selector_is_left_out():
    import radar_core.policies
    import radar_core.relevance

    exported = {
        getattr(module, name)
        for module in (radar_core.policies, radar_core.relevance)
        for name in module.__all__
    }
    found = {
        one
        for one in exported
        if hasattr(one, "context") or hasattr(one, "similarities") or one is Relevance
    } - {radar_core.policies.Policy, radar_core.relevance.Selector}
    assert found | {DebatePolicy} == set(CHANGES)


def test_an_encoder_that_has_been_loaded_is_the_same():
    relevance = Relevance()
    before = described(relevance)
    relevance.embed(["a text"])
    assert described(relevance) == before == described(Relevance("all-MiniLM-L6-v2"))


def made(word: str) -> Callable[[str], bool]:
    def holds(text: str) -> bool:
        return word in text

    return holds


def one(text: str, *, word: str = "") -> bool:
    return text == word


def functions() -> list[Any]:
    """Functions that do different things, some of one name."""
    return [
        lambda text: text + "a",
        lambda text: text + "b",
        lambda text: text.upper(),
        lambda text: text.lower(),
        lambda text, end="a": text + end,
        lambda text, end="b": text + end,
        lambda text: text in {"alpha", "beta", "gamma"},
        lambda text: [part for part in text if part == "a"],
        lambda text: [part for part in text if part == "b"],
        made("a"),
        made("b"),
        one,
        functools.partial(one, word="a"),
        functools.partial(one, word="b"),
        functools.partial(one, "a"),
        functools.partial(made("a")),
        Encoder(2).encode,
        Encoder(3).encode,
        re.compile("a").search,
        re.compile("b").search,
        re.compile("b", re.IGNORECASE).search,
        len,
        str.upper,
    ]


def test_functions_of_one_name_are_told_apart():
    texts = [json.dumps(described(one), sort_keys=True) for one in functions()]
    assert len(set(texts)) == len(texts)
    assert texts == [json.dumps(described(one), sort_keys=True) for one in functions()]
    assert described(one) == "tests.discussion.test_settings.one" and described(len)
    assert " at 0x" not in "".join(texts)


def test_functions_are_described_alike_in_every_process():
    program = (
        "import json; from tests.discussion.test_settings import *;"
        "print(json.dumps([described(one) for one in functions()]))"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1]


def test_arrays_and_number_formats_are_told_apart():
    numbers = np.arange(6.0)
    values = [
        numbers,
        numbers.astype(np.float32),
        numbers.reshape(2, 3),
        numbers[::-1],
        torch.arange(6.0),
        torch.arange(6.0).bfloat16(),
        torch.arange(1.0, 7.0).bfloat16(),
        torch.arange(6.0).to_sparse(),
        torch.nn.Parameter(torch.ones(2)),
        np.float32(1),
        np.float32(2),
        torch.float16,
        torch.float32,
        torch.device("cpu"),
        torch.device("meta"),
    ]
    texts = [json.dumps(described(one), sort_keys=True) for one in values]
    assert len(set(texts)) == len(texts)
    assert texts == [json.dumps(described(copy.deepcopy(one)), sort_keys=True) for one in values]
