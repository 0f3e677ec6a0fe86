"""The models that are measured: a small real one, a shape with random weights, or the caller's."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

# Weights are random: what counts is how many bytes a step reads. Two layers are for trying out.
QWEN = "Qwen2.5-0.5B-shaped"
SHAPES = {QWEN: 24, f"{QWEN}-2-layers": 2}


class Loaded(NamedTuple):
    """A model to measure.

    Args:
        model: in evaluation mode; nothing ends its replies early.
        tokenizer: its tokenizer; None for random weights.
        label: how rows name it.
    """

    model: Any
    tokenizer: Any
    label: str


def load(name: str | None, dtype: torch.dtype) -> Loaded:
    """Load a model.

    Args:
        name: one of `SHAPES`, a transformers model name or folder, or None for the embedded
            SmolLM2-135M-Instruct.
        dtype: of the weights.

    Returns:
        The model.
    """
    if name in SHAPES:
        return Loaded(shaped(SHAPES[name], dtype), None, name)
    from radar_core.embedded import load as load_embedded

    model, tokenizer = load_embedded(name, dtype=dtype)
    return Loaded(_endless(model), tokenizer, Path(name).name if name else "SmolLM2-135M")


@cache
def shaped(layers: int, dtype: torch.dtype) -> Any:
    """Return a model of Qwen2.5-0.5B's shape with seeded random weights.

    Args:
        layers: 24 for the real shape; fewer also make the vocabulary and the layers small.
        dtype: of the weights.

    Returns:
        The model.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    whole = layers == 24
    config = Qwen2Config(
        vocab_size=151936 if whole else 512,
        hidden_size=896,
        intermediate_size=4864 if whole else 896,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    with torch.inference_mode(False):
        model = Qwen2ForCausalLM(config).to(dtype).eval()
    return _endless(model)


def _endless(model: Any) -> Any:
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = model.generation_config.pad_token_id or 0
    return model
