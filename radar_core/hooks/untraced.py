"""What keeps hooks and their tensors from adding graphs to a compiled model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Hook = TypeVar("Hook", bound=Callable[..., Any])


def untraced(hook: Hook) -> Hook:
    """Mark a hook of the whole model, which torch.compile then leaves alone.

    A model that is compiled in place, or by `generate`, has its forward pass in one graph and its
    hooks around that. Left alone they may look at caches and threads, and add no graph.
    """
    return torch.compiler.disable(hook)


def placed(tensor: Tensor, model: Any) -> Tensor:
    """Return a tensor where the model is, so that no compiled pass moves it; as it is if unknown.

    The weights of a model that is offloaded are nowhere until they are asked for.
    """
    device = model.device
    return tensor if device.type == "meta" else tensor.to(device)
