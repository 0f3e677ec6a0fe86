"""What a discussion asks of a model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from radar_core.anchors import Anchor
from radar_core.checks import (
    check_has,
    check_number,
    check_seed,
    check_whole,
    is_finite,
    is_number,
)
from radar_core.methods import Method

__all__ = [
    "Answer",
    "Model",
    "Request",
    "answer_of",
    "check_model",
    "check_sampling",
    "plain_number",
]


@dataclass(frozen=True)
class Request:
    """A prompt to answer.

    Args:
        messages: dicts with "role" and "content".
        max_new_tokens: length limit of the answer, in tokens.
        anchors: spans of the messages' contents to steer towards.
        method: the steering method; None for the model's own choice.
        temperature: 0 answers greedily.
        seed: of a sampled answer.
        speaker: name of the agent that speaks, for models that tell agents apart.
        selector: what chose the anchors; a model that it has read the prompt with may go on from
            that.
    """

    messages: Sequence[Mapping[str, str]]
    max_new_tokens: int = 256
    anchors: Sequence[Anchor] = ()
    method: Method | None = None
    temperature: float = 0.0
    seed: int = 0
    speaker: str | None = None
    selector: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Answer:
    """What a model answered.

    Args:
        text: the answer.
        prompt_tokens: length of the prompt in the model's tokens; 0 if the model does not say.
        completion_tokens: length of the answer in the model's tokens; 0 if the model does not say.
        seconds: how long it took.
        anchor_tokens: how many tokens of the prompt were anchored.
    """

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    anchor_tokens: int = 0


# Errors that come again however often one asks.
LASTING_ERRORS = (ValueError, TypeError, AttributeError, NotImplementedError)


class Model(Protocol):
    """Answers prompts; many may be under way at once."""

    async def __call__(self, request: Request) -> Answer:
        """Answer one prompt.

        Args:
            request: the prompt.

        Returns:
            The answer.

        Raises:
            ValueError: the request has anchors and the model cannot steer.
        """
        ...


def check_model(model: Any) -> None:
    """Check that something can be asked, as far as can be told before it is.

    Args:
        model: what is to answer.

    Raises:
        ValueError: it is a class, a model of transformers, or cannot be called.
    """
    example = "SteeredModel(model, tokenizer) or CallableModel(function)"
    check_has("model", model, "__call__", example)
    if callable(getattr(model, "get_input_embeddings", None)):
        raise ValueError(
            f"model is a {type(model).__name__}, which takes token ids; expected "
            "SteeredModel(model, tokenizer)"
        )


def check_sampling(max_new_tokens: Any, temperature: Any, seed: Any) -> None:
    """Check what every request says of how its answer is drawn.

    Args:
        max_new_tokens: as in `Request`, as are the others.
        temperature: may be 0.
        seed: may be negative.

    Raises:
        ValueError: a value is unusable.
    """
    check_whole("max_new_tokens", max_new_tokens, 1)
    check_number("temperature", temperature)
    check_seed(seed)


async def answer_of(model: Model, request: Request) -> Answer:
    """Ask a model, and check that it answers as a model has to.

    Args:
        model: the model.
        request: the prompt.

    Returns:
        Its answer.

    Raises:
        TypeError: it returned no awaitable, or that gave no `Answer` with a text.
        ValueError: a number of the answer is none that a log can hold.
    """
    awaited: Any = model(request)
    if not inspect.isawaitable(awaited):
        raise TypeError(
            f"the model returned a {type(awaited).__name__}; expected an awaitable of an Answer: "
            "wrap a function from messages to text as CallableModel(function)"
        )
    answer = await awaited
    if not isinstance(answer, Answer):
        raise TypeError(f"the model answered with a {type(answer).__name__}; expected an Answer")
    if not isinstance(answer.text, str):
        raise TypeError(f"the model's answer has the text {answer.text!r}; expected a str")
    counts = ("prompt_tokens", "completion_tokens", "anchor_tokens")
    whole: dict[str, Any] = {
        name: _whole(f"the model's answer has {name}", getattr(answer, name)) for name in counts
    }
    return replace(answer, seconds=seconds_of("the model's answer", answer.seconds), **whole)


def seconds_of(whose: str, value: Any) -> float:
    """Take a time as a float, as which a log holds it.

    Args:
        whose: time it is, for the error.
        value: any real number, of numpy or torch too.

    Returns:
        The same number.

    Raises:
        ValueError: it is no number, or not finite.
    """
    seconds = plain_number(value)
    if not is_finite(seconds):
        raise ValueError(f"{whose} has seconds={value!r}; expected a finite number, 0.0 if unknown")
    return float(seconds)


def _whole(what: str, value: Any) -> int:
    number = plain_number(value)
    if not is_finite(number) or number != int(number):
        raise ValueError(f"{what}={value!r}; expected a whole number, 0 if unknown")
    return int(number)


def plain_number(value: Any) -> int | float | None:
    """Return a number of any library, numpy or torch say, as Python's own; None for others."""
    value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
    return value if is_number(value) else None
