"""Taking turns on a model: for those that share one without having been told to."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["turn"]

_lock = threading.Lock()
_turns: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()


@contextmanager
def turn(model: Any) -> Iterator[None]:
    """Hold a model until the block ends; others that ask for a turn in other threads wait.

    It keeps batches of a discussion and selectors that read with the same model out of each other's
    way. Steered blocks, which a person enters, do not wait: they raise where a model is taken.

    Args:
        model: the model itself, not what wraps it.
    """
    with _lock:
        mine = _turns.setdefault(model, threading.RLock())
    with mine:
        yield
