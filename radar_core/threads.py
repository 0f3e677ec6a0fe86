"""Functions in worker threads, whose errors reach whoever waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["in_thread"]

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a worker thread, as `asyncio.to_thread` does.

    Args:
        function: what is called.
        *arguments: what it is given.

    Returns:
        What it returns.

    Raises:
        RuntimeError: it raised StopIteration, which no future can hold: whoever awaits the thread
            would wait for ever.
        BaseException: whatever else it raised.
    """
    return await asyncio.to_thread(_called, function, *arguments)


def _called(function: Callable[..., T], *arguments: Any) -> T:
    try:
        return function(*arguments)
    except StopIteration as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        raise RuntimeError(
            f"{name} raised StopIteration, as next(...) does at an iterator's end; expected a "
            "result: give the iterator enough to return, or next(...) a default"
        ) from error
