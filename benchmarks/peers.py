"""The released packages that compete, through the calls that they offer."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks.discussion import anchored_texts, first_run

# In the PASTA that both sides compute: as the paper's, on few heads of every layer.
ALPHA = 0.01
HEADS_A_LAYER = 2


def absent() -> dict[str, str]:
    """Return the packages that cannot take part here, and why."""
    reasons = {}
    for name, version in (("anchoring", "0.1.0"), ("pastalib", "0.1.3")):
        if importlib.util.find_spec(name) is None:
            reasons[name] = f"it is not installed: pip install --no-deps {name}=={version}"
    if "pastalib" not in reasons:
        try:
            pasta_class()
        except Exception as error:  # whatever an old package does on new ones
            reasons["pastalib"] = f"it cannot be imported: {type(error).__name__}: {error}"
    return reasons


# -- anchoring -------------------------------------------------------------------------------------


def anchoring_processor(case: Any, strength: float) -> Any:
    """Build the released SPA package's logits processor with the settings nearest to SPA.

    It finds the anchors as text and puts one placeholder in the place of each, so its second
    prompt is shorter than the first. A processor keeps its cache and serves one `generate` only.

    Args:
        case: the work.
        strength: of SPA.

    Returns:
        An `anchoring.SPALogitsProcessor`.

    Raises:
        ValueError: the tokenizer does not give back the prompt's tokens for its text.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from anchoring import SPALogitsProcessor, format_spa_input

    def encode(text: str) -> Tensor:
        return case.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids

    if not torch.equal(encode(case.prompt.text), case.prompt.input_ids):
        raise ValueError("the tokenizer does not give back the prompt's tokens for its text")
    placeholder = case.tokenizer.mask_token or "MASKTOKEN"
    _, replaced = format_spa_input(
        case.prompt.text,
        anchored_texts(case.tokenizer, case.prompt, case.anchors),
        placeholder,
        whole_word_only=False,
    )
    return SPALogitsProcessor(
        aux_model=case.model,
        aux_input_ids=encode(replaced),
        mask_token=placeholder,
        strength=strength,
        modulated_by_prob=False,
        tokenizer=case.tokenizer,
        use_attention_mask=True,
    )


# -- pastalib --------------------------------------------------------------------------------------


def pasta_class() -> Any:
    """Import pastalib's class; all that it wants of `datasets`, undeclared, is two types' names.

    Raises:
        ImportError: it is not installed.
    """
    if "pastalib.pasta" not in sys.modules and importlib.util.find_spec("datasets") is None:
        datasets = types.ModuleType("datasets")
        datasets.arrow_dataset = types.SimpleNamespace(Dataset=dict)  # type: ignore[attr-defined]
        datasets.dataset_dict = types.SimpleNamespace(DatasetDict=list)  # type: ignore[attr-defined]
        sys.modules["datasets"] = datasets
        try:
            importlib.import_module("pastalib.pasta")
        finally:
            del sys.modules["datasets"]  # others ask whether there is one
    return importlib.import_module("pastalib.pasta").PASTA


def knows(model: Any) -> bool:
    """Whether pastalib can steer a model: it knows a few classes by name."""
    try:
        steering = pasta_class()(model, None, {})
    except ValueError:
        return False
    return steering.model_name in steering.ATTN_MODULE_NAME


def pasta_heads(model: Any) -> dict[int, tuple[int, ...]]:
    """Return the heads that PASTA steers, by layer: other ones in each, as profiled heads are."""
    config = model.config
    count = config.num_attention_heads
    return {
        layer: tuple(
            sorted((layer + i * count // HEADS_A_LAYER) % count for i in range(HEADS_A_LAYER))
        )
        for layer in range(config.num_hidden_layers)
    }


@contextmanager
def pastalib(case: Any) -> Iterator[Any]:
    """Steer a model as pastalib does, on the eager attention that it needs.

    It finds what to highlight as text, one span for each prompt, since several accumulate: every
    token stands for a word of its own here.

    Args:
        case: the work; only the first run of its anchors is highlighted.

    Yields:
        The steered model.
    """
    model, ids = case.model, case.prompt.input_ids
    words = [f"w{place}" for place in range(case.prompt.tokens)]
    starts = [0]
    for word in words:
        starts.append(starts[-1] + len(word) + 1)
    offsets = [(start, start + len(word)) for start, word in zip(starts, words, strict=False)]
    places = first_run(case.anchors)[0].nonzero()[:, 0].tolist()
    span = " ".join(words[places[0] : places[-1] + 1])
    heads = {str(layer): list(chosen) for layer, chosen in pasta_heads(model).items()}
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        steering = pasta_class()(model, None, heads, alpha=ALPHA, scale_position="exclude")
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        rows = ids.shape[0]
        with steering.apply_steering(
            model, [" ".join(words)] * rows, [span] * rows, inputs, [offsets] * rows
        ) as steered:
            yield steered
    finally:
        model.set_attn_implementation(before)
