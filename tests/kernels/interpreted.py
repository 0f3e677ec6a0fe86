"""What the tests of Triton kernels share: Triton's interpreter in a process of its own.

Triton decides at import whether it interprets, so in an ordinary run such a file has one test that
runs the others in a process of their own. ``TRITON_INTERPRET=1 pytest FILE`` runs them directly.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def run_interpreted(file: str) -> None:
    """Runs a test file in a process where Triton interprets.

    Args:
        file: its path.

    Raises:
        AssertionError: a test failed, or none ran.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", file],
        # Tensors are small here, and other tests run beside: more threads would only wait.
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout


def explains_itself_without_triton(folder: str) -> None:
    """Imports a Triton backend in a process that has no Triton.

    Args:
        folder: of the operator.

    Raises:
        AssertionError: it does not import, or does not say what to install.
    """
    program = (
        "import sys; sys.modules['triton'] = None\n"
        f"from radar_kernels.{folder} import triton\n"
        "print(triton.absent())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 'pip install "radar-kernels[triton]"' in done.stdout


@contextmanager
def quick_device_functions() -> Iterator[None]:
    """Spares the interpreter from patching all of Triton's language in each device function.

    Once is enough; the patches of the first kernel stay, so one must have run.
    """
    from triton.runtime.interpreter import InterpretedFunction

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            InterpretedFunction,
            "__call__",
            lambda function, *values, **named: function.rewrite()(*values, **named),
        )
        yield


@contextmanager
def counted(name: str) -> Iterator[list[int]]:
    """Counts the interpreter's calls of one builder method.

    Args:
        name: such as "create_dot".

    Yields:
        A list whose one element is the number so far.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    method, count = getattr(InterpreterBuilder, name), [0]

    def counting(*arguments: Any, **named: Any) -> Any:
        count[0] += 1
        return method(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, name, counting)
        yield count


@contextmanager
def never_read(*forbidden: Tensor) -> Iterator[None]:
    """Asserts that no load touches some memory.

    Args:
        forbidden: views of what may not be read.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    bytes_of = [
        numpy.unique(one.data_ptr() + _offsets(one) * one.element_size()) for one in forbidden
    ]
    addresses = numpy.sort(numpy.concatenate(bytes_of).astype(numpy.uint64))
    load = InterpreterBuilder.create_masked_load

    def guarded(builder: Any, pointers: Any, mask: Any, *others: Any, **named: Any) -> Any:
        read = pointers.data[mask.data.astype(bool)].astype(numpy.uint64)
        near = addresses[numpy.searchsorted(addresses, read).clip(max=len(addresses) - 1)]
        assert not (near == read).any(), "read what may not be read"
        return load(builder, pointers, mask, *others, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", guarded)
        yield


def _offsets(tensor: Tensor) -> Any:
    places = numpy.zeros(1, dtype=numpy.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = (places[:, None] + numpy.arange(size) * stride).reshape(-1)
    return places
