"""What every steering method has in common: parameters, checked once, and `applied_to`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from radar_core.checks import is_whole

if TYPE_CHECKING:
    from radar_core.hooks.attachment import Steering

Queries = Literal["all", "generated"]
Heads = Sequence[int] | Mapping[int, Sequence[int]] | None
Layers = Sequence[int] | None
Arguments = ParamSpec("Arguments")
Made = TypeVar("Made", bound="Method")

# Biases and strengths beyond this say nothing more, and overflow in half precision.
LARGEST = 1000.0
# Characters of an argument that are printed.
LONGEST = 160


@dataclass(frozen=True)
class LayerPlan:
    """What one layer's attention does to its anchored keys.

    Args:
        bias: float32 [num_heads], added to the attention logits of anchored keys; None for no bias.
        target_mass: float32 [num_heads] in (0, 1), the share of attention that the anchors are
            raised (or set) to; None for no target.
        exact: with `target_mass`, set the share exactly instead of only raising it.
        left_alone: bool [num_heads], heads that an exact target must not touch; None for none.
        queries: which query tokens are steered, "all" or those that predict "generated" tokens.
    """

    bias: Tensor | None = None
    target_mass: Tensor | None = None
    exact: bool = False
    left_alone: Tensor | None = None
    queries: Queries = "all"


@dataclass(frozen=True, repr=False)
class Method:
    """A way of steering; the concrete methods are frozen dataclasses that derive from it."""

    # The call of the named constructor that made this; no field, so that it is not compared, and
    # lost where `dataclasses.replace` makes something that the call would not.
    _made_by: ClassVar[str | None] = None

    def __repr__(self) -> str:
        """Print as the call that made it: the first parameter, and what else is not by default."""
        if self._made_by is not None:
            return self._made_by
        given = {
            one.name: (getattr(self, one.name), one.default) for one in fields(self) if one.repr
        }
        return _as_call(type(self).__name__, given)

    @property
    def name(self) -> str:
        """What the method is called: its class, or the named constructor that made it."""
        return repr(self).partition("(")[0]

    def applied_to(self, model: Any, anchors: Any = None) -> AbstractContextManager[Steering]:
        """Steer every forward pass of a model inside a `with` block and undo it on leaving.

        On a CPU, decoding also runs the model's linear layers by an operator that reads each weight
        once for all rows; where nothing is steered, results then agree to rounding.

        Whoever calls the model meanwhile is steered, from any thread, but only one at a time is
        served. What is set on `model.config` inside the block is lost on leaving, and a steered
        model cannot be copied or pickled.

        Args:
            model: a Hugging Face transformers causal language model in evaluation mode.
            anchors: [batch, prompt] bool (or 0/1, or for biases a float factor per token) of the
                prompt's shape, left padding included; None or nothing anchored means no steering.
                Beams and `num_return_sequences` repeat the rows inside. To score a given answer,
                run the prompt first and the answer on its cache.

        Returns:
            A context manager; the value it yields reports what was hooked.

        Raises:
            ValueError: the model's attention cannot be hooked, or the anchors do not fit; inside
                the block, a call whose prompt the anchors do not describe, or `generate` with
                `guidance_scale`.
            RuntimeError: the model is in training mode or is already being steered.
        """
        from radar_core.hooks.attachment import attach

        return attach(model, self, anchors)

    @property
    def is_identity(self) -> bool:
        """Whether the method leaves every result as it is, so that nothing need be hooked."""
        return False

    def for_tokenizer(self, tokenizer: Any) -> Method:
        """Return the method as it is with a tokenizer at hand; most have no use for one."""
        return self

    def layer_plan(self, layer: int, num_layers: int, num_heads: int) -> LayerPlan | None:
        """Return what a layer does to its anchored keys, None where it is left untouched.

        Args:
            layer: index of the layer.
            num_layers: number of layers of the model.
            num_heads: number of query heads of the layer.

        Raises:
            ValueError: `layers=` or `heads=` name one that the model does not have.
        """
        return None


@dataclass(frozen=True)
class NoSteering(Method):
    """Run Radar's attention on every layer with nothing anchored.

    The results equal the model's own to rounding, not bit for bit; benchmarks use it to tell what
    steering costs from what Radar's operators save.
    """

    def layer_plan(self, layer: int, num_layers: int, num_heads: int) -> LayerPlan | None:
        return LayerPlan()


def printed_as_called(constructor: Callable[Arguments, Made]) -> Callable[Arguments, Made]:
    """Let the methods that a named constructor makes print as its call."""
    signature = inspect.signature(constructor)

    @functools.wraps(constructor)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Made:
        method = constructor(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = {
            name: (value, signature.parameters[name].default)
            for name, value in bound.arguments.items()
        }
        object.__setattr__(method, "_made_by", _as_call(constructor.__name__, given))
        return method

    return call


def _as_call(name: str, given: Mapping[str, tuple[Any, Any]]) -> str:
    """Return the text of a call.

    Args:
        name: of the class or function.
        given: arguments, each with its value and its default; the first is always said.
    """
    said: list[str] = []
    for argument, (value, default) in given.items():
        value = value.tolist() if hasattr(value, "tolist") else value
        if said and value == default:
            continue
        text = repr(value)
        said.append(f"{argument}={text if len(text) <= LONGEST else text[:LONGEST] + '...'}")
    return f"{name}({', '.join(said)})"


def check_queries(queries: str) -> None:
    """Raise ValueError unless `queries` is one of the two names that methods know."""
    if queries not in ("all", "generated"):
        raise ValueError(
            f'queries is {queries!r}; expected "all" (every token) or "generated" (only the tokens '
            "that predict the answer)"
        )


def check_flag(name: str, value: bool) -> None:
    """Raise ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; expected True or False")


def check_indices(name: str, values: Sequence[int] | None) -> None:
    """Raise ValueError unless `values` is None or a non-empty sequence of distinct ints."""
    if values is None:
        return
    if (
        not isinstance(values, Collection)
        or isinstance(values, str)
        or not all(is_whole(v) for v in values)
    ):
        raise ValueError(f"{name} is {values!r}; expected a sequence of ints such as [20, 21, 22]")
    if not len(values):
        raise ValueError(f"{name} is empty; pass None for all of them")
    if len(set(values)) != len(values):
        raise ValueError(f"{name} is {list(values)}; it names one twice")


def check_heads(heads: Heads) -> None:
    """Raise ValueError unless `heads` is None, a sequence of ints or a mapping layer -> ints."""
    if isinstance(heads, Mapping):
        check_indices("the layers of heads", list(heads))
        for layer, chosen in heads.items():
            check_indices(f"heads[{layer}]", chosen)
    else:
        check_indices("heads", heads)


def resolve(name: str, values: Sequence[int], count: int) -> set[int]:
    """Turn possibly negative indices into a set of indices below `count`.

    Raises:
        ValueError: one of them lies outside -count..count-1, or two are the same.
    """
    names: dict[int, int] = {}
    for value in values:
        if not -count <= value < count:
            raise ValueError(
                f"{name} names {value}, but this model has {count}: expected {-count}..{count - 1}"
            )
        other = names.setdefault(value % count, value)
        if other != value:
            raise ValueError(
                f"{name} names {other} and {value}, which are the same one of this model's {count}"
            )
    return set(names)


def chosen_heads(
    heads: Heads, layers: Layers, layer: int, num_layers: int, num_heads: int
) -> Tensor | None:
    """Return which query heads of a layer are steered: bool [num_heads], or None for none.

    Args:
        heads: None for all heads, a sequence of heads for every chosen layer, or a mapping from
            layer to heads (layers that it does not name are left alone).
        layers: None for all layers, or the layers to steer; negative indices count from the top.
        layer: index of the layer asked about.
        num_layers: number of layers of the model.
        num_heads: number of query heads.
    """
    steered = set(range(num_layers)) if layers is None else resolve("layers", layers, num_layers)
    if isinstance(heads, Mapping):
        steered &= resolve("heads", list(heads), num_layers)
        by_layer = {key % num_layers: of_layer for key, of_layer in heads.items()}
        if not steered:
            raise ValueError(
                f"layers is {layers}, but heads names the layers {list(heads)}: none is in both"
            )
        resolved = {key: resolve("heads", names, num_heads) for key, names in by_layer.items()}
        mine = resolved.get(layer, set())
    else:
        mine = set(range(num_heads)) if heads is None else resolve("heads", heads, num_heads)
    if layer not in steered:
        return None
    return _marked(frozenset(mine), num_heads)


@functools.lru_cache(maxsize=256)
def _marked(heads: frozenset[int], count: int) -> Tensor:
    """Return which of `count` heads are among `heads`: bool [count], shared by all that ask."""
    with torch.inference_mode(False):
        return torch.tensor([head in heads for head in range(count)])
