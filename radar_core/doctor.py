"""What this installation can do, and why it cannot do the rest."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import radar_kernels
from radar_core import embedded
from radar_kernels import native

__all__ = ["OPERATOR_CALLS", "OperatorReport", "Report", "examine"]

DISTRIBUTIONS = (
    "radar-kernels",
    "torch",
    "transformers",
    "numpy",
    "triton",
    "sentence-transformers",
    "sentencex",
    "networkx",
    "accelerate",
    "gguf",
)
SETTINGS = ("RADAR_BACKEND", "RADAR_CACHE", "OMP_NUM_THREADS", "TRITON_INTERPRET")


def _attention(device: torch.device) -> dict[str, Any]:
    """One decode step: one query token, 8 query heads on 2 key-value heads, 64 keys."""
    return {
        "query": torch.zeros(1, 8, 1, 64, device=device),
        "key": torch.zeros(1, 2, 64, 64, device=device),
        "value": torch.zeros(1, 2, 64, 64, device=device),
        "anchors": torch.arange(64, device=device)[None] < 8,
    }


def _segments(device: torch.device) -> dict[str, Any]:
    call = _attention(device)
    segments = torch.zeros(1, 64, dtype=torch.int32, device=device)
    return {"query": call["query"], "key": call["key"], "segments": segments, "num_segments": 1}


def _logits(device: torch.device) -> dict[str, Any]:
    full = torch.zeros(1, 64, device=device)
    return {"full": full, "masked": full, "strength": 1.4}


def _relevance(device: torch.device) -> dict[str, Any]:
    place = torch.zeros(4, dtype=torch.int64, device=device)
    return {
        "sentences": torch.zeros(4, 16, device=device),
        "queries": torch.zeros(1, 16, device=device),
        "sender": place,
        "round": place,
        "hops": torch.ones(1, 1, dtype=torch.int64, device=device),
        "now": torch.ones(1, dtype=torch.int64, device=device),
    }


def _keys(device: torch.device) -> dict[str, Any]:
    call = _attention(device)
    projection = torch.zeros(2, 64, 64, device=device)
    return {
        "key": call["key"],
        "anchors": call["anchors"],
        "projection": projection,
        "gain": 1.0,
    }


# The call that each operator is asked about: a typical one, small enough to build anywhere.
OPERATOR_CALLS: dict[str, Callable[[torch.device], dict[str, Any]]] = {
    "anchor_attention": lambda device: {**_attention(device), "bias": 1.0},
    "partition_attention": _attention,
    "segment_mass": _segments,
    "blend_logits": _logits,
    "sample_logits": _logits,
    "relevance_scores": _relevance,
    "select_relevant": _relevance,
    "edit_keys": _keys,
}


@dataclass(frozen=True)
class OperatorReport:
    """Which implementation of one operator would run on one kind of device.

    Args:
        operator: its public name in radar_kernels.
        device: "cpu", "cuda" or "mps".
        runs: the backend that a typical call would take; None if none can, see `problem`.
        others: every other backend, and why it would not run.
        problem: why the question could not be answered, such as a wrong RADAR_BACKEND.
    """

    operator: str
    device: str
    runs: str | None
    others: dict[str, str] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True)
class Report:
    """What :func:`examine` found.

    Args:
        versions: by distribution, None where it is not installed; Python first.
        machine: operating system, processor features and threads.
        devices: the torch devices, described.
        operators: one report per operator and kind of device.
        embedded: for the embedded model and encoder, where it is or what to do to get it.
        settings: environment variables that change what Radar does, None where unset.
    """

    versions: dict[str, str | None]
    machine: dict[str, str]
    devices: dict[str, str]
    operators: list[OperatorReport]
    embedded: dict[str, str]
    settings: dict[str, str | None]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON-ready dicts, lists and strings."""
        return asdict(self)


def examine() -> Report:
    """Find out what this installation can do; nothing is computed, loaded or changed.

    Returns:
        Versions, devices, the backend of every operator with the reasons against the others, and
        whether the embedded model and encoder are there. A part that is missing or broken is
        reported, never raised.
    """
    devices = _devices()
    kinds = list(dict.fromkeys(name.partition(":")[0] for name in devices))
    with _silent_fallbacks():
        operators = [_operator(name, kind) for name in OPERATOR_CALLS for kind in kinds]
    return Report(
        {"python": platform.python_version(), **{name: _version(name) for name in DISTRIBUTIONS}},
        {
            "system": platform.platform(),
            "cpu capability": torch.backends.cpu.get_cpu_capability(),
            "C++ operators": _native(),
            "cpu threads": f"{torch.get_num_threads()} of {os.cpu_count()} logical processors",
        },
        devices,
        operators,
        {
            f"model {embedded.MODEL_NAME}": _place(embedded.gguf_file),
            f"encoder {embedded.ENCODER_NAME}": _place(embedded.encoder_folder),
            "cache": str(embedded.cache_folder()),
        },
        {name: os.environ.get(name) for name in SETTINGS},
    )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        # Run from a checkout that is not installed, Radar still knows its own version.
        return radar_kernels.__version__ if distribution == "radar-kernels" else None


def _native() -> str:
    """The instruction set of the C++ operators, or why they are absent and what to do."""
    reason = native.absent()
    if reason is not None:
        return f"absent: {reason}"
    return f"built for {torch.ops.radar_cpp.instruction_set()}"


def _devices() -> dict[str, str]:
    devices = {"cpu": platform.processor() or platform.machine()}
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        devices[f"cuda:{index}"] = (
            f"{found.name}, {found.total_memory / 2**30:.0f} GiB, "
            f"compute capability {found.major}.{found.minor}"
        )
    if torch.backends.mps.is_available():
        devices["mps"] = "Apple GPU"
    return devices


def _operator(name: str, kind: str) -> OperatorReport:
    known = radar_kernels.available_backends(name)
    try:
        explanation = radar_kernels.explain(name, **OPERATOR_CALLS[name](torch.device(kind)))
    except (ValueError, RuntimeError) as error:
        return OperatorReport(name, kind, None, problem=str(error))
    preferred = f"it could, but {explanation.chosen!r} comes first; backend= asks for it"
    others = {
        backend: absent or explanation.refused.get(backend) or preferred
        for backend, absent in known.items()
        if backend != explanation.chosen
    }
    return OperatorReport(name, kind, explanation.chosen, others)


def _place(find: Callable[[], Any]) -> str:
    try:
        return str(find())
    except ImportError as error:
        return str(error)


@contextmanager
def _silent_fallbacks() -> Any:
    logger = logging.getLogger("radar_kernels")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
