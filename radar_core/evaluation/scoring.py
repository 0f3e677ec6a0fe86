"""Scoring answers to one prompt under many methods, running what the methods share only once.

Up to the first position whose keys and values a method changes, its cache is the unsteered one. So
the prompt is run unsteered once, and each method goes on from a copy of that: from the last prompt
token where only the answer is steered, else from the first anchor.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from radar_core.hooks.attachment import attach, check_anchors, layer_plans
from radar_core.hooks.branches import rotates_by_length
from radar_core.hooks.cache import CACHE_NAMES, cache_name, empty_cache
from radar_core.hooks.provenance import Provenance
from radar_core.methods import Method, NoSteering

__all__ = ["Scored", "Scorer"]


@dataclass(frozen=True)
class Scored:
    """What one method gave.

    Args:
        log_probabilities: for each answer, that of each of its tokens given the prompt and the
            tokens before it, in nats.
        mass: share of the last prompt token's attention that the anchors get, mean over all layers
            and heads; None if nothing is anchored.
        reply: token ids of the greedy reply, an end token included; empty if none was asked for.
    """

    log_probabilities: tuple[tuple[float, ...], ...]
    mass: float | None
    reply: tuple[int, ...] = ()


class Scorer:
    """Scores answers to one prompt under many methods.

    The result is that of an uncached pass over prompt and answer under the same method, to
    rounding. Methods whose caches are equal, such as SPA at several strengths, share theirs where
    they follow each other.

    Args:
        model: a transformers causal language model in evaluation mode.
        input_ids: int64 [1, prompt], template and generation prompt included; at least two tokens.
        other: the scorer of a prompt that begins the same, so that this need not be run again.
        cache: instead, a transformers cache of the prompt's first tokens, unsteered, which then
            belongs to this object; as a selector's `cache_for` gives it.

    Raises:
        ValueError: the prompt is too short.
    """

    def __init__(
        self, model: Any, input_ids: Tensor, other: Scorer | None = None, cache: Any = None
    ) -> None:
        if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] < 2:
            raise ValueError(
                f"input_ids has shape {list(input_ids.shape)}; expected [1, prompt tokens], two of "
                "them at least"
            )
        self.model = model
        self.ids = input_ids.to(model.device)
        self._cache_name = cache_name(model)
        self._cache: Any = None
        # What the last method that changes the prompt's keys has made of all but its last token.
        self._steered: tuple[Provenance, Any] | None = None
        # Such rotations depend on the length of a pass, so that a shared prefix would differ.
        self._shares = not rotates_by_length(model)
        if self._shares:
            self._prefill(other, cache)

    @torch.no_grad()
    def score(
        self,
        method: Method,
        anchors: Tensor | None,
        answers: Sequence[Sequence[int]],
        reply_tokens: int = 0,
    ) -> Scored:
        """Score answers, each as what follows the prompt.

        Args:
            method: the method; `NoSteering` with anchors measures what they get unsteered.
            anchors: bool [1, prompt]; None, or nothing anchored, for the unsteered model.
            answers: token ids of each answer, none empty.
            reply_tokens: also reply greedily, with at most this many tokens.

        Returns:
            Log-probabilities, attention on the anchors and the reply.

        Raises:
            ValueError: an answer is empty, or the method cannot steer this model or prompt.
        """
        if not all(answers):
            raise ValueError("an answer has no token; expected one at least")
        anchors = check_anchors(anchors, method)
        if anchors is None:
            method = NoSteering()
        cache = self._own_cache(method, anchors)
        held = 0 if cache is None else int(cache.get_seq_length())
        measure = anchors is not None
        with attach(self.model, method, anchors, measure=measure) as steering:
            logits, cache = self._run(self.ids[:, held:], cache, keep=1)
            mass = None
            if measure and steering.attention is not None:
                mass = float(steering.attention.measured_mass().mean())
            scores = tuple(self._answer(logits[-1], answer, cache) for answer in answers)
            reply = self._reply(logits[-1], cache, reply_tokens) if reply_tokens else ()
        return Scored(scores, mass, reply)

    # -- passes ------------------------------------------------------------------------------------

    def _run(self, ids: Tensor, cache: Any, keep: int = 0) -> tuple[Tensor, Any]:
        """Run tokens behind a cache: float32 logits [kept, vocabulary] and the grown cache."""
        given = {} if cache is None else {self._cache_name: cache}
        out = self.model(ids, use_cache=True, logits_to_keep=keep, **given)
        return out.logits[0].float(), next(out[name] for name in CACHE_NAMES if name in out)

    def _answer(self, first: Tensor, answer: Sequence[int], cache: Any) -> tuple[float, ...]:
        ids = torch.tensor([list(answer)], device=self.ids.device)
        logits = first[None]
        if len(answer) > 1:
            # On a copy: the next answer follows the prompt too.
            rest, _ = self._run(ids[:, :-1], copy.deepcopy(cache))
            logits = torch.cat([logits, rest])
        chances = logits.log_softmax(dim=-1).gather(1, ids[0, :, None].to(logits.device))
        return tuple(chances[:, 0].tolist())

    def _reply(self, first: Tensor, cache: Any, most: int) -> tuple[int, ...]:
        ends = self.model.generation_config.eos_token_id
        ends = set(ends) if isinstance(ends, list) else {ends}
        cache = copy.deepcopy(cache)
        reply = [int(first.argmax())]
        while len(reply) < most and reply[-1] not in ends:
            logits, cache = self._run(torch.tensor([reply[-1:]], device=self.ids.device), cache)
            reply.append(int(logits[-1].argmax()))
        return tuple(reply)

    # -- what is shared ----------------------------------------------------------------------------

    @torch.no_grad()
    def _prefill(self, other: Scorer | None, cache: Any) -> None:
        """Run all of the prompt but its last token unsteered, going on from what there is."""
        length = self.ids.shape[1] - 1
        if other is not None and other._cache is not None:
            both = min(length, other.ids.shape[1] - 1)
            same = (self.ids[0, :both] == other.ids[0, :both]).long()
            cache = _first(other._cache, int(same.cumprod(0).sum()))
        held = 0 if cache is None else int(cache.get_seq_length())
        if held < length:
            _, cache = self._run(self.ids[:, held:length], cache, keep=1)
        self._cache = cache

    def _own_cache(self, method: Method, anchors: Tensor | None) -> Any:
        """Return a cache of all but the last prompt token as the method makes it, to be written to.

        None where nothing can be shared.
        """
        if not self._shares:
            return None
        length = self.ids.shape[1] - 1
        plans = layer_plans(method, self.model.config.get_text_config(decoder=True))
        steering = Provenance.of(method, plans, anchors)
        if not steering.changes(length):
            return copy.deepcopy(self._cache)
        assert steering.start is not None
        if self._steered is None or not self._steered[0].equals(steering, length):
            cache = _first(self._cache, steering.start)
            # Given even if empty: these are the first tokens of the prompt, not all of it.
            cache = empty_cache(self.model) if cache is None else cache
            held = int(cache.get_seq_length())
            with attach(self.model, method, anchors):
                _, cache = self._run(self.ids[:, held:length], cache, keep=1)
            self._steered = steering, cache
        return copy.deepcopy(self._steered[1])


def _first(cache: Any, length: int) -> Any:
    """Return a copy of a cache's first tokens; None if that is nothing, or it cannot be cut."""
    if length >= int(cache.get_seq_length()):
        return copy.deepcopy(cache)
    # A sliding window has forgotten what would have to be taken up again.
    if length == 0 or any(getattr(layer, "is_sliding", False) for layer in cache.layers):
        return None
    cut = copy.deepcopy(cache)
    cut.crop(length - int(cache.get_seq_length()))
    return cut
