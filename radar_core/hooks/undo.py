"""Taking changes back whatever happens: an error, Ctrl-C, or Ctrl-C once more."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from typing import Any

_SIGNALS = signal.valid_signals()


class Undo:
    """Steps that take changes back.

    A step is noted before its change is made, so it must be harmless when there is nothing to take
    back, and when it runs twice.
    """

    def __init__(self) -> None:
        self._steps: list[Callable[[], Any]] = []

    def add(self, step: Callable[..., Any], *arguments: Any) -> None:
        """Note a step; the last one noted runs first."""
        self._steps.append(functools.partial(step, *arguments))

    def run(self) -> None:
        """Run every step that has not run yet, go on if one raises, and raise that at the end."""
        try:
            self._run()
        except BaseException:
            self._run()
            raise

    def _run(self) -> None:
        raised: BaseException | None = None
        while self._steps:
            for _ in range(2):  # once more where something from outside interrupted it
                try:
                    self._steps[-1]()
                    break
                except BaseException as error:
                    raised = raised or error
            self._steps.pop()
        if raised is not None:
            raise raised


def uninterrupted(act: Callable[[], None]) -> None:
    """Run something with the handlers of signals, such as Ctrl-C's, put off until it is done."""
    if threading.current_thread() is not threading.main_thread():
        act()  # handlers only ever run on the main thread
        return
    came: list[int] = []

    def put_off(number: int, frame: Any) -> None:
        came.append(number)

    handlers = Undo()
    try:
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                handlers.add(signal.signal, number, handler)
                signal.signal(number, put_off)
        act()
    finally:
        handlers.run()
        for missed in came:
            signal.raise_signal(missed)
