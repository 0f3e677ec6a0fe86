"""Which implementation of an operator runs, and why the others do not.

An implementation is a module ``radar_kernels.<folder>.<backend>``. It has one function per
operator, ``unsupported(arguments)`` where it cannot serve every call (the reason, or None), and
``absent()`` where it does not run on every machine (the reason, or None).

``backend="..."`` never falls back: it runs or raises. Without it the first implementation that
can serve the call runs, and what a better one lacked is logged once to the logger
``radar_kernels``. The environment variable ``RADAR_BACKEND`` puts one backend in front of that
order, for every operator that has it.
"""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_logger = logging.getLogger("radar_kernels")


@dataclass(frozen=True, slots=True)
class _Operator:
    folder: str
    entry: str
    backends: tuple[str, ...]  # in order of preference


_OPERATORS = {
    "anchor_attention": _Operator(
        "anchor_attention", "run", ("triton", "cpp", "sdpa", "reference")
    ),
    "partition_attention": _Operator(
        "partition_attention", "run", ("triton", "cpp", "sdpa", "reference")
    ),
    "segment_mass": _Operator("segment_mass", "run", ("triton", "cpp", "reference")),
    "blend_logits": _Operator("logit_blend", "blend", ("triton", "cpp", "reference")),
    "sample_logits": _Operator("logit_blend", "sample", ("triton", "cpp", "reference")),
    "relevance_scores": _Operator("relevance", "scores", ("triton", "cpp", "reference")),
    "select_relevant": _Operator("relevance", "select", ("triton", "cpp", "reference")),
    "edit_keys": _Operator("key_edit", "run", ("triton", "cpp", "reference")),
}
# Automatic choice considers these on one kind of device only; by name they may run elsewhere
# (Triton's interpreter).
_HOME = {"triton": "cuda", "cpp": "cpu"}
_WITHOUT_GRADIENTS = frozenset({"triton", "cpp"})
_logged: set[tuple[str, str, str]] = set()


@dataclass(frozen=True)
class Explanation:
    """What would run a call, and why nothing else would.

    Args:
        operator: name of the operator.
        chosen: the backend that would run.
        refused: the backends that come before it, and those that could not serve the call, each
            with the reason.
    """

    operator: str
    chosen: str
    refused: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{self.operator} runs on {self.chosen!r}"]
        lines += [f"  not {name!r}: {reason}" for name, reason in self.refused.items()]
        return "\n".join(lines)


def available_backends(op: str | Callable) -> dict[str, str | None]:
    """Lists the implementations of an operator on this machine.

    Args:
        op: a public operator or its name, such as ``"anchor_attention"``.

    Returns:
        For each backend, in order of preference, None if it can run here or the reason why not.

    Raises:
        ValueError: ``op`` is no operator of this package.
    """
    name = _name_of(op)
    return {backend: _absence(name, backend) for backend in _OPERATORS[name].backends}


def explain(op: str | Callable, *args: Any, **kwargs: Any) -> Explanation:
    """Says which implementation would run a call, without running it.

    Args:
        op: a public operator or its name.
        args: the arguments the operator would be called with.
        kwargs: its keyword arguments, ``backend`` included.

    Returns:
        The chosen backend and the reason of each that was refused; printable.

    Raises:
        ValueError: the call is invalid, or the backend asked for cannot serve it.
    """
    name = _name_of(op)
    backend = kwargs.pop("backend", None)
    api = import_module(f"radar_kernels.{_OPERATORS[name].folder}.api")
    arguments = getattr(api, f"prepare_{name}")(*args, **kwargs)
    if backend is not None:
        _implementation(name, backend, arguments)
        return Explanation(name, backend, {})
    chosen, refused = "", {}
    first = os.environ.get("RADAR_BACKEND")
    for candidate in _order(name, first):
        reason = _refusal(name, candidate, arguments, by_name=candidate == first)
        if reason is not None:
            refused[candidate] = reason
        elif not chosen:
            chosen = candidate
    return Explanation(name, chosen, refused)


def choose(operator: str, arguments: Any, backend: str | None = None) -> Callable:
    """Finds the implementation of one call.

    Args:
        operator: name of the operator.
        arguments: its validated arguments, a dataclass with slots and a ``device``.
        backend: None for the automatic choice, or the one that must run.

    Returns:
        The function to call with ``arguments``.

    Raises:
        ValueError: ``backend`` is unknown or cannot serve the call; the text says why.
    """
    if backend is not None:
        return _implementation(operator, backend, arguments)
    first = os.environ.get("RADAR_BACKEND")
    device = arguments.device.type
    refused: dict[str, str] = {}
    for candidate in _order(operator, first):
        by_name = candidate == first
        if not by_name and _HOME.get(candidate, device) != device:
            continue
        reason = _refusal(operator, candidate, arguments, by_name=by_name)
        if reason is None:
            if refused:
                _log_once(operator, candidate, refused, first)
            return getattr(_module(operator, candidate), _OPERATORS[operator].entry)
        refused[candidate] = reason
    raise ValueError(
        f"no backend of {operator} can serve this call: "
        + "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    )


def needs_gradient(arguments: Any) -> bool:
    """Says whether autograd would record this call.

    Args:
        arguments: validated arguments, a dataclass with ``__slots__``.

    Returns:
        True if a tensor among the arguments requires a gradient in grad mode, or carries a tangent
        in forward mode.
    """
    return records_gradient(*(getattr(arguments, name) for name in arguments.__slots__))


def records_gradient(*given: Any) -> bool:
    """Says whether autograd would record a call with these arguments.

    Args:
        given: any values.

    Returns:
        As ``needs_gradient``.
    """
    if torch.is_grad_enabled() and any(
        isinstance(one, Tensor) and one.requires_grad for one in given
    ):
        return True
    return has_tangent(*given)


def has_tangent(*given: Any) -> bool:
    """Says whether one of these values carries a forward-mode tangent.

    Args:
        given: any values.

    Returns:
        True for tensors inside ``torch.func.jvp`` or ``torch.autograd.forward_ad``.
    """
    return forward_ad._current_level >= 0 and any(
        isinstance(one, Tensor) and forward_ad.unpack_dual(one).tangent is not None for one in given
    )


def _implementation(operator: str, backend: str, arguments: Any) -> Callable:
    known = _OPERATORS[operator]
    if backend not in known.backends:
        raise ValueError(
            f"backend={backend!r} is not one of {operator}'s backends: {', '.join(known.backends)}"
        )
    reason = _refusal(operator, backend, arguments, by_name=True)
    if reason is not None:
        raise ValueError(
            f"backend={backend!r} cannot serve this call of {operator}: {reason}. "
            "Leave backend out to let another one serve it"
        )
    return getattr(_module(operator, backend), known.entry)


def _name_of(op: str | Callable) -> str:
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if name not in _OPERATORS:
        raise ValueError(f"op is {name!r}; the operators are {', '.join(_OPERATORS)}")
    return name


@lru_cache
def _order(operator: str, first: str | None) -> tuple[str, ...]:
    backends = _OPERATORS[operator].backends
    if not first:
        return backends
    known = {name for one in _OPERATORS.values() for name in one.backends}
    if first not in known:
        raise ValueError(
            f"RADAR_BACKEND is {first!r}; expected one of {', '.join(sorted(known))}, or unset it"
        )
    if first not in backends:
        return backends
    return (first, *(name for name in backends if name != first))


@lru_cache
def _module(operator: str, backend: str) -> ModuleType:
    return import_module(f"radar_kernels.{_OPERATORS[operator].folder}.{backend}")


@lru_cache
def _absence(operator: str, backend: str) -> str | None:
    if find_spec(f"radar_kernels.{_OPERATORS[operator].folder}.{backend}") is None:
        return "this installation does not contain it"
    absent = getattr(_module(operator, backend), "absent", None)
    return None if absent is None else absent()


@lru_cache
def _unsupported(operator: str, backend: str) -> Callable | None:
    return getattr(_module(operator, backend), "unsupported", None)


def _refusal(operator: str, backend: str, arguments: Any, *, by_name: bool) -> str | None:
    home = _HOME.get(backend)
    if home is not None and not by_name and arguments.device.type != home:
        return f"it is chosen by itself for {home} tensors only, these are on {arguments.device}"
    if (reason := _absence(operator, backend)) is not None:
        return reason
    if backend in _WITHOUT_GRADIENTS and needs_gradient(arguments):
        return "it computes no gradients, and an input requires one (torch.no_grad() turns it off)"
    unsupported = _unsupported(operator, backend)
    return None if unsupported is None else unsupported(arguments)


def _log_once(operator: str, chosen: str, refused: Mapping[str, str], first: str | None) -> None:
    for backend, reason in refused.items():
        key = (operator, backend, chosen)
        if key not in _logged:
            _logged.add(key)
            # A backend that is missing or was asked for is news; one that leaves this kind of
            # call to another is the design.
            news = backend == first or _absence(operator, backend) is not None
            level = logging.WARNING if news else logging.INFO
            _logger.log(level, "%s runs on %r, not %r: %s", operator, chosen, backend, reason)
