"""Drawing tokens by Radar's own operator inside transformers' `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from radar_core.hooks.prompts import call_arguments
from radar_core.hooks.undo import Undo
from radar_kernels import sample_logits

# What the operator does itself, in its order, and what it and transformers call the parameter.
FUSED: dict[type, str] = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}


class RadarSampler(LogitsProcessor):
    """Draws the next token by `radar_kernels.sample_logits` and leaves `generate` no other.

    Args:
        seed: int64 on the model's device; 0-dim, where row i draws with seed + i, or [B].
        **parameters: temperature, top_k, top_p and min_p, as `sample_logits` takes them.
    """

    def __init__(self, seed: Tensor, **parameters: Any) -> None:
        self.seed = seed
        self.parameters = parameters
        self._start: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        length = input_ids.shape[1]
        if self._start is None:
            self._start = length
        tokens = sample_logits(
            scores, seed=self.seed, offset=length - self._start, **self.parameters
        )
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)


def sample_with_radar(model: Any, seed: int | Sequence[int] | None, undo: Undo) -> None:
    """Let a model's `generate` draw by `sample_logits` wherever it would sample.

    transformers decides by itself what it would do to the logits; where that is no more than
    temperature, top-k, top-p and min-p, one operator does all of it, without a sort.

    Args:
        model: a transformers model.
        seed: of the draws, or one for each row; None takes one from torch's generator.
        undo: is told how to end this.

    Raises:
        ValueError: in `generate`, where something else is to be done to the logits, or beams are
            sampled.
    """
    prepare = model._get_logits_processor

    def prepared(*args: Any, **kwargs: Any) -> Any:
        config = call_arguments(prepare, args, kwargs)["generation_config"]
        processors = prepare(*args, **kwargs)
        if not config.do_sample:
            return processors
        parameters = fused_parameters(processors)
        if config.num_beams > 1:
            raise ValueError(
                f"num_beams is {config.num_beams}, but Radar's sampler draws single sequences; use "
                'num_beams=1, or sampler="transformers"'
            )
        device = model.device
        drawn = (
            torch.randint(2**62, (), device=device)
            if seed is None
            else torch.tensor(seed, device=device)
        )
        # One token is left to choose from, so choosing it needs no draw.
        config.do_sample = False
        return LogitsProcessorList([RadarSampler(drawn, **parameters)])

    def put_back() -> None:
        if vars(model).get("_get_logits_processor") is prepared:
            del model._get_logits_processor

    undo.add(put_back)
    model._get_logits_processor = prepared


def fused_parameters(processors: Sequence[Any]) -> dict[str, Any]:
    """Return what transformers' own processors do, as arguments of `sample_logits`.

    Raises:
        ValueError: one of them does something that `sample_logits` does not, or in another order.
    """
    kinds = [type(processor) for processor in processors]
    for kind in kinds:
        if kind not in FUSED:
            raise ValueError(
                f"{kind.__name__} is active, but Radar's sampler does temperature, top_k, top_p "
                'and min_p only; turn it off, or use sampler="transformers"'
            )
    if kinds != [kind for kind in FUSED if kind in kinds]:
        raise ValueError(
            f"the logits processors are {[kind.__name__ for kind in kinds]}, but Radar's sampler "
            "applies temperature, top_k, top_p and min_p once each and in this order; use "
            'sampler="transformers"'
        )
    return {FUSED[type(one)]: getattr(one, FUSED[type(one)]) for one in processors}
