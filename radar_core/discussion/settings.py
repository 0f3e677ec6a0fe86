"""What an object is made of, as JSON, to tell whether two runs have the same settings."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import math
import re
from collections.abc import Callable, Mapping
from pathlib import PurePath
from types import CodeType, ModuleType
from typing import Any

from radar_core.topology import Topology

__all__ = ["described"]

_DEEPEST = 12


def described(value: Any, depth: int = 0) -> Any:
    """Describe a value so that equal settings give equal JSON, in every process.

    Numbers, str, None, mappings and sequences stay what they are. A function is its name, with what
    it does and what it has been given if others may have the same name: a lambda, a function made
    in another, a method, a partial. Of an array a digest is told, and of other libraries' objects
    the class, with the name of the model or tokenizer. Any other object is the name of its class
    with what its `settings` hold, if it has them, else its dataclass fields or its attributes,
    without private ones.

    Args:
        value: anything.
        depth: how deep it lies in another value.

    Returns:
        JSON.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # for which JSON has nothing
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if depth > _DEEPEST:
        return type(value).__qualname__
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): described(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [described(item, depth + 1) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((described(item, depth + 1) for item in value), key=repr)
    if isinstance(value, Topology):
        return {"agents": list(value.agents), "edges": [list(edge) for edge in value.edges]}
    if isinstance(value, functools.partial):
        parts = {"partial": value.func, "arguments": value.args, "keywords": value.keywords}
        return described(parts, depth)
    if isinstance(value, re.Pattern):
        return {"class": "Pattern", "pattern": str(value.pattern), "flags": value.flags}
    if callable(value) and hasattr(value, "__qualname__"):
        return described(_function(value), depth)
    parts = {name: described(part, depth + 1) for name, part in _parts(value).items()}
    return {"class": type(value).__qualname__, **parts}


def _parts(value: Any) -> dict[str, Any]:
    settings = getattr(value, "settings", None)
    if isinstance(settings, Mapping):
        return dict(settings)
    if dataclasses.is_dataclass(value):
        names = [one.name for one in dataclasses.fields(value)]
    elif _is_foreign(value):
        return _foreign(value)
    else:
        names = list(getattr(value, "__dict__", {}))
    return {name: getattr(value, name) for name in names if not name.startswith("_")}


def _is_foreign(value: Any) -> bool:
    """Whether an object is so large, or so much another library's, that its class has to do."""
    libraries = {"torch", "transformers", "tokenizers", "sentence_transformers", "numpy", "openai"}
    return any(kind.__module__.split(".")[0] in libraries for kind in type(value).__mro__)


def _function(function: Callable[..., Any]) -> str | dict[str, Any]:
    """Tell a function's name, with what tells it from others that have the same name."""
    name = f"{getattr(function, '__module__', None)}.{function.__qualname__}"
    told: dict[str, Any] = {}
    owner = getattr(function, "__self__", None)
    if owner is not None and not isinstance(owner, ModuleType):
        told["of"] = owner
    plain = inspect.unwrap(function)
    code = getattr(plain, "__code__", None)
    if isinstance(code, CodeType) and ("<lambda>" in name or "<locals>" in name):
        told["does"] = hashlib.sha256(_code(code).encode()).hexdigest()[:16]
        told["defaults"] = [plain.__defaults__, plain.__kwdefaults__]
        told["given"] = dict(inspect.getclosurevars(plain).nonlocals)
    return {"function": name, **told} if told else name


def _code(code: CodeType) -> str:
    """Write what a function does, alike in every process: without addresses, files and lines."""
    return repr((code.co_code.hex(), code.co_names, [_constant(one) for one in code.co_consts]))


def _constant(value: Any) -> str:
    if isinstance(value, CodeType):
        return _code(value)
    if isinstance(value, tuple | frozenset):
        parts = [_constant(one) for one in value]
        return repr(parts if isinstance(value, tuple) else sorted(parts))
    return repr(value)


def _foreign(value: Any) -> dict[str, Any]:
    """Tell what can be told of another library's object without its weights."""
    if hasattr(value, "detach") and hasattr(value, "dtype"):
        return _array(value.detach().cpu())
    if hasattr(value, "tobytes"):
        return _array(value)
    if type(value).__name__ in ("dtype", "device"):
        return {"name": str(value)}
    name = getattr(value, "name_or_path", None)
    if not name and hasattr(value, "modules"):  # a SentenceTransformer has the model inside
        inner = (getattr(module, "name_or_path", None) for module in value.modules())
        name = next((one for one in inner if one), None)
    return {"name": name} if isinstance(name, str) and name else {}


def _array(value: Any) -> dict[str, Any]:
    kind = str(value.dtype)
    if kind == "torch.bfloat16":  # unknown to numpy
        value = value.float()
    try:
        content = (value.numpy() if hasattr(value, "numpy") else value).tobytes()
    except (RuntimeError, TypeError, NotImplementedError):  # no numbers that can be read: sparse
        content = b""
    digest = hashlib.sha256(content).hexdigest()[:16]
    return {"dtype": kind, "shape": list(value.shape), "sha256": digest}
