"""Relevance by the model's own attention: what the query looks at in the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from radar_core.anchors import Anchor, RenderedPrompt, Span, anchor_spans, render_chat
from radar_core.relevance.selector import Reading

if TYPE_CHECKING:
    from torch import Tensor

    from radar_core.hooks.sentence_mass import Asked
    from radar_core.methods.method import Heads, Layers

__all__ = ["Attention"]


class Attention:
    """Compares sentences with a query by the attention that they draw in a model.

    A sentence's peak is the largest share of attention that one of the query's tokens pays to it,
    plus the largest that one of the tokens behind the query does, where the chat template opens the
    answer. `gain(s) = mean over layers and heads of (peak(s, query) - peak(s, baseline))`, with the
    same prompt and a query that asks for nothing as the baseline, which takes away what any query
    looks at: long sentences, the beginning, the end. The similarity is `gain(s) / max |gain|`: 1 or
    -1 for the sentence that the query moves most.

    Source: In-context re-ranking (Chen et al., arXiv 2410.02642), sentences for documents.

    The prompt has to be read for the answer anyway, and its keys and values are remembered: of the
    next prompt only what is new is read, and `Steered.chat` goes on from them. So selection costs
    one pass over a few tokens, the baseline's. Threads take turns.

    Args:
        model: a decoder-only transformers model in evaluation mode, whose attention can be hooked.
        tokenizer: its tokenizer, with a chat template.
        layers: the layers to look at, negative from the top; None for all but the lowest third,
            which look at words more than at what is meant.
        heads: query heads to look at, in every layer or by layer; None for all.
        baseline_query: the query that asks for nothing.
        template: further arguments of the chat template; give `Steered.chat` the same.
        language: ISO 639-1 code for cutting messages into sentences.

    Raises:
        ValueError: an argument is malformed, or `layers` or `heads` name what the model lacks.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        layers: Layers = None,
        heads: Heads = None,
        baseline_query: str = "N/A",
        template: Mapping[str, Any] | None = None,
        language: str = "en",
    ) -> None:
        if not isinstance(baseline_query, str) or not baseline_query.strip():
            raise ValueError(
                f"baseline_query must be a str that is not blank, got {baseline_query!r}"
            )
        if hasattr(tokenizer, "get_output_embeddings") or not hasattr(tokenizer, "decode"):
            raise ValueError(
                f"tokenizer is a {type(tokenizer).__name__}; expected Attention(model, tokenizer)"
            )
        from radar_core.hooks.sentence_mass import PromptReader

        self.tokenizer = tokenizer
        self.baseline_query = baseline_query
        self.template = dict(template or {})
        self.language = language
        self._reader = PromptReader(model)
        self._heads = _looked_at(self._reader.model, layers, heads)

    def __repr__(self) -> str:
        layers = sorted(self._heads)
        return f"Attention({type(self._reader.model).__name__}, layers {layers[0]}-{layers[-1]})"

    @property
    def model(self) -> Any:
        """The model that reads."""
        return self._reader.model

    @property
    def settings(self) -> dict[str, Any]:
        """What the similarities depend on; the heads are those that are looked at, by layer."""
        return {
            "model": self.model,
            "dtype": str(self.model.dtype),
            "tokenizer": self.tokenizer,
            "heads": {
                layer: np.flatnonzero(heads).tolist() for layer, heads in self._heads.items()
            },
            "baseline_query": self.baseline_query,
            "template": self.template,
            "language": self.language,
        }

    def similarities(self, reading: Reading) -> np.ndarray:
        """Compare every sentence with the query.

        Args:
            reading: the prompt with its sentences and its query.

        Returns:
            float32 [number of sentences], -1 to 1; all 0 where the query moves nothing.

        Raises:
            ValueError: the model cannot be hooked, the prompt is longer than its context, the chat
                template leaves out what is to be compared, or a sentence does not lie before the
                query.
            RuntimeError: the model is in training mode, or is being steered or run by another
                thread.
        """
        if not reading.sentences:
            return np.zeros(0, dtype=np.float32)
        gain = self._gain(*self.peaks(reading))
        return gain / max(float(np.abs(gain).max()), np.finfo(np.float32).tiny)

    def peaks(self, reading: Reading) -> tuple[Tensor, Tensor]:
        """Measure what `similarities` are made of.

        Args:
            reading: the prompt with at least one sentence, and its query.

        Returns:
            Two float32 [layers, 2, heads, sentences], of the query and of the baseline: the largest
            share of attention that a sentence gets from one of the query's tokens, and from one of
            the tokens behind it, in all layers that are looked at, in their order.

        Raises:
            ValueError: as `similarities` does.
            RuntimeError: as `similarities` does.
        """
        import torch

        rendered = render_chat(self.tokenizer, reading.messages, **self.template)
        asked = _asked(rendered, reading.query_place)
        messages, place = _with_query(reading, self.baseline_query)
        blank = _asked(render_chat(self.tokenizer, messages, **self.template), place)
        owners = token_sentences(rendered, anchor_spans(rendered, reading.places))
        return self._reader.sentence_peaks(
            asked, blank, torch.from_numpy(owners), len(reading.places), sorted(self._heads)
        )

    def cache_for(
        self, input_ids: Sequence[int], *, model: Any = None, most: int | None = None
    ) -> Any:
        """Return a cache from which generation can go on, a copy that belongs to the caller.

        Args:
            input_ids: the tokens of the prompt.
            model: the model that will go on from it; None is the one that reads.
            most: the most tokens that it may hold; the last token is never among them.

        Returns:
            A transformers `DynamicCache` with as many of the prompt's first tokens as the latest
            prompt had in common with it, as the unsteered model reads them; None if none, or if
            another model is to go on.
        """
        if model is not None and model is not self.model:
            return None
        return self._reader.cache_for(input_ids, most)

    def forget(self) -> None:
        """Free the memory of the latest prompt, whose keys and values are kept for the next."""
        self._reader.forget()

    def _gain(self, peaks: Tensor, baseline: Tensor) -> np.ndarray:
        chosen = [self._heads[layer] for layer in sorted(self._heads)]
        by_layer = (peaks - baseline).sum(dim=1).numpy()
        gains = [gain[heads] for gain, heads in zip(by_layer, chosen, strict=True)]
        gain: np.ndarray = np.concatenate(gains).mean(axis=0)
        return gain


def token_sentences(rendered: RenderedPrompt, spans: Sequence[Span]) -> np.ndarray:
    """Tell which sentence each token belongs to: the one that holds most of its characters.

    Args:
        rendered: the prompt.
        spans: where the sentences lie in its text, without overlaps.

    Returns:
        int64 [tokens], -1 for tokens of no sentence; the earlier of two that hold as much.
    """
    owner = np.full(len(rendered.text), -1)
    for sentence, (start, end) in enumerate(spans):
        owner[start:end] = sentence
    return np.array([_most(owner[start:end]) for start, end in rendered.token_spans])


def _most(owners: np.ndarray) -> int:
    held = owners[owners >= 0]
    if not held.size:
        return -1
    if held[0] == held[-1]:
        return int(held[0])
    sentences, counts = np.unique(held, return_counts=True)
    return int(sentences[counts.argmax()])


def _asked(rendered: RenderedPrompt, place: Anchor) -> Asked:
    """Find the query's tokens in a prompt."""
    from radar_core.hooks.sentence_mass import Asked

    tokens = rendered.tokens_of(anchor_spans(rendered, [place])[0])
    if not tokens:
        raise ValueError("the query has no token: the tokenizer drops its characters")
    return Asked(rendered.input_ids, tokens[0], tokens[-1] + 1)


def _with_query(reading: Reading, query: str) -> tuple[list[Mapping[str, str]], Anchor]:
    """Put another query into a reading's messages, and say where it lies."""
    place = reading.query_place
    assert place.message is not None and place.start is not None
    messages = list(reading.messages)
    content = messages[place.message]["content"]
    content = content[: place.start] + query + content[place.end :]
    messages[place.message] = {**messages[place.message], "content": content}
    return messages, replace(place, end=place.start + len(query))


def _looked_at(model: Any, layers: Layers, heads: Heads) -> dict[int, np.ndarray]:
    """Return which heads of which layers are looked at: {layer: bool [heads]}."""
    from radar_core.methods.method import check_heads, check_indices, chosen_heads

    check_heads(heads)
    check_indices("layers", layers)
    config = model.config.get_text_config(decoder=True)
    count, num_heads = config.num_hidden_layers, config.num_attention_heads
    if layers is None and not isinstance(heads, Mapping):
        layers = range(count // 3, count)
    chosen = {
        layer: found.numpy()
        for layer in range(count)
        if (found := chosen_heads(heads, layers, layer, count, num_heads)) is not None
    }
    return chosen
