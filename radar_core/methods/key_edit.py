"""What methods that edit the keys of anchored tokens have in common."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, ClassVar

import torch
from torch import Tensor

from radar_core.checks import is_number
from radar_core.methods.method import (
    LARGEST,
    Layers,
    Method,
    check_indices,
    resolve,
)
from radar_core.methods.projections import Projections, write


@dataclass(frozen=True)
class KeyEdit(Method):
    """Edit the keys of anchored tokens, once, before they are rotated and cached."""

    # Whether `edit` is given the query of the prompt's last token.
    needs_query: ClassVar[bool] = False

    _placed: dict[tuple[int, torch.device], tuple[Tensor, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    @abstractmethod
    def learned(self) -> tuple[Projections, ...]:
        """The projections that the method uses, all of one model."""

    @property
    @abstractmethod
    def steered_layers(self) -> tuple[int, ...]:
        """The layers whose keys are edited, in order."""

    @abstractmethod
    def edit(self, layer: int, key: Tensor, anchors: Tensor, query: Tensor | None) -> Tensor:
        """Return edited keys.

        Args:
            layer: index of the layer.
            key: [B, key_heads, n, head_size] before rotary embedding.
            anchors: bool [B, n].
            query: [B, heads, head_size], of the prompt's last token, before rotary embedding; None
                unless `needs_query`.

        Returns:
            New keys, the same bits where nothing is anchored.
        """

    def parameters(self) -> dict[str, Any]:
        """Return the method's numbers, ready for JSON."""
        found: dict[str, Any] = {}
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if is_number(value):
                found[one.name] = value
            elif one.name == "layers":
                found[one.name] = None if value is None else list(value)
        return found

    def save(self, path: str | PathLike[str]) -> None:
        """Write the method and its projections to a safetensors file, which `seka.load` reads.

        Args:
            path: where to.
        """
        write(path, type(self).__name__, self.parameters(), list(self.learned))

    @abstractmethod
    def tensors(self, layer: int) -> tuple[Tensor, ...]:
        """Return what a layer's edit needs, on the CPU."""

    def placed(self, layer: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return what a layer's edit needs on a device; it is made when first asked for."""
        key = (layer, device)
        if key not in self._placed:
            self._placed[key] = tuple(tensor.to(device) for tensor in self.tensors(layer))
        return self._placed[key]


def check_projections(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is what `learn` returns."""
    if not isinstance(value, Projections):
        raise ValueError(
            f"{name} is a {type(value).__name__}; expected Projections, from "
            "radar_core.methods.seka.learn(...) or load(...)"
        )


def check_range(name: str, value: Any, low: float, high: float) -> None:
    """Raise ValueError unless `value` is a number from `low` to `high`."""
    if not is_number(value) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}; expected a number from {low:g} to {high:g}")


def check_gain(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a number that half precision can bear."""
    check_range(name, value, -LARGEST, LARGEST)


def chosen_layers(projections: Projections, layers: Layers) -> tuple[int, ...]:
    """Return the layers to steer: those asked for, or all that the projections describe.

    Raises:
        ValueError: one of them is none of the model's, or nothing was learned for it.
    """
    check_indices("layers", layers)
    if layers is None:
        return projections.layers
    chosen = sorted(resolve("layers", layers, projections.num_layers))
    missing = sorted(set(chosen) - set(projections.layers))
    if missing:
        raise ValueError(
            f"layers names {missing}, but the projections were learned for layers "
            f"{list(projections.layers)}; choose among these, or learn the others too"
        )
    return tuple(chosen)
