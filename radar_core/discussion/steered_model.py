"""A model that steers, and answers in one batch whatever is asked of it at the same time."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import StoppingCriteria, StoppingCriteriaList

from radar_core.checks import check_whole
from radar_core.discussion.model import Answer, Request, check_sampling
from radar_core.hooks.attachment import unwrapped
from radar_core.hooks.turns import turn
from radar_core.methods import Method
from radar_core.steered import Steered, check_fits, read_already
from radar_core.threads import in_thread

__all__ = ["SteeredModel"]

Inputs = dict[str, Tensor]


class SteeredModel:
    """Answers by a transformers model on this machine, steered towards each request's anchors.

    Requests that wait at the same time go through the model as one left-padded batch, in a worker
    thread, if they have the same method, temperature and length limit, and all of them anchors or
    none. Every row has its own anchors and its own seed: greedy answers are those that a request
    alone would get, up to rounding, and so are sampled ones, which `sample_logits` draws.

    A policy that reads with the same model to choose, by an `Attention` selector, takes turns with
    the batches. A request that is answered alone goes on from what was read to choose its anchors.

    Args:
        model: a decoder-only transformers model in evaluation mode.
        tokenizer: its tokenizer, with a chat template.
        method: steers requests that bring no method of their own; None is SPA(strength=1.4).
        batch_size: the most requests of a batch.
        options: further arguments of `generate`, such as {"repetition_penalty": 1.0}. Sampling
            knows temperature, top_k, top_p and min_p only.
        template: further arguments of the chat template, such as {"enable_thinking": False}.

    Raises:
        ValueError: a value is unusable.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        method: Method | None = None,
        batch_size: int = 8,
        *,
        options: Mapping[str, Any] | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> None:
        check_whole("batch_size", batch_size, 1)
        if tokenizer is None:
            raise ValueError("a discussion needs a tokenizer: SteeredModel(model, tokenizer)")
        self.steered = Steered(model, tokenizer, method, sampler="radar")
        self.batch_size = batch_size
        self.options = dict(options or {})
        self.template = dict(template or {})
        self._queues: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Queue] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def settings(self) -> Mapping[str, Any]:
        """What the answers depend on."""
        model = self.steered.model
        return {
            "model": getattr(model, "name_or_path", "") or type(model).__name__,
            "dtype": str(model.dtype),
            "method": self.steered.method,
            "options": self.options,
            "template": self.template,
        }

    async def __call__(self, request: Request) -> Answer:
        """Answer one prompt; see `Model`.

        The answer's `seconds` are those of the batch that it was part of.

        Raises:
            ValueError: the prompt does not fit the model, its anchors are not in it or cannot be
                steered towards, or a value is unusable; other requests are not troubled.
        """
        check_sampling(request.max_new_tokens, request.temperature, request.seed)
        loop = asyncio.get_running_loop()
        queue = self._queues.setdefault(loop, _Queue())
        waiting = _Waiting(request, loop.create_future())
        queue.waiting.append(waiting)
        if queue.server is None or queue.server.done():
            queue.server = loop.create_task(self._serve(queue))
        return await waiting.answer

    async def _serve(self, queue: _Queue) -> None:
        # This runs when those who speak at the same time have asked, too.
        batch: list[_Waiting] = []
        stop = threading.Event()  # its thread cannot be cancelled, but ends at the next token
        try:
            while batch := self._next_batch(queue):
                try:
                    requests = [one.request for one in batch]
                    answers = await in_thread(self._answer, requests, stop)
                except Exception as error:
                    answers = [error] * len(batch)
                for one, answer in zip(batch, answers, strict=True):
                    one.settle(answer)
        except BaseException as error:  # a fault here must not leave anybody waiting for ever
            for one in (*batch, *queue.waiting):
                one.settle(error)
            raise
        finally:
            stop.set()
            queue.server = None

    def _next_batch(self, queue: _Queue) -> list[_Waiting]:
        """Take the request that waits longest, and those that can go with it."""
        waiting = [one for one in queue.waiting if not one.answer.done()]
        batch: list[_Waiting] = []
        left: deque[_Waiting] = deque()
        for one in waiting:
            fits = len(batch) < self.batch_size
            if fits and (not batch or self._go_together(batch[0].request, one.request)):
                batch.append(one)
            else:
                left.append(one)
        queue.waiting = left
        return batch

    def _go_together(self, one: Request, other: Request) -> bool:
        try:
            return (
                one.temperature == other.temperature
                and one.max_new_tokens == other.max_new_tokens
                and _is_anchored(one) == _is_anchored(other)
                and (not _is_anchored(one) or bool(self._method(one) == self._method(other)))
            )
        except Exception:  # as of methods that hold tensors: they cannot be told to be equal
            return False

    def _method(self, request: Request) -> Method:
        return self.steered.method if request.method is None else request.method

    def _answer(
        self, requests: Sequence[Request], stop: threading.Event
    ) -> list[Answer | Exception]:
        """Answer requests that go together; what is wrong with one of them is its answer alone."""
        with turn(unwrapped(self.steered.model)):
            prepared = [self._prepare(request) for request in requests]
            sound = [
                (request, inputs)
                for request, inputs in zip(requests, prepared, strict=True)
                if not isinstance(inputs, Exception)
            ]
            answers = iter(self._generate_or_each(sound, stop) if sound else ())
            return [
                inputs if isinstance(inputs, Exception) else next(answers) for inputs in prepared
            ]

    def _prepare(self, request: Request) -> Inputs | Exception:
        try:
            inputs = self.steered.prepare(
                [request.messages], [request.anchors], template=self.template
            )
            check_fits(self.steered.model, inputs["input_ids"].shape[1], request.max_new_tokens)
            return inputs
        except Exception as error:
            return error

    def _generate_or_each(
        self, sound: Sequence[tuple[Request, Inputs]], stop: threading.Event
    ) -> Sequence[Answer | Exception]:
        try:
            return self._generate(sound, stop)
        except ValueError as error:
            if len(sound) == 1:
                return [error]
            # One of them is what the method cannot do; the others are not to suffer for it.
            return [self._generate_or_each([one], stop)[0] for one in sound]

    def _generate(
        self, sound: Sequence[tuple[Request, Inputs]], stop: threading.Event
    ) -> list[Answer | Exception]:
        first = sound[0][0]
        options: dict[str, Any] = {"max_new_tokens": first.max_new_tokens, "do_sample": False}
        if first.temperature > 0:
            options["do_sample"] = True
            options["temperature"] = first.temperature
            options["seed"] = [request.seed for request, _ in sound]
        batch: dict[str, Any] = self._joined([inputs for _, inputs in sound])
        options |= self.options
        more = options.get("stopping_criteria") or ()
        options["stopping_criteria"] = StoppingCriteriaList([*more, _Stopped(stop)])
        model, method = self.steered.model, self._method(first)
        if len(sound) == 1:
            options |= read_already(model, method, first.selector, batch, options)
        if not _is_anchored(first):
            del batch["anchors"]
        steered = Steered(model, self.steered.tokenizer, method, sampler="radar")
        started = time.perf_counter()
        out = steered.generate(**(batch | options))
        seconds = time.perf_counter() - started
        sequences = out if isinstance(out, Tensor) else out.sequences
        length = batch["input_ids"].shape[1]
        ends = self._ends()
        answers: list[Answer | Exception] = []
        for (_, inputs), row in zip(sound, sequences[:, length:].tolist(), strict=True):
            end = next((place for place, token in enumerate(row, 1) if token in ends), len(row))
            answers.append(
                Answer(
                    steered.tokenizer.decode(row[:end], skip_special_tokens=True),
                    prompt_tokens=inputs["input_ids"].shape[1],
                    completion_tokens=end,
                    seconds=seconds,
                    anchor_tokens=int(inputs["anchors"].sum()),
                )
            )
        return answers

    def _joined(self, prompts: Sequence[Inputs]) -> dict[str, Any]:
        tokenizer = self.steered.tokenizer
        padding = tokenizer.pad_token_id
        padding = tokenizer.eos_token_id if padding is None else padding
        fill = {"input_ids": padding or 0, "attention_mask": 0, "anchors": False}
        longest = max(prompt["input_ids"].shape[1] for prompt in prompts)
        return {
            name: torch.cat(
                [
                    pad(prompt[name], (longest - prompt[name].shape[1], 0), value=value)
                    for prompt in prompts
                ]
            )
            for name, value in fill.items()
        }

    def _ends(self) -> set[int]:
        """Return the tokens that end an answer."""
        ends = self.options.get("eos_token_id", self.steered.model.generation_config.eos_token_id)
        return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)


@dataclass
class _Waiting:
    """A request and where its answer goes."""

    request: Request
    answer: asyncio.Future[Answer]

    def settle(self, answer: Answer | BaseException) -> None:
        """Give the answer, or say why there is none, unless nobody waits for it any more."""
        if self.answer.done():
            return
        if isinstance(answer, StopIteration):  # which no future can hold
            failed = RuntimeError(f"answering raised {answer!r}")
            failed.__cause__ = answer
            self.answer.set_exception(failed)
        elif isinstance(answer, Exception):
            self.answer.set_exception(answer)
        elif isinstance(answer, BaseException):
            self.answer.cancel()
        else:
            self.answer.set_result(answer)


class _Stopped(StoppingCriteria):
    """Ends every row of a batch once nobody waits for it."""

    def __init__(self, stop: threading.Event) -> None:
        self.stop = stop

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return torch.full((len(input_ids),), self.stop.is_set(), device=input_ids.device)


@dataclass
class _Queue:
    """What waits in one event loop, and the task that serves it while there is something."""

    waiting: deque[_Waiting] = field(default_factory=deque)
    server: asyncio.Task[None] | None = None


def _is_anchored(request: Request) -> bool:
    return len(request.anchors) > 0  # an array of them has no truth value
