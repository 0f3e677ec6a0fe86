"""Directions of a model's keys, learned from contrastive examples, and their file."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_FORMAT = "radar-key-projections"
_VERSION = "1"
_SUBSPACES = ("positive", "negative", "difference")


@dataclass(frozen=True, eq=False)
class Subspace:
    """Left singular vectors and values of one cross-covariance of keys, for each layer and head.

    Args:
        vectors: float32 [layers, key_heads, head_size, head_size], one direction a column, each
            turned so that the mean key of relevant tokens lies on its positive side.
        values: float32 [layers, key_heads, head_size], falling.
    """

    vectors: Tensor = field(repr=False)
    values: Tensor = field(repr=False)

    def leading(self, index: int, share: float) -> Tensor:
        """Return the projector on the first directions that hold `share` of the values.

        Args:
            index: place of the layer.
            share: of the sum of the singular values, in (0, 1].

        Returns:
            float32 [key_heads, head_size, head_size].
        """
        kept = self.vectors[index] * self._kept(index, share)[:, None]
        return kept @ kept.mT

    def trailing(self, index: int, share: float) -> Tensor:
        """Return the projector on the directions that `leading` leaves out, as it does."""
        rest = self.vectors[index] * ~self._kept(index, share)[:, None]
        return rest @ rest.mT

    def _kept(self, index: int, share: float) -> Tensor:
        """Return which directions come before the sum reaches the share: bool [heads, size]."""
        values = self.values[index]
        before = values.cumsum(1) - values
        return before < share * values.sum(1, keepdim=True)


@dataclass(frozen=True, eq=False)
class Projections:
    """What `radar_core.methods.seka.learn` found in a model's keys, before rotary embedding.

    With H the keys of answer tokens read alone, H+ behind a question they answer and H- behind one
    they do not, the subspaces are those of `H^T H+ / n`, `H^T H- / n` and `H^T (H+ - H-) / n`.

    Args:
        model_type: transformers' name of the model's kind.
        num_layers: layers of the model.
        layers: which of them the tensors describe, in order.
        tokens: number n of answer tokens.
        positive: for SEKA and AdaSEKA.
        negative: for SEKA.
        difference: for PRISM.
        mean_distance: float32 [layers, key_heads], `mean_i ||h+_i - h-_i||`.
        frobenius_distance: float32 [layers, key_heads], `||H+ - H-||_F / n`.

    Raises:
        ValueError: a tensor's shape does not fit, or a layer is none of the model's.
    """

    model_type: str
    num_layers: int
    layers: tuple[int, ...] = field(repr=False)
    tokens: int
    positive: Subspace = field(repr=False)
    negative: Subspace = field(repr=False)
    difference: Subspace = field(repr=False)
    mean_distance: Tensor = field(repr=False)
    frobenius_distance: Tensor = field(repr=False)

    def __post_init__(self) -> None:
        if sorted(set(self.layers)) != list(self.layers) or not self.layers:
            raise ValueError(f"layers is {self.layers}; expected rising indices, at least one")
        if self.layers[0] < 0 or self.layers[-1] >= self.num_layers:
            raise ValueError(f"layers is {self.layers}; expected 0..{self.num_layers - 1}")
        shape = list(self.positive.vectors.shape)
        if len(shape) != 4 or shape[0] != len(self.layers) or shape[2] != shape[3]:
            raise ValueError(
                f"positive.vectors is {shape}; expected [{len(self.layers)}, key heads, head size, "
                "head size], one for each of the layers"
            )
        for name, tensor in self.tensors().items():
            wanted = shape if name.endswith("vectors") else shape[:3]
            wanted = shape[:2] if name.endswith("distance") else wanted
            if list(tensor.shape) != wanted or tensor.dtype != torch.float32:
                raise ValueError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)}; expected float32 {wanted}"
                )
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name} has values that are not finite")

    @property
    def key_heads(self) -> int:
        """Number of key heads of a layer."""
        return self.positive.vectors.shape[1]

    @property
    def head_size(self) -> int:
        """Length of one head's key."""
        return self.positive.vectors.shape[2]

    def index(self, layer: int) -> int:
        """Return a layer's place in the tensors."""
        return self.layers.index(layer)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        found = {}
        for name in _SUBSPACES:
            subspace: Subspace = getattr(self, name)
            found[f"{name}.vectors"] = subspace.vectors
            found[f"{name}.values"] = subspace.values
        found["mean_distance"] = self.mean_distance
        found["frobenius_distance"] = self.frobenius_distance
        return found

    def description(self) -> dict[str, Any]:
        """Return what is not a tensor, ready for JSON."""
        return {
            "model_type": self.model_type,
            "num_layers": self.num_layers,
            "layers": list(self.layers),
            "key_heads": self.key_heads,
            "head_size": self.head_size,
            "tokens": self.tokens,
        }

    def save(self, path: str | PathLike[str]) -> None:
        """Write everything to a safetensors file; `radar_core.methods.seka.load` reads it."""
        write(path, "Projections", {}, [self])

    @functools.cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256(json.dumps(self.description()).encode())
        for tensor in self.tensors().values():
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Projections) and self._digest == other._digest)

    def __hash__(self) -> int:
        return hash(self._digest)


def write(
    path: str | PathLike[str],
    method: str,
    parameters: Mapping[str, Any],
    projections: list[Projections],
) -> None:
    """Write projections, and the method that uses them, to a safetensors file.

    Args:
        path: where to.
        method: name of the method, or "Projections" for none.
        parameters: the method's own, ready for JSON.
        projections: one, or one for each expert.
    """
    from safetensors.torch import save_file

    tensors = {
        f"{place}.{name}": tensor.contiguous().clone()
        for place, one in enumerate(projections)
        for name, tensor in one.tensors().items()
    }
    metadata = {
        "format": _FORMAT,
        "version": _VERSION,
        "method": method,
        "parameters": json.dumps(parameters),
        "projections": json.dumps([one.description() for one in projections]),
    }
    save_file(tensors, path, metadata)


def read(path: str | PathLike[str]) -> tuple[str, dict[str, Any], list[Projections]]:
    """Read what `write` wrote.

    Returns:
        The method's name, its parameters, and the projections.

    Raises:
        ValueError: it is no such file, or its tensors are not those that it says it holds.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise ValueError(f"path is {str(path)!r}, which is no file; expected saved projections")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from None
    kind = metadata.get("format"), metadata.get("version")
    if kind != (_FORMAT, _VERSION):
        raise ValueError(
            f"{path} has format {kind[0]!r} and version {kind[1]!r}; expected {_FORMAT!r} and "
            f"{_VERSION!r}, as `save` writes them"
        )
    described = json.loads(metadata["projections"])
    projections = [_one(path, place, says, tensors) for place, says in enumerate(described)]
    return metadata["method"], json.loads(metadata["parameters"]), projections


def _one(
    path: str | PathLike[str], place: int, says: dict[str, Any], tensors: dict[str, Tensor]
) -> Projections:
    """Put one of a file's projections together, and check it against what the file says."""
    parts = {}
    names = [f"{name}.{part}" for name in _SUBSPACES for part in ("vectors", "values")]
    for name in [*names, "mean_distance", "frobenius_distance"]:
        if f"{place}.{name}" not in tensors:
            raise ValueError(f"{path} lacks the tensor {place}.{name}")
        parts[name] = tensors[f"{place}.{name}"]
    try:
        made = Projections(
            model_type=says["model_type"],
            num_layers=says["num_layers"],
            layers=tuple(says["layers"]),
            tokens=says["tokens"],
            **{
                name: Subspace(parts[f"{name}.vectors"], parts[f"{name}.values"])
                for name in _SUBSPACES
            },
            mean_distance=parts["mean_distance"],
            frobenius_distance=parts["frobenius_distance"],
        )
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} does not hold what it says: {error}") from None
    if made.description() != says:
        raise ValueError(
            f"{path} says {says}, but its tensors are of {made.description()}; expected them alike"
        )
    return made
