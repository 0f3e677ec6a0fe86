"""What all commands of ``radar`` share: their errors, their tables and the model they load."""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch
    from rich.console import Console

__all__ = [
    "DType",
    "Debug",
    "Device",
    "Json",
    "Weights",
    "chosen_device",
    "chosen_dtype",
    "new_console",
    "one_line_errors",
    "print_json",
    "quiet_libraries",
]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Debug = Annotated[
    bool,
    typer.Option("--debug", envvar="RADAR_DEBUG", help="Show tracebacks instead of one line."),
]


class DType(StrEnum):
    """Number format of the model's weights."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


Device = Annotated[
    str, typer.Option(metavar="DEVICE", help="Any torch device, such as cpu or cuda.")
]
Weights = Annotated[
    DType,
    typer.Option(
        metavar="DTYPE",
        help="Of the weights: float32, bfloat16, or auto, what is faster on the device.",
    ),
]


@contextmanager
def one_line_errors(context: typer.Context, debug: bool) -> Iterator[None]:
    """Turn what bad input raises into one line on stderr and exit code 2.

    Args:
        context: of the command; its options are called in the error what the user calls them.
        debug: raise as it is instead.
    """
    try:
        yield
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        if debug or context.obj:
            raise
        message = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            message = f"{error.filename}: {error.strerror}"
        # Not through rich, which would wrap the line and read brackets as markup.
        message = _with_flags(" ".join(message.split()), context) or type(error).__name__
        typer.echo(f"radar: error: {message}", err=True)
        raise typer.Exit(2) from None


def _with_flags(message: str, context: typer.Context) -> str:
    """Call arguments what they are called on the command line, as in "top_k must be ..."."""
    flags = {
        option.name: option.opts[0]
        for option in context.command.params
        if option.name and option.opts[0].startswith("--")
    }
    names = "|".join(flags)
    return re.sub(rf"^({names})\b(?!=)|\b({names})=", lambda m: flags[m[1] or m[2]], message)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep other libraries' advice and progress bars out of the command's own output."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    # ASCII, so that half of a surrogate pair in a conversation cannot fail to print.
    typer.echo(json.dumps(value, indent=2))


def new_console(width: int = 120) -> Console:
    """Return a rich console on standard output that prints text as it is.

    Args:
        width: in columns, where standard output is no terminal.
    """
    from rich.console import Console

    # Without a terminal rich would take 80 columns, too few for a sentence beside its figures.
    known = sys.stdout.isatty()
    return Console(markup=False, highlight=False, width=None if known else width)


def chosen_device(name: str) -> torch.device:
    """Return a torch device by its name.

    Raises:
        ValueError: it cannot be used here.
    """
    import torch

    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"--device {name!r} cannot be used here: {reason}") from None
    return device


def chosen_dtype(dtype: DType, device: torch.device) -> torch.dtype:
    """Return the format of the weights; auto is bfloat16 where the hardware computes in it."""
    import torch

    if dtype is not DType.auto:
        return getattr(torch, dtype.value)
    fast = device.type == "cuda" or (
        device.type == "cpu" and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    )
    return torch.bfloat16 if fast else torch.float32
