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


def decoder(model: Any) -> Any:
    """Return the part of a causal language model that its output layer follows.

    That is its base model or, where its class names none that it has, the child that embeds.
    """
    if model.base_model is not model:
        return model.base_model
    embeddings = model.get_input_embeddings()
    for child in model.children():
        if any(module is embeddings for module in child.modules()):
            return child
    raise ValueError(f"{type(model).__name__} has no decoder apart from its output layer")


def is_attention(module: Any, config: type) -> bool:
    """Whether a module is the self-attention of a layer whose configuration is of a class."""
    return (
        ("Attention" in type(module).__name__ or type(module).__name__.endswith("MLA"))
        and isinstance(getattr(module, "layer_idx", None), int)
        and isinstance(getattr(module, "config", None), config)
    )
