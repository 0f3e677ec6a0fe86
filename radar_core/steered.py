"""A model, a tokenizer and a method: text in, steered text out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from radar_core.anchors import Anchor, RenderedPrompt, anchor_mask, anchor_spans, render_chat
from radar_core.checks import is_whole
from radar_core.hooks.attachment import as_mask, attach, unwrapped
from radar_core.hooks.cache import CACHE_NAMES, cache_name
from radar_core.hooks.prompts import check_prompt, check_shape
from radar_core.hooks.sampler import sample_with_radar
from radar_core.hooks.sentence_mass import unchanged_tokens
from radar_core.hooks.undo import Undo
from radar_core.methods import SPA, Method, NoSteering
from radar_core.report import Report, Run, report_on

if TYPE_CHECKING:
    from radar_core.agent_radar import Prompt

Messages = Sequence[Mapping[str, Any]]
AnchorLike = str | Anchor | tuple[int, int]


@dataclass(frozen=True)
class PlacedAnchor:
    """An anchor as it was found in the rendered prompt.

    Args:
        text: the anchored characters.
        start: first character in the rendered prompt.
        end: one past the last character.
        tokens: indices of the prompt tokens that overlap it.
    """

    text: str
    start: int
    end: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Usage:
    """Token counts of one reply.

    Args:
        prompt_tokens: length of the prompt.
        completion_tokens: number of generated tokens, an end token included.
        anchor_tokens: how many prompt tokens were anchored.
    """

    prompt_tokens: int
    completion_tokens: int
    anchor_tokens: int


@dataclass(frozen=True)
class Reply:
    """A steered reply.

    Args:
        text: the generated text without special tokens.
        anchors: the anchors as placed in the prompt.
        usage: token counts.
    """

    text: str
    anchors: tuple[PlacedAnchor, ...]
    usage: Usage


class Steered:
    """Steers a transformers model with one method; the model itself stays as it is between calls.

    Args:
        model: a decoder-only transformers model in evaluation mode.
        tokenizer: its tokenizer; may be None if only `generate` is used.
        method: a steering method, `SPA(strength=1.4)` by default.
        sampler: who draws where `generate` samples. "transformers" does, by its own processors in
            its own order. "radar" does temperature, top-k, top-p, min-p and the draw in one
            operator without a sort; a row's draw then depends on its seed alone, not on its batch,
            and `scores` hold the drawn token only.

    Raises:
        ValueError: `method` is no steering method, or `sampler` is unknown.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        method: Method | None = None,
        *,
        sampler: Literal["transformers", "radar"] = "transformers",
    ) -> None:
        method = SPA() if method is None else method
        if not isinstance(method, Method):
            raise ValueError(
                f"method is {method!r}; expected a steering method such as SPA(strength=1.4) or "
                "AttentionBias(2.0)"
            )
        if sampler not in ("transformers", "radar"):
            raise ValueError(f'sampler is {sampler!r}; expected "transformers" or "radar"')
        if hasattr(tokenizer, "get_output_embeddings") and not hasattr(model, "forward"):
            raise ValueError(
                f"model is a {type(model).__name__} and tokenizer a {type(tokenizer).__name__}: "
                "they look swapped; expected Steered(model, tokenizer)"
            )
        self.model = model
        self.tokenizer = tokenizer
        self.method = method.for_tokenizer(tokenizer)
        self.sampler = sampler
        self._run: Run | None = None

    def __repr__(self) -> str:
        return f"Steered({type(self.model).__name__}, {self.method!r})"

    def chat(
        self,
        messages: Messages | Prompt,
        anchors: Iterable[AnchorLike] | None = None,
        max_new_tokens: int = 128,
        *,
        include_template: bool = False,
        template: Mapping[str, Any] | None = None,
        **generate: Any,
    ) -> Reply:
        """Answer a conversation, steered towards its anchors.

        Args:
            messages: dicts with "role" and "content", oldest first; a str, which is one message of
                the user; or an `AgentRadar` prompt, which brings its own anchors.
            anchors: texts that occur once in the messages, `Anchor`s, or (start, end) characters
                of the rendered prompt; none means an unsteered reply. Given with an `AgentRadar`
                prompt they replace its own: pass `[*prompt.anchors, ...]` to add some.
            max_new_tokens: length limit of the reply, in tokens.
            include_template: whether anchors may cover the chat template's own text.
            template: further arguments of the chat template, e.g. {"enable_thinking": False}.
            **generate: anything `model.generate` takes (do_sample, stop_strings, streamer, ...).

        Returns:
            The reply with its anchors and token counts.

        Raises:
            ValueError: an anchor is absent, ambiguous or covers everything; the prompt does not
                fit the model's context; the model cannot be steered.
            RuntimeError: the model is in training mode, or is already being steered.
        """
        if anchors is None:
            anchors = getattr(messages, "anchors", ())
        rendered = self._render(messages, template)
        placed = place(rendered, anchors, include_template)
        inputs: dict[str, Any] = self._batch([rendered], [placed], include_template)
        if generate.get("num_return_sequences", 1) != 1:
            raise ValueError("chat gives one reply; use generate for num_return_sequences")
        if not is_whole(max_new_tokens) or max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens!r}; expected an int of at least 1")
        check_fits(self.model, len(rendered), max_new_tokens)
        inputs |= self._read_already(messages, inputs, generate)
        out = self.generate(**inputs, max_new_tokens=max_new_tokens, **generate)
        sequences = out if isinstance(out, Tensor) else out.sequences
        new = sequences[0, len(rendered) :]
        usage = Usage(len(rendered), len(new), int(inputs["anchors"].sum()))
        return Reply(self.tokenizer.decode(new, skip_special_tokens=True), placed, usage)

    def prepare(
        self,
        conversations: Sequence[Messages | Prompt],
        anchors: Sequence[Iterable[AnchorLike]] | None = None,
        *,
        include_template: bool = False,
        template: Mapping[str, Any] | None = None,
    ) -> dict[str, Tensor]:
        """Turn several conversations into one left-padded batch for `generate`.

        Args:
            conversations: for each prompt its messages or an `AgentRadar` prompt, as in `chat`.
            anchors: for each prompt its anchors, as in `chat`; None takes those of `AgentRadar`
                prompts.
            include_template: as in `chat`.
            template: as in `chat`.

        Returns:
            input_ids int64, attention_mask int64 and anchors bool, each [batch, longest prompt],
            on the model's device.

        Raises:
            ValueError: the two lists differ in length, or as in `chat`.
        """
        if anchors is None:
            anchors = [getattr(prompt, "anchors", ()) for prompt in conversations]
        if len(conversations) != len(anchors) or not conversations:
            raise ValueError(
                f"{len(conversations)} conversations and {len(anchors)} lists of anchors; expected "
                "as many of one as of the other, and at least one"
            )
        rendered = [self._render(messages, template) for messages in conversations]
        placed = [
            place(prompt, chosen, include_template)
            for prompt, chosen in zip(rendered, anchors, strict=True)
        ]
        return self._batch(rendered, placed, include_template)

    def generate(
        self,
        input_ids: Tensor | None = None,
        *,
        anchors: Any = None,
        seed: int | Sequence[int] | None = None,
        **inputs: Any,
    ) -> Any:
        """Call the model's own `generate` with the method applied.

        Args:
            input_ids: int64 [batch, prompt]; `inputs_embeds` may be given instead.
            anchors: bool (or 0/1) [batch, prompt], True = steer towards this token; for biases
                other numbers are a factor of the bias for each token. None or all False generates
                unsteered.
            seed: of the draws of `sampler="radar"`, row i draws with seed + i; or one for each row;
                None takes one from torch's generator.
            **inputs: anything `model.generate` takes.

        Returns:
            What `model.generate` returns, of the same type.

        Raises:
            ValueError: the anchors do not have the prompt's shape, anchor all of a prompt, the
                model cannot be steered, or `guidance_scale` is given with anchors; with
                `sampler="radar"`, a logits processor is active that it does not know.
            RuntimeError: the model is in training mode, or is already being steered.
        """
        prompt = input_ids if input_ids is not None else inputs.get("inputs_embeds")
        if prompt is None:
            raise ValueError("generate needs input_ids (or inputs_embeds)")
        if not isinstance(prompt, Tensor) or prompt.dim() < 2:
            raise ValueError(
                f"input_ids is a {type(prompt).__name__}; expected a tensor [batch, prompt tokens]"
            )
        if anchors is not None:
            anchors = as_mask(anchors)
            check_prompt(anchors, {**inputs, "input_ids": prompt})
        if "stop_strings" in inputs and "tokenizer" not in inputs:
            if self.tokenizer is None:
                raise ValueError("stop_strings needs a tokenizer: Steered(model, tokenizer, ...)")
            inputs["tokenizer"] = self.tokenizer
        if input_ids is not None:
            inputs["input_ids"] = input_ids
        if seed is not None and self.sampler != "radar":
            raise ValueError('seed is for sampler="radar"; call torch.manual_seed(...) instead')
        self._run = None
        started = time.perf_counter()
        with attach(self.model, self.method, anchors) as steering, ExitStack() as stack:
            if self.sampler == "radar":
                undo = Undo()
                stack.callback(undo.run)
                sample_with_radar(self.model, seed, undo)
            out = self.model.generate(**inputs)
        if steering.active and anchors is not None:
            seconds = time.perf_counter() - started
            given = {name: inputs[name] for name in inputs if name not in CACHE_NAMES}
            self._run = Run(given, anchors, steering.calls, seconds, out)
        return out

    def report(self, reply_tokens: int = 32) -> Report:
        """Say what steering did to the last `generate` or `chat`.

        Reads the prompts twice more, steered and unsteered, with the first tokens of the replies.

        Args:
            reply_tokens: how many tokens of each reply to compare the distributions of.

        Returns:
            The layers reached with the anchors' share of attention before and after, and how far
            the distributions of the reply's tokens moved; print it, or take `.as_dict()`.

        Raises:
            ValueError: nothing has run yet, or the last run steered nothing.
            RuntimeError: a layer that should have been steered was never called.
        """
        if not is_whole(reply_tokens) or reply_tokens < 1:
            raise ValueError(f"reply_tokens is {reply_tokens!r}; expected an int of at least 1")
        if self._run is None:
            raise ValueError(
                "there is nothing to report on: the last generate or chat failed, had no anchors "
                "or a method that is off, or none has run yet"
            )
        return report_on(self.model, self.method, self._run, reply_tokens)

    def _render(
        self, messages: Messages | Prompt, template: Mapping[str, Any] | None
    ) -> RenderedPrompt:
        if self.tokenizer is None:
            raise ValueError("chat needs a tokenizer: Steered(model, tokenizer, method)")
        messages = getattr(messages, "messages", messages)
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not isinstance(messages, Iterable):
            raise ValueError(
                f"messages is a {type(messages).__name__}; expected a list of dicts with 'role' "
                "and 'content'"
            )
        messages = messages if isinstance(messages, Mapping) else list(messages)
        if not messages:
            raise ValueError("messages is empty; expected at least one message")
        if isinstance(messages, list) and (
            isinstance(messages[0], list) or hasattr(messages[0], "messages")
        ):
            raise ValueError(
                "messages holds several conversations, but chat answers one; use "
                "steered.generate(**steered.prepare(conversations, anchors))"
            )
        return render_chat(self.tokenizer, messages, **(template or {}))

    def _read_already(
        self, messages: Messages | Prompt, inputs: Mapping[str, Any], generate: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return what a prompt's selector has read of it with this very model, as a cache."""
        selector = getattr(getattr(messages, "chosen", None), "selector", None)
        return read_already(self.model, self.method, selector, inputs, generate)

    def _batch(
        self,
        rendered: Sequence[RenderedPrompt],
        placed: Sequence[Sequence[PlacedAnchor]],
        include_template: bool,
    ) -> dict[str, Tensor]:
        longest = max(len(prompt) for prompt in rendered)
        padding = self.tokenizer.pad_token_id
        padding = self.tokenizer.eos_token_id if padding is None else padding
        ids = torch.full((len(rendered), longest), padding or 0, dtype=torch.long)
        mask = torch.zeros_like(ids)
        anchored = torch.zeros_like(ids, dtype=torch.bool)
        for row, (prompt, anchors) in enumerate(zip(rendered, placed, strict=True)):
            start = longest - len(prompt)
            ids[row, start:] = torch.tensor(prompt.input_ids)
            mask[row, start:] = 1
            spans = [(anchor.start, anchor.end) for anchor in anchors]
            anchored[row, start:] = torch.tensor(anchor_mask(prompt, spans, include_template))
        device = self.model.device
        return {
            "input_ids": ids.to(device),
            "attention_mask": mask.to(device),
            "anchors": anchored.to(device),
        }


def read_already(
    model: Any,
    method: Method,
    selector: Any,
    inputs: Mapping[str, Any],
    generate: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what a selector has read of a prompt with the very model that is to answer it.

    Args:
        model: the model that answers.
        method: the steering method of the answer.
        selector: what chose the anchors; it may have read nothing, or be None.
        inputs: the prompt alone, with its anchors, as `Steered.prepare` returns it.
        generate: further arguments of `generate`.

    Returns:
        The cache under the name by which the model takes it, up to the first token that steering
        changes; empty if there is none.
    """
    if not hasattr(selector, "cache_for"):
        return {}
    model = unwrapped(model)
    most = unchanged_tokens(model, method, inputs["anchors"], dict(generate))
    cache = selector.cache_for(inputs["input_ids"][0].tolist(), model=model, most=most)
    return {} if cache is None else {cache_name(model): cache}


@torch.no_grad()
def attention_mass(
    model: Any,
    input_ids: Tensor,
    anchors: Any,
    method: Method | None = None,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Measure the share of attention that the anchors get from the last prompt token.

    Args:
        model: a transformers causal language model in evaluation mode.
        input_ids: int64 [batch, prompt], left-padded if the lengths differ.
        anchors: bool [batch, prompt].
        method: measure with this method applied; None measures the unsteered model. SPA leaves the
            attention of the branch that sees everything as it is.
        attention_mask: int64 [batch, prompt]; None if nothing is padded.

    Returns:
        float32 [batch, layers, heads], each in 0..1.

    Raises:
        ValueError: nothing is anchored, or the anchors do not have the prompt's shape.
        RuntimeError: the model is in training mode, or is already being steered.
    """
    anchors = as_mask(anchors)
    check_shape(anchors, input_ids.shape, attention_mask)
    if not bool(anchors.any()):
        raise ValueError("anchors marks no token, so there is nothing to measure")
    method = NoSteering() if method is None or method.is_identity else method
    with attach(model, method, anchors, measure=True) as steering:
        model(input_ids, attention_mask=attention_mask, logits_to_keep=1)
    assert steering.attention is not None
    return steering.attention.measured_mass()


def place(
    rendered: RenderedPrompt, anchors: Iterable[AnchorLike], include_template: bool = False
) -> tuple[PlacedAnchor, ...]:
    """Find every anchor in a rendered prompt.

    Args:
        rendered: the prompt.
        anchors: texts, `Anchor`s or (start, end) characters of the rendered prompt.
        include_template: whether they may cover the template's own text.

    Returns:
        One placed anchor for each, in their order.

    Raises:
        ValueError: as in `Steered.chat`.
    """
    spans = anchor_spans(rendered, anchors)
    mask = anchor_mask(rendered, spans, include_template)
    found = []
    for start, end in spans:
        tokens = tuple(index for index in rendered.tokens_of((start, end)) if mask[index])
        found.append(PlacedAnchor(rendered.text[start:end], start, end, tokens))
    return tuple(found)


def check_fits(model: Any, prompt: int, new: int) -> None:
    """Raise ValueError if a prompt and its reply are longer than the model's context."""
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and prompt + new > limit:
        raise ValueError(
            f"the prompt has {prompt} tokens and max_new_tokens is {new}, but the model's context "
            f"holds {limit}; shorten the conversation or the reply"
        )
