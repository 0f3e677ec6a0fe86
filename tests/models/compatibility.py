"""Which methods work on which models with which caches: run, compared with an oracle, written down.

    python -m tests.models.compatibility        # writes docs/compatibility.md

Every cell is a greedy generation of a few tokens from two left-padded prompts on a tiny random
model. "works" says that the logits of every step equal those of uncached passes that are computed
without Radar; anything else is what Radar raised before the model ran.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from radar_core import CFG, SEKA, SPA, AttentionBias, TargetMass
from radar_core.methods import Method
from tests.models.oracle import BATCH, GREEDY, Oracle, close_at_every_step, made_up
from tests.models.tiny import (
    FAMILIES,
    REFUSED,
    LosslessQuantizedCache,
    prompts,
    refused_model,
    tiny_model,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
STEPS = 4
TOLERANCE = 2e-4

CACHES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "dynamic": lambda model: {},
    "static": lambda model: {"cache_implementation": "static", "disable_compile": True},
    "quantised": lambda model: {"past_key_values": LosslessQuantizedCache(model.config)},
    "prompt in chunks": lambda model: {"prefill_chunk_size": 5},
    "none": lambda model: {"use_cache": False},
}
OTHER_PROMPT = prompts([6, 4], [[], []], seed=9)
METHODS: dict[str, Callable[[Any], Method]] = {
    "SPA": lambda model: SPA(1.7),
    "CFG": lambda model: CFG(1.7, OTHER_PROMPT["input_ids"], OTHER_PROMPT["attention_mask"]),
    "AttentionBias": lambda model: AttentionBias(2.0),
    'AttentionBias, queries="generated"': lambda model: AttentionBias(2.0, queries="generated"),
    "TargetMass": lambda model: TargetMass(0.3),
    "SEKA": lambda model: SEKA(made_up(model), 1.5, 0.7, least_distance=0.3),
}


@cache
def asked() -> dict[str, Tensor]:
    """Return the prompts: two of them, padded, longer than the tiny models' windows."""
    return prompts(**BATCH)


def cell(model: Any, cache: str, method: Method) -> str:
    """Run one generation and compare every step with the oracle.

    Returns:
        "works", or what was raised.

    Raises:
        AssertionError: the numbers are wrong.
    """
    inputs = dict(asked())
    anchors: Tensor | None = inputs.pop("anchors")
    if method.name == "CFG":
        anchors = None
    try:
        with method.applied_to(model, anchors=anchors):
            out = model.generate(**inputs, **CACHES[cache](model), **GREEDY, max_new_tokens=STEPS)
    except ValueError as refusal:
        return str(refusal).replace(LosslessQuantizedCache.__name__, "QuantizedCache")
    oracle = Oracle(model, method, anchors, inputs["attention_mask"])
    close_at_every_step(out, oracle, inputs["input_ids"].shape[1], TOLERANCE)
    return "works"


def cells(family: str) -> dict[str, dict[str, str]]:
    """Return what came of every method and cache: method -> cache -> "works" or a refusal."""
    model = tiny_model(family)
    return {
        name: {cache: cell(model, cache, make(model)) for cache in CACHES}
        for name, make in METHODS.items()
    }


def refusal(family: str) -> str:
    """Return what is raised for a model that cannot be steered; nothing runs."""
    anchors = torch.zeros(1, 8, dtype=torch.bool)
    anchors[0, 2] = True
    model = refused_model(family)
    try:
        with AttentionBias(2.0).applied_to(model, anchors=anchors):
            pass
    except ValueError as error:
        return str(error)
    raise AssertionError(f"{family} was not refused")


def page(table: Mapping[str, Mapping[str, Mapping[str, str]]], refused: Sequence[str]) -> str:
    """Lay out the page: what is refused becomes numbered notes.

    Args:
        table: family -> method -> cache -> "works" or a refusal.
        refused: what is said of models that cannot be steered.
    """
    notes: list[str] = []

    def note(text: str) -> str:
        if text not in notes:
            notes.append(text)
        return f"[{notes.index(text) + 1}]"

    def summary(caches: Mapping[str, str]) -> str:
        missing = [f"{name} {note(text)}" for name, text in caches.items() if text != "works"]
        return "all" if not missing else "all but " + ", ".join(missing)

    lines = [
        "# Models, caches and methods",
        "",
        "Written by `python -m tests.models.compatibility`; the tests run every cell anew. A",
        "method works with a cache if the logits of every step of a generation from two padded",
        "prompts equal those of uncached passes computed without Radar. The cells say with which",
        f"of these caches: {', '.join(CACHES)}.",
        "The quantised one has transformers' mechanics but rounds nothing, so that its numbers can",
        "be compared.",
        "PASTA, InstABoost and GUIDE are `AttentionBias`, CAD is as CFG, PRISM and AdaSEKA are as",
        "SEKA (AdaSEKA without a prompt in chunks).",
        "",
        "| model | " + " | ".join(METHODS) + " |",
        "| --- " * (1 + len(METHODS)) + "|",
    ]
    for family, methods in table.items():
        lines.append(f"| {family} | " + " | ".join(map(summary, methods.values())) + " |")
    lines += [f"\n[{i}] {text}" for i, text in enumerate(notes, 1)]
    lines += ["", "Refused before anything runs:", ""]
    lines += [f"- {text}" for text in refused]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run every cell and write the page."""
    table = {family: cells(family) for family in tqdm(FAMILIES, unit="family")}
    PAGE.write_text(page(table, [refusal(family) for family in REFUSED]))


if __name__ == "__main__":
    main()
