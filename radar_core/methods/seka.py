"""Steering by edited keys: SEKA, AdaSEKA and PRISM, and learning what they project on.

projections = seka.learn(model, tokenizer, examples)
projections.save("keys.safetensors")
with SEKA(seka.load("keys.safetensors", model)).applied_to(model, anchors):
    ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, ClassVar

import torch
from torch import Tensor

from radar_core.checks import is_whole
from radar_core.methods.key_edit import (
    KeyEdit,
    check_gain,
    check_projections,
    check_range,
    chosen_layers,
)
from radar_core.methods.method import Layers, check_flag
from radar_core.methods.projections import Projections, read
from radar_kernels import edit_keys

__all__ = ["PRISM", "SEKA", "AdaSEKA", "Contrast", "KeyEdit", "Projections", "learn", "load"]


@dataclass(frozen=True)
class Contrast:
    """One example to learn from: a text, and what makes a part of it matter or not.

    Args:
        context: a text.
        answer: a part of it that occurs once, whose keys are looked at.
        relevant: a question that it answers.
        irrelevant: a question that it does not answer.
    """

    context: str
    answer: str
    relevant: str
    irrelevant: str


class MatrixEdit(KeyEdit):
    """Multiply each head's anchored keys by a matrix of what one `Projections` learned."""

    projections: Projections
    variance: float
    least_distance: float
    layers: Layers

    def _check(self) -> None:
        check_projections("projections", self.projections)
        check_range("variance", self.variance, 1e-6, 1.0)
        check_range("least_distance", self.least_distance, 0.0, float("inf"))
        chosen_layers(self.projections, self.layers)

    @property
    def learned(self) -> tuple[Projections, ...]:
        return (self.projections,)

    @property
    def steered_layers(self) -> tuple[int, ...]:
        return chosen_layers(self.projections, self.layers)

    def edit(self, layer: int, key: Tensor, anchors: Tensor, query: Tensor | None) -> Tensor:
        (matrix,) = self.placed(layer, key.device)
        return edit_keys(key, anchors, matrix, 1.0)


@dataclass(frozen=True)
class SEKA(MatrixEdit):
    """Amplify, in the keys of anchored tokens, what keys of relevant tokens have in common.

    The keys are edited once, when the prompt is read; decoding costs nothing.

    Args:
        projections: from `learn` or `load`.
        positive_gain: number from -1000 to 1000 on the relevant directions.
        negative_gain: the same on the directions that irrelevant tokens lack.
        variance: share of the singular values, in (0, 1], that the kept directions hold.
        least_distance: heads whose keys move less between a relevant and an irrelevant question, on
            average, are left alone; 0 leaves none.
        layers: layers to edit: None (all that were learned) or a sequence; negative indices count
            from the top. The paper's runs edit the last ten.

    Raises:
        ValueError: an argument is malformed, or nothing was learned for one of the layers.

    Formula: `k' = k + (g+ P+ k + g- P- k) / 2`, with P+ on the first directions of `H^T H+` and P-
    on the last ones of `H^T H-`. Source: Li et al., ICLR 2026 (arXiv 2603.01281); the distance is
    the paper's mean, not the released code's, which shrinks with the number of tokens.
    """

    projections: Projections
    positive_gain: float = 0.8
    negative_gain: float = 0.2
    variance: float = 0.9
    least_distance: float = 0.0
    layers: Layers = None

    def __post_init__(self) -> None:
        self._check()
        check_gain("positive_gain", self.positive_gain)
        check_gain("negative_gain", self.negative_gain)

    @property
    def is_identity(self) -> bool:
        return self.positive_gain == 0 and self.negative_gain == 0

    def tensors(self, layer: int) -> tuple[Tensor]:
        """Return what a layer adds to an anchored key: float32 [key_heads, D, D], `k @ matrix`."""
        found = self.projections
        index = found.index(layer)
        moved = self.positive_gain * found.positive.leading(index, self.variance)
        moved = moved + self.negative_gain * found.negative.trailing(index, self.variance)
        far = found.mean_distance[index] >= self.least_distance
        return (moved / 2 * far[:, None, None],)


@dataclass(frozen=True)
class PRISM(MatrixEdit):
    """Amplify, in the keys of anchored tokens, what relevance changes in a key.

    Args:
        projections: from `learn` or `load`.
        gain: number from -1000 to 1000.
        variance: as in `SEKA`.
        least_distance: what is taken off each head's distance before it becomes its weight.
        layers: as in `SEKA`.

    Raises:
        ValueError: as in `SEKA`.

    Formula: `k' = k + g softplus(D - d) P k` with P on the first directions of `H^T (H+ - H-)`, d
    the least distance and D = `||H+ - H-||_F / n` for each head. Source: PRISM-Delta (arXiv
    2603.10705), its edit of keys; values are left alone.
    """

    projections: Projections
    gain: float = 0.4
    variance: float = 0.998
    least_distance: float = 0.08
    layers: Layers = None

    def __post_init__(self) -> None:
        self._check()
        check_gain("gain", self.gain)

    @property
    def is_identity(self) -> bool:
        return self.gain == 0

    def tensors(self, layer: int) -> tuple[Tensor]:
        """Return what a layer adds to an anchored key: float32 [key_heads, D, D], `k @ matrix`."""
        found = self.projections
        index = found.index(layer)
        far = found.frobenius_distance[index] - self.least_distance
        weight = self.gain * torch.nn.functional.softplus(far)
        return (weight[:, None, None] * found.difference.leading(index, self.variance),)


@dataclass(frozen=True)
class AdaSEKA(KeyEdit):
    """Amplify, in the keys of anchored tokens, the directions of the expert that the query asks.

    Each prompt's weights come from its own last token, in the pass that reads it: unlike in the
    released code, which reads every prompt twice and weighs a batch by its first row, nothing runs
    twice. The pass must hold the prompt's last token and all anchors, so not a prefill in chunks.

    Args:
        experts: Projections learned from different kinds of examples, of one model and for the same
            layers; one expert's weight can only be 1 or -1.
        gain: number from -1000 to 1000.
        rank: how many of each expert's directions are used.
        least_distance: as in `SEKA`.
        layers: as in `SEKA`.

    Raises:
        ValueError: as in `SEKA`, or the experts are of different models or layers.

    Formula: `k' = k + g sum_m a_m U_m U_m^T k` with `a_m = sum_r (q . u_m^r) s_m^r / max |a|`, U_m
    the first `rank` directions of expert m's `H^T H+`, s their singular values, and q the last
    token's normalised query, averaged over the heads that share a key head. Source: Li et al., ICLR
    2026 (arXiv 2603.01281); a direction's sign, which that leaves open, is `Subspace`'s.
    """

    experts: tuple[Projections, ...] = field()
    gain: float = 1.0
    rank: int = 5
    least_distance: float = 0.0
    layers: Layers = None

    needs_query: ClassVar[bool] = True

    def __post_init__(self) -> None:
        experts = self.experts
        experts = (experts,) if isinstance(experts, Projections) else experts
        if not isinstance(experts, Sequence) or not experts:
            raise ValueError(f"experts is {experts!r}; expected a sequence of Projections")
        for place, expert in enumerate(experts):
            check_projections(f"experts[{place}]", expert)
            first, other = experts[0].description(), expert.description()
            differs = [name for name in first if name != "tokens" and first[name] != other[name]]
            if differs:
                name = differs[0]
                raise ValueError(
                    f"experts[{place}] has {name} {other[name]}; expected {first[name]}, as "
                    "experts[0] has"
                )
        object.__setattr__(self, "experts", tuple(experts))
        check_gain("gain", self.gain)
        size = experts[0].head_size
        if not is_whole(self.rank) or not 1 <= self.rank <= size:
            raise ValueError(f"rank is {self.rank!r}; expected an int from 1 to {size}")
        check_range("least_distance", self.least_distance, 0.0, float("inf"))
        chosen_layers(experts[0], self.layers)

    @property
    def is_identity(self) -> bool:
        return self.gain == 0

    @property
    def learned(self) -> tuple[Projections, ...]:
        return self.experts

    @property
    def steered_layers(self) -> tuple[int, ...]:
        return chosen_layers(self.experts[0], self.layers)

    def tensors(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's directions [key_heads, D, experts, rank] and [.., experts, rank]."""
        vectors, values = [], []
        for expert in self.experts:
            index = expert.index(layer)
            far = expert.mean_distance[index] >= self.least_distance
            vectors.append(expert.positive.vectors[index, :, :, : self.rank])
            values.append(expert.positive.values[index, :, : self.rank] * far[:, None])
        return torch.stack(vectors, dim=2), torch.stack(values, dim=1)

    def weights(self, layer: int, query: Tensor) -> Tensor:
        """Return each expert's weight for each row: float32 [B, key_heads, experts]."""
        vectors, values = self.placed(layer, query.device)
        grouped = query.float().unflatten(1, (vectors.shape[0], -1)).mean(2)
        unit = torch.nn.functional.normalize(grouped, dim=-1)
        weights = torch.einsum("bhd,hdmr,hmr->bhm", unit, vectors, values)
        return weights / weights.abs().amax(-1, keepdim=True).clamp(min=1e-8)

    def edit(self, layer: int, key: Tensor, anchors: Tensor, query: Tensor | None) -> Tensor:
        assert query is not None
        vectors, _ = self.placed(layer, key.device)
        factors = self.weights(layer, query)[..., None].expand(-1, -1, -1, self.rank).flatten(2)
        flat = vectors.flatten(2)
        rows = [
            edit_keys(one[None], anchored[None], (flat, scale, flat), float(self.gain))
            for one, anchored, scale in zip(key, anchors, factors, strict=True)
        ]
        return torch.cat(rows)


_METHODS: dict[str, Callable[..., KeyEdit]] = {"SEKA": SEKA, "AdaSEKA": AdaSEKA, "PRISM": PRISM}


def load(path: str | PathLike[str], model: Any = None) -> Any:
    """Read what `Projections.save` or a method's `save` wrote.

    Args:
        path: a safetensors file.
        model: a transformers model; if given, the file must have been learned from its kind.

    Returns:
        `Projections`, or the method with the parameters that it was saved with.

    Raises:
        ValueError: it is no such file, is damaged, or does not fit the model; the message says what
            came and what was expected.
    """
    name, parameters, projections = read(path)
    if model is not None:
        from radar_core.hooks.keys import check_fits

        for one in projections:
            check_fits(one, model)
    if name == "Projections":
        return projections[0]
    if name not in _METHODS:
        raise ValueError(f"{path} holds the method {name!r}; expected one of {list(_METHODS)}")
    given = projections if name == "AdaSEKA" else projections[0]
    try:
        return _METHODS[name](given, **parameters)
    except TypeError:
        raise ValueError(
            f"{path} has parameters {sorted(parameters)}, which are not those of {name}"
        ) from None


def learn(
    model: Any,
    tokenizer: Any,
    examples: Iterable[Contrast | Sequence[str]],
    *,
    layers: Layers = None,
    chat: bool = False,
    progress: bool = True,
) -> Projections:
    """Learn what sets the keys of relevant tokens apart, from contrastive examples.

    Every example's answer is read three times: in its context alone, behind the relevant question
    and behind the irrelevant one ("Question: ...\\nContext: ..."). Keys are taken before rotary
    embedding, after a layer's own norm of keys. Memory does not grow with the examples.

    Args:
        model: a transformers causal language model in evaluation mode, as it will be steered.
        tokenizer: its tokenizer, a fast one.
        examples: `Contrast`s, or (context, answer, relevant, irrelevant); a hundred do.
        layers: layers to learn for: None (all) or a sequence; negative indices count from the top.
        chat: whether each text is put into the chat template, as a message of the user.
        progress: whether a bar is shown if it takes more than two seconds.

    Returns:
        What `SEKA`, `AdaSEKA` and `PRISM` project on; save it with `.save(path)`.

    Raises:
        ValueError: no examples; an answer is not exactly once in its context, or reads as other
            tokens behind another question; the model's keys cannot be reached.
        RuntimeError: the model is in training mode or is being steered.

    Source: Li et al., ICLR 2026 (arXiv 2603.01281), on synthetic questions.
    """
    from radar_core.hooks.key_statistics import collect

    check_flag("chat", chat)
    check_flag("progress", progress)
    made = [one if isinstance(one, Contrast) else _contrast(one) for one in examples]
    if not made:
        raise ValueError("examples is empty; expected at least one Contrast, better a hundred")
    return collect(model, tokenizer, made, layers, chat, progress)


def _contrast(parts: Sequence[str]) -> Contrast:
    if isinstance(parts, str) or len(parts) != 4 or not all(isinstance(p, str) for p in parts):
        raise ValueError(
            f"one of examples is {parts!r}; expected a Contrast or four texts: context, answer, "
            "relevant question, irrelevant question"
        )
    return Contrast(*parts)
