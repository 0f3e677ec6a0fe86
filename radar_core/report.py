"""What steering did to a run: which layers it reached, and how far it moved the model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from radar_core.hooks.attachment import attach, steered_layers
from radar_core.methods import Method, NoSteering
from radar_core.methods.two_branch import TwoBranch


@dataclass(frozen=True)
class LayerReport:
    """What steering did to one layer.

    Args:
        layer: its index.
        calls: how often its attention ran, or, for methods that edit keys, how often its keys were
            edited: once for each pass over the prompt, never while decoding.
        mass_before: share of the last prompt token's attention that the anchors get unsteered, mean
            over heads and prompts.
        mass_after: the same, steered. SPA leaves it as it is in the branch that sees the anchors.
    """

    layer: int
    calls: int
    mass_before: float
    mass_after: float


@dataclass(frozen=True)
class Report:
    """What steering did to a run; print it for a table.

    Args:
        model: class of the model.
        method: the method, as Python would make it.
        seconds: how long the run took.
        prompts: number of prompts.
        prompt_tokens: tokens of all prompts, padding left out.
        anchor_tokens: how many of them are anchored.
        layers: every layer that is steered.
        divergence: for each reply and each of its first tokens, KL(steered || unsteered) of the
            distributions that the token was chosen from, in nats.
    """

    model: str
    method: str
    seconds: float
    prompts: int
    prompt_tokens: int
    anchor_tokens: int
    layers: tuple[LayerReport, ...]
    divergence: tuple[tuple[float, ...], ...]

    @property
    def mean_divergence(self) -> float:
        """Mean of `divergence` over all replies' tokens, in nats."""
        return fmean(value for row in self.divergence for value in row)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON."""
        return asdict(self) | {"mean_divergence": self.mean_divergence}

    def __str__(self) -> str:
        lines = [*self._summary(), "", "layer  calls  anchors' share before   after"]
        lines += [
            f"{one.layer:5d}  {one.calls:5d}  {one.mass_before:22.1%}  {one.mass_after:6.1%}"
            for one in self.layers
        ]
        return "\n".join(lines)

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table(title="\n".join(self._summary()), title_justify="left")
        for name in ("layer", "calls", "anchors' share before", "after"):
            table.add_column(name, justify="right")
        for one in self.layers:
            shares = f"{one.mass_before:.1%}", f"{one.mass_after:.1%}"
            table.add_row(str(one.layer), str(one.calls), *shares)
        return table

    def _summary(self) -> list[str]:
        first = fmean(row[0] for row in self.divergence)
        tokens = max(map(len, self.divergence))
        return [
            f"{self.model} steered by {self.method} in {self.seconds:.2f} s",
            f"{self.anchor_tokens} of {self.prompt_tokens} prompt tokens anchored, prompts: "
            f"{self.prompts}",
            f"KL(steered || unsteered): {first:.3g} nats for the first token, "
            f"{self.mean_divergence:.3g} on average over {tokens}",
        ]


@dataclass(frozen=True)
class Run:
    """A steered run, kept to be reported on.

    Args:
        inputs: what `generate` was called with, `input_ids` or `inputs_embeds` among it.
        anchors: bool or float [prompts, tokens].
        calls: how often each layer was called.
        seconds: how long it took.
        output: what `generate` returned.
    """

    inputs: Mapping[str, Any] = field(repr=False)
    anchors: Tensor = field(repr=False)
    calls: dict[int, int]
    seconds: float
    output: Any = field(repr=False)

    @property
    def prompt(self) -> Tensor:
        """The prompts' ids or embeddings [prompts, tokens, ...]."""
        ids = self.inputs.get("input_ids")
        return self.inputs["inputs_embeds"] if ids is None else ids

    @property
    def reply(self) -> Tensor:
        """What was generated: int64 [replies, tokens]."""
        sequences = self.output if isinstance(self.output, Tensor) else self.output.sequences
        ids = self.inputs.get("input_ids")
        return sequences if ids is None else sequences[:, ids.shape[1] :]


def report_on(model: Any, method: Method, run: Run, reply_tokens: int) -> Report:
    """See `Steered.report`."""
    hooked = steered_layers(model, method)
    silent = [layer for layer in hooked if not run.calls.get(layer)]
    if silent:
        raise RuntimeError(
            f"layers {silent} of {type(model).__name__} were hooked but never called, so the reply "
            "was not steered there"
        )
    mask = run.inputs.get("attention_mask")
    if mask is not None and mask.dim() != 2:
        raise ValueError(
            f"the run's attention_mask is {list(mask.shape)}; only runs with the usual [prompts, "
            "tokens], or none, can be reported on"
        )
    reply = run.reply[:, :reply_tokens]
    after, steered = _measure(model, method, run, reply)
    before, plain = _measure(model, NoSteering(), run, reply)
    anchored = run.anchors.bool().any(dim=1).to(before.device)
    return Report(
        model=type(model).__name__,
        method=repr(method),
        seconds=run.seconds,
        prompts=run.prompt.shape[0],
        prompt_tokens=int(
            run.prompt.shape[0] * run.prompt.shape[1] if mask is None else mask.sum()
        ),
        anchor_tokens=int(run.anchors.bool().sum()),
        layers=tuple(
            LayerReport(
                layer,
                run.calls[layer],
                float(before[anchored, layer].mean()),
                float(after[anchored, layer].mean()),
            )
            for layer in hooked
        ),
        divergence=_divergence(steered, plain, _lengths(model, run, reply)),
    )


@torch.no_grad()
def _measure(model: Any, method: Method, run: Run, reply: Tensor) -> tuple[Tensor, Tensor]:
    """Read a run's prompts and replies once more.

    Returns:
        The anchors' share of the last prompt token's attention [prompts, layers, heads], and the
        logits of every token of the reply [replies, tokens, vocabulary].
    """
    copies = reply.shape[0] // run.prompt.shape[0]
    taken = inspect.signature(model.forward).parameters
    inputs = {
        name: value.repeat_interleave(copies, dim=0)
        for name, value in run.inputs.items()
        if name in taken and isinstance(value, Tensor) and value.dim() > 1
    }
    length = run.prompt.shape[1]
    mask = inputs.get("attention_mask")
    if mask is None:
        mask = torch.ones(reply.shape[0], length, dtype=torch.long, device=reply.device)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    if "position_ids" in taken:
        inputs.setdefault("position_ids", places)
    anchors = run.anchors.repeat_interleave(copies, dim=0)
    with attach(model, _for_copies(method, copies), anchors, measure=True) as steering:
        read = model(**inputs, use_cache=True, logits_to_keep=1)
        assert steering.attention is not None
        mass = steering.attention.measured_mass()[::copies]
        logits = [read.logits[:, -1:]]
        if reply.shape[1] > 1:
            name = "cache" if "cache" in taken else "past_key_values"
            cache = read.cache if hasattr(read, "cache") else read.past_key_values
            new = reply[:, :-1]
            rest: dict[str, Any] = {"input_ids": new, name: cache}
            rest["attention_mask"] = torch.cat([mask, torch.ones_like(new)], dim=1)
            if "position_ids" in taken:
                steps = torch.arange(1, reply.shape[1], device=places.device)
                rest["position_ids"] = places[:, -1:] + steps
            logits.append(model(**rest).logits)
    return mass, torch.cat(logits, dim=1)


def _for_copies(method: Method, copies: int) -> Method:
    """Return a method whose strengths, where each prompt has its own, serve each one's copies."""
    if copies == 1 or not isinstance(method, TwoBranch) or len(method.strengths()) == 1:
        return method
    return replace(method, strength=[s for s in method.strengths() for _ in range(copies)])


def _lengths(model: Any, run: Run, reply: Tensor) -> list[int]:
    """Return how many tokens of each reply are its own, the one that ends it included."""
    ends = run.inputs.get("eos_token_id", model.generation_config.eos_token_id)
    if ends is None:
        return [reply.shape[1]] * reply.shape[0]
    listed = torch.as_tensor(ends, device=reply.device).flatten()
    ended = torch.isin(reply, listed).cumsum(1)
    return ((ended == 0).sum(1) + (ended > 0).any(1)).tolist()


def _divergence(
    steered: Tensor, plain: Tensor, lengths: list[int]
) -> tuple[tuple[float, ...], ...]:
    """Return KL(steered || plain) of logits [rows, tokens, vocabulary] over each row's tokens."""
    rows = []
    for ours, own, length in zip(steered, plain, lengths, strict=True):
        p = ours[:length].double().log_softmax(-1)
        q = own[:length].double().log_softmax(-1)
        terms = torch.where(p.exp() > 0, p.exp() * (p - q), 0.0)
        rows.append(tuple(terms.sum(-1).clamp(min=0).tolist()))
    return tuple(rows)
