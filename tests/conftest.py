"""The real model and encoder, loaded once for all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
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


@pytest.fixture(autouse=True, scope="session")
def ctrl_c() -> Iterator[None]:
    """Ctrl-C interrupts, also where the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
