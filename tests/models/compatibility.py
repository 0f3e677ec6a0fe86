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

from radar_core import SPA, AttentionBias, TargetMass
from radar_core.methods import Method
from tests.models.tiny import (
    FAMILIES,
    REFUSED,
    biased_logits,
    eager_twin,
    full_logits,
    hidden_logits,
    prompts,
    refused_model,
    targeted_logits,
    tiny_model,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
STEPS = 4
TOLERANCE = 2e-4
STRENGTH, BIAS, MASS = 1.7, 2.0, 0.3

CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "prompt in chunks": {"prefill_chunk_size": 5},
    "none": {"use_cache": False},
}
METHODS: dict[str, Method] = {
    "SPA": SPA(STRENGTH),
    "AttentionBias": AttentionBias(BIAS),
    'AttentionBias, queries="generated"': AttentionBias(BIAS, queries="generated"),
    "TargetMass": TargetMass(MASS),
}
Oracle = Callable[[Any, Any, Tensor, Tensor, Tensor], Tensor]


def _spa(model: Any, twin: Any, ids: Tensor, mask: Tensor, anchors: Tensor) -> Tensor:
    full, hidden = full_logits(model, ids, mask), hidden_logits(model, ids, mask, anchors)
    return STRENGTH * full + (1 - STRENGTH) * hidden


def _bias(
    model: Any, twin: Any, ids: Tensor, mask: Tensor, anchors: Tensor, first: int = 0
) -> Tensor:
    config = model.config
    every = torch.full((config.num_attention_heads,), BIAS)
    layers = dict.fromkeys(range(config.num_hidden_layers), every)
    return biased_logits(twin, ids, mask, anchors, layers, first)


def _generated(model: Any, twin: Any, ids: Tensor, mask: Tensor, anchors: Tensor) -> Tensor:
    return _bias(model, twin, ids, mask, anchors, mask.shape[1] - 1)


def _target(model: Any, twin: Any, ids: Tensor, mask: Tensor, anchors: Tensor) -> Tensor:
    return targeted_logits(twin, ids, mask, anchors, MASS)


ORACLES: dict[str, Oracle] = dict(zip(METHODS, (_spa, _bias, _generated, _target), strict=True))


@cache
def asked() -> dict[str, Tensor]:
    """Return the prompts: two of them, padded, longer than the tiny models' windows."""
    return prompts([23, 17], [[3, 4, 5, 12, 20], [2, 9, 10]])


def cell(model: Any, twin: Any, cache: str, method: str) -> str:
    """Run one generation and compare every step with the oracle.

    Returns:
        "works", or what was raised.

    Raises:
        AssertionError: the numbers are wrong.
    """
    inputs = dict(asked())
    anchors = inputs.pop("anchors")
    mask, length = inputs["attention_mask"], inputs["input_ids"].shape[1]
    try:
        with METHODS[method].applied_to(model, anchors=anchors):
            out = model.generate(
                **inputs,
                **CACHES[cache],
                do_sample=False,
                max_new_tokens=STEPS,
                output_logits=True,
                return_dict_in_generate=True,
            )
    except ValueError as refusal:
        return str(refusal)
    for step, logits in enumerate(out.logits):
        ids = out.sequences[:, : length + step]
        expected = ORACLES[method](model, twin, ids, mask, anchors)
        error = float((logits.float() - expected).abs().max())
        assert error < TOLERANCE, f"{method}, {cache} cache, step {step}: off by {error:.1e}"
    return "works"


def cells(family: str) -> dict[str, dict[str, str]]:
    """Return what came of every method and cache: method -> cache -> "works" or a refusal."""
    model = tiny_model(family)
    twin = eager_twin(model)
    return {m: {c: cell(model, twin, c, m) for c in CACHES} for m in METHODS}


def refusal(family: str) -> str:
    """Return what is raised for a model that cannot be steered; nothing runs."""
    anchors = torch.zeros(1, 8, dtype=torch.bool)
    anchors[0, 2] = True
    model = refused_model(family)
    try:
        with AttentionBias(BIAS).applied_to(model, anchors=anchors):
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
        "PASTA, InstABoost and GUIDE are `AttentionBias`.",
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
