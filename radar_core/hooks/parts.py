"""The modules of a model that steering looks at, found in one walk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Parts:
    """A model and what is found in it.

    Args:
        model: a transformers causal language model.
        config: its text decoder's configuration.
        modules: all its modules, itself the first.
        attention: the text decoder's self-attention modules in layer order.
    """

    model: Any
    config: Any
    modules: tuple[nn.Module, ...]
    attention: tuple[nn.Module, ...]

    @classmethod
    def of(cls, model: Any) -> Parts:
        """Walk through a model."""
        config = model.config.get_text_config(decoder=True)
        modules = tuple(model.modules())
        attention = tuple(module for module in modules if is_attention(module, type(config)))
        return cls(model, config, modules, attention)

    @property
    def name(self) -> str:
        """The model's class, as errors name it."""
        return type(self.model).__name__


def is_attention(module: Any, config: type) -> bool:
    """Whether a module is the self-attention of a layer whose configuration is of a class."""
    return (
        "Attention" in type(module).__name__
        and isinstance(getattr(module, "layer_idx", None), int)
        and isinstance(getattr(module, "config", None), config)
    )
