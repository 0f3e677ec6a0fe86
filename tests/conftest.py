"""The real model and encoder, loaded once for all tests."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest


class Loaded(NamedTuple):
    model: Any
    tokenizer: Any


@pytest.fixture(scope="session")
def smollm2() -> Loaded:
    """SmolLM2-135M-Instruct in float32 with its tokenizer."""
    from radar_core.embedded import load_model, load_tokenizer

    return Loaded(load_model(), load_tokenizer())
