"""Files that name attention heads, as PASTA's authors publish them."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path

from radar_core.checks import is_whole
from radar_core.methods.method import Heads, Layers


def read_heads(path: str | PathLike[str]) -> tuple[Heads, Layers]:
    """Read the heads to steer from a JSON file.

    Args:
        path: the file: an object from layer to heads, `{"18": [23], "10": [12, 7]}`, or a list of
            layers, all of whose heads are meant.

    Returns:
        The heads by layer and None; or, for a list, None and the layers.

    Raises:
        ValueError: there is no such file, or it holds something else.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"heads is {str(path)!r}, which is no file; expected a JSON file of heads")
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"heads is {str(path)!r}, which is no JSON: {error}") from None
    if isinstance(found, dict) and all(map(_are_indices, found.values())):
        layers = {name: heads for name, heads in found.items() if heads}
        if layers and all(name.isdecimal() for name in layers):
            return {int(name): tuple(heads) for name, heads in layers.items()}, None
    if isinstance(found, list) and found and _are_indices(found):
        return None, tuple(found)
    shown = json.dumps(found)
    raise ValueError(
        f"heads is {str(path)!r}, which holds {shown[:60]}{'...' if len(shown) > 60 else ''}; "
        'expected layers and their heads, {"18": [23], "10": [12, 7]}, or a list of layers'
    )


def _are_indices(values: object) -> bool:
    return isinstance(values, list) and all(is_whole(value) and value >= 0 for value in values)
