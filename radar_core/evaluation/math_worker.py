"""Comparing mathematics by math-verify in a process of its own, which can be ended.

Some answers would be computed for longer than anybody waits (9^{9^{9^9}}), in code that no
exception and no signal handler gets into, and math-verify's own limits are signals, which only the
main thread may set. So this file is run as a program too: it reads a line for each question from
its standard input and writes one for each answer, and ends itself when one takes too long.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

__all__ = ["LIMIT_SECONDS", "equal"]

LIMIT_SECONDS = 5.0  # as long as math-verify gives each of its steps
_MEMORY_BYTES = 4 << 30
_READY = b"ready\n"


def equal(prediction: str, answer: str) -> bool | None:
    """Compare the mathematics in a text with an answer; any thread may.

    Args:
        prediction: the text.
        answer: the answer, LaTeX without dollar signs.

    Returns:
        Whether they are equal; None if the text holds no mathematics. What fails, or takes longer
        than `LIMIT_SECONDS` or 4 GiB, is not equal.

    Raises:
        RuntimeError: the process cannot be started.
    """
    return _WORKER.equal(prediction, answer)


class _Worker:
    """The process, started when first needed, and again after it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def equal(self, prediction: str, answer: str) -> bool | None:
        question = json.dumps([prediction, answer]).encode() + b"\n"
        with self._lock:
            process = self._started()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(question)
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                line = b""
            except BaseException:  # Ctrl-C: the answer must not be taken for the next one's
                self._end()
                raise
            if not line.endswith(b"\n"):  # it has ended itself
                self._end()
                return False
            return json.loads(line)

    def _started(self) -> subprocess.Popen[bytes]:
        # A forked process must not share the pipes of the one it came from.
        if self._process is not None and self._owner == os.getpid():
            if self._process.poll() is None:
                return self._process
            self._end()
        process = subprocess.Popen(
            # Without the folder of this file in sys.path: its statistics.py is not Python's.
            [sys.executable, "-P", __file__, str(LIMIT_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
        )
        self._process, self._owner = process, os.getpid()
        assert process.stdout is not None
        try:
            ready = process.stdout.readline() == _READY
        except BaseException:
            self._end()
            raise
        if not ready:
            self._end()
            raise RuntimeError(
                f"the process that compares mathematics ended at once, with {process.returncode}; "
                f"to see why, run: {sys.executable} -P {__file__} 5"
            )
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # half a question that nobody reads any more
                pipe.close()


def _equal(prediction: str, answer: str) -> bool | None:
    from math_verify import parse, verify

    found = parse(prediction, parsing_timeout=None)
    if not found:
        return None
    right = parse(f"${answer}$", parsing_timeout=None)
    return bool(verify(right, found, timeout_seconds=None))


def _serve(limit: float) -> None:
    import faulthandler
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the other process's to answer
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # whatever is printed is no answer
    _limit_memory()
    _equal(r"$\frac{1}{2}$", "1")  # so that everything is loaded
    answers.write(_READY)
    for line in sys.stdin.buffer:
        # It ends the process from a thread without Python in it, so in the midst of a power too.
        faulthandler.dump_traceback_later(limit, exit=True, file=nowhere)
        answer: Any
        try:
            answer = _equal(*json.loads(line))
        except Exception:
            answer = False
        faulthandler.cancel_dump_traceback_later()
        answers.write(json.dumps(answer).encode() + b"\n")


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    least = _MEMORY_BYTES if most == resource.RLIM_INFINITY else min(_MEMORY_BYTES, most)
    resource.setrlimit(resource.RLIMIT_AS, (least, most))


_WORKER = _Worker()

if __name__ == "__main__":
    _serve(float(sys.argv[1]))
