"""What an object is made of, as JSON, to tell whether two runs have the same settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from radar_core.topology import Topology

__all__ = ["described"]

_DEEPEST = 12


def described(value: Any, depth: int = 0) -> Any:
    """Describe a value so that equal settings give equal JSON, in every process.

    Numbers, str, None, mappings and sequences stay what they are; a function is its name; any other
    object is the name of its class with what its `settings` hold, if it has them, else its
    dataclass fields or its attributes, without private ones and without those that are objects of
    other libraries (of which only the class is told).

    Args:
        value: anything.
        depth: how deep it lies in another value.

    Returns:
        JSON.
    """
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
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    parts = {name: described(part, depth + 1) for name, part in _parts(value).items()}
    return {"class": type(value).__qualname__, **parts}


def _parts(value: Any) -> dict[str, Any]:
    settings = getattr(value, "settings", None)
    if isinstance(settings, Mapping):
        return dict(settings)
    if dataclasses.is_dataclass(value):
        names = [one.name for one in dataclasses.fields(value)]
    elif _is_foreign(value):
        return {}
    else:
        names = list(getattr(value, "__dict__", {}))
    return {name: getattr(value, name) for name in names if not name.startswith("_")}


def _is_foreign(value: Any) -> bool:
    """Whether an object is so large, or so much another library's, that its class has to do."""
    libraries = {"torch", "transformers", "tokenizers", "sentence_transformers", "numpy", "openai"}
    return any(kind.__module__.split(".")[0] in libraries for kind in type(value).__mro__)
