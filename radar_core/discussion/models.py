"""Models that cannot steer: functions, pipelines, and clients of a server."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from radar_core.discussion.model import Answer, Request
from radar_core.discussion.settings import described
from radar_core.threads import in_thread

__all__ = ["CallableModel", "ClientModel", "PipelineModel"]


class CallableModel:
    """Answers by a function from messages to text.

    Args:
        function: takes a list of dicts with "role" and "content" and returns a str, or an awaitable
            of one. One that is not async runs in worker threads, several at once.
        name: what a discussion's log calls the model; None for the function's name, with what it
            does if others may have the same one.
    """

    can_steer = False

    def __init__(self, function: Callable[[list[dict[str, str]]], Any], name: str | None = None):
        if not callable(function):
            raise ValueError(f"function must be callable, got {function!r}")
        self.function = function
        self.settings: dict[str, Any] = {"name": name}
        if name is None:
            called = getattr(function, "__qualname__", type(function).__name__)
            # Lambdas have one name for all, and a log must not take one's answers for another's.
            self.settings = {"name": called, "function": described(function)}

    async def __call__(self, request: Request) -> Answer:
        """Answer one prompt; see `Model`."""
        refuse_anchors(request, "a function")
        started = time.perf_counter()
        text = await called(self.function, [dict(message) for message in request.messages])
        if not isinstance(text, str):
            raise TypeError(f"{self.settings['name']} must return a str, got {text!r}")
        return Answer(text, seconds=time.perf_counter() - started)


class ClientModel:
    """Answers by a server, through any client with `chat.completions.create`.

    Args:
        client: such as `openai.OpenAI(base_url=...)` or `openai.AsyncOpenAI(...)`.
        model: the model's name on the server.
        options: further arguments of `create`, such as {"top_p": 0.9}.
        limit: what the server calls the length limit: "max_tokens", or "max_completion_tokens" for
            newer models of OpenAI's own.
    """

    can_steer = False

    def __init__(
        self,
        client: Any,
        model: str,
        *,
        options: Mapping[str, Any] | None = None,
        limit: str = "max_tokens",
    ) -> None:
        try:
            create = client.chat.completions.create
        except AttributeError:
            raise ValueError(
                f"client, of type {type(client).__name__}, has no chat.completions.create; "
                "expected one such as openai.OpenAI(base_url=...)"
            ) from None
        self._create = create
        self.model = model
        self.options = dict(options or {})
        self.limit = limit
        self.settings = {"model": model, "options": self.options}

    async def __call__(self, request: Request) -> Answer:
        """Answer one prompt; see `Model`."""
        refuse_anchors(request, "a server of this kind")
        arguments = {
            "model": self.model,
            "messages": [dict(message) for message in request.messages],
            "temperature": request.temperature,
            "seed": request.seed,
            self.limit: request.max_new_tokens,
            **self.options,
        }
        started = time.perf_counter()
        response = await called(partial(self._create, **arguments))
        seconds = time.perf_counter() - started
        text = response.choices[0].message.content if response.choices else None
        if text is None:
            raise RuntimeError(f"{self.model} answered without a text: {response!r}"[:500])
        usage = getattr(response, "usage", None)
        return Answer(
            text,
            prompt_tokens=getattr(usage, "prompt_tokens", None) or 0,
            completion_tokens=getattr(usage, "completion_tokens", None) or 0,
            seconds=seconds,
        )


class PipelineModel:
    """Answers by a text-generation pipeline of transformers, one prompt at a time.

    Sampled answers are drawn from torch's own generators, seeded for each request and put back
    afterwards.

    Args:
        pipeline: a `transformers.pipeline("text-generation", ...)` with a chat template.
        options: further arguments of its `generate`, such as {"top_p": 0.9}.
    """

    can_steer = False

    def __init__(self, pipeline: Any, *, options: Mapping[str, Any] | None = None) -> None:
        if getattr(pipeline, "task", None) != "text-generation":
            raise ValueError(
                f"pipeline is a {type(pipeline).__name__}; expected one made by "
                'transformers.pipeline("text-generation", ...)'
            )
        self.pipeline = pipeline
        self.options = dict(options or {})
        name = getattr(pipeline.model, "name_or_path", "")
        self.settings = {"model": name, "options": self.options}
        self._lock = threading.Lock()

    async def __call__(self, request: Request) -> Answer:
        """Answer one prompt; see `Model`."""
        refuse_anchors(request, "a pipeline")
        return await in_thread(self._answer, request)

    def _answer(self, request: Request) -> Answer:
        import torch

        messages = [dict(message) for message in request.messages]
        tokenizer = self.pipeline.tokenizer
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )["input_ids"]
        options: dict[str, Any] = {"max_new_tokens": request.max_new_tokens, "do_sample": False}
        if request.temperature > 0:
            options |= {"do_sample": True, "temperature": request.temperature}
        devices = [self.pipeline.device] if self.pipeline.device.type == "cuda" else []
        with self._lock, torch.random.fork_rng(devices):
            torch.manual_seed(request.seed)
            started = time.perf_counter()
            out = self.pipeline(messages, return_tensors=True, **(options | self.options))
            seconds = time.perf_counter() - started
        sequence = list(out[0]["generated_token_ids"])
        if sequence[: len(prompt)] != list(prompt):
            raise ValueError(
                "the pipeline does not render the messages as its tokenizer's chat template does, "
                "so its answer cannot be told from its prompt"
            )
        new = sequence[len(prompt) :]
        return Answer(
            tokenizer.decode(new, skip_special_tokens=True), len(prompt), len(new), seconds
        )


def refuse_anchors(request: Request, what: str) -> None:
    """Raise ValueError if a request has anchors and so needs a model that can steer."""
    if request.anchors:
        raise ValueError(
            f"the prompt of {request.speaker or 'this request'} is to be steered "
            f"(anchors: {len(request.anchors)}) and {what} cannot steer; use "
            "SteeredModel(model, tokenizer), or a policy without anchors, such as FullContext() or "
            "AgentRadarPolicy(appended=True)"
        )


async def called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function, in a worker thread unless it is async, and await what it returns."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    result = await in_thread(function, *arguments)
    return await result if inspect.isawaitable(result) else result
