"""A small random model that reads and writes text."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from tests.models.tiny import SHAPE, tiny_model


class Small(NamedTuple):
    model: Any
    tokenizer: Any


@pytest.fixture(scope="package")
def small() -> Small:
    """A random Llama of three layers with SmolLM2's tokenizer."""
    from radar_core.embedded import load_tokenizer

    tokenizer = load_tokenizer()
    shape = SHAPE | {"head_dim": 16, "vocab_size": len(tokenizer), "max_position_embeddings": 400}
    model = tiny_model("Llama", shape=shape)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return Small(model, tokenizer)
