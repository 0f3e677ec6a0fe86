"""Who competes for a whole reply: every contender runs the model's own `generate`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.discussion import Prompt, first_run

SPA_STRENGTH = 1.4
BIAS = 2.0
# Prompts times tokens up to which everyone takes part; beyond, only those that bars are about.
EVERYONE_UP_TO = 2048
# Tokens up to which PASTA's dense masks, one for every layer and head, stay below a gigabyte.
PASTA_UP_TO = 2048


@dataclass(frozen=True)
class Case:
    """One piece of work: a model, a prompt and its anchors.

    Args:
        model: a transformers causal language model in evaluation mode.
        tokenizer: its tokenizer.
        prompt: the prompt.
        anchors: bool [rows, tokens].
        dtype: "fp32" or "bf16", the model's.
        work: how rows name it.
        everyone: whether all contenders take part, or only those Radar's bars are about.
    """

    model: Any
    tokenizer: Any
    prompt: Prompt
    anchors: Tensor
    dtype: str
    work: str
    everyone: bool = True

    @property
    def batch(self) -> int:
        """How many prompts are answered at once."""
        return self.prompt.input_ids.shape[0]

    @property
    def share_after_first_anchor(self) -> float:
        """The share of the prompt that follows its first anchored token, which is included."""
        return 1.0 - int(self.anchors[0].int().argmax()) / self.prompt.tokens


@dataclass(frozen=True)
class Target:
    """What a contender claims to compute: `strength * full + (1 - strength) * hidden`.

    Args:
        strength: 1 for no second branch.
        bias: added to the attention logits of anchored keys.
        few_heads: whether the bias is PASTA's: on the heads of `peers.pasta_heads` alone, for the
            first run of the anchors, and on what is generated too.
        edits_keys: whether anchored keys are edited as `seka` does.
    """

    strength: float = 1.0
    bias: float = 0.0
    few_heads: bool = False
    edits_keys: bool = False

    @property
    def amplification(self) -> float:
        """How much the blend enlarges rounding errors of its two branches."""
        return abs(self.strength) + abs(self.strength - 1.0)

    @property
    def is_steered(self) -> bool:
        """Whether the anchors matter, so that each position of theirs is work of its own."""
        return self != Target()

    def anchors(self, case: Case) -> Tensor:
        """Return the anchors that count: bool [rows, tokens]."""
        return first_run(case.anchors) if self.few_heads else case.anchors


def anywhere(case: Case) -> str | None:
    """Say that a contender can do every work."""
    return None


@dataclass(frozen=True)
class Contender:
    """Somebody's way to generate a reply.

    Args:
        generate: (case, **options of generate) -> what `model.generate` returns.
        target: what the result must be; None where only the released package knows.
        twin: the contender that must give the same tokens and probabilities (in fp32).
        cannot: (case) -> why it cannot do the work, None if it can.
    """

    generate: Callable[..., Any]
    target: Target | None = None
    twin: str | None = None
    cannot: Callable[[Case], str | None] = anywhere


def contenders() -> dict[str, Contender]:
    """Return everyone who can run here, by provider name, each after its twin.

    Returns:
        Providers, without the packages that `peers.absent` names.
    """
    from radar_core import SPA, AttentionBias, NoSteering

    spa = Target(strength=SPA_STRENGTH)
    few = Target(bias=-math.log(peers.ALPHA), few_heads=True)
    found = {
        "unsteered": Contender(generate, Target()),
        "radar-unsteered": Contender(_radar(NoSteering()), Target(), twin="unsteered"),
        "radar-bias": Contender(_radar(AttentionBias(BIAS)), Target(bias=BIAS)),
        "radar-seka": Contender(_radar(seka), Target(edits_keys=True), cannot=_keys_of_its_own),
        "transformers-cfg": Contender(_guidance, spa, cannot=_too_large),
        "radar-spa": Contender(_radar(SPA(SPA_STRENGTH)), spa, twin="transformers-cfg"),
        "anchoring": Contender(_anchoring, cannot=_several_or_no_text),
        "pastalib": Contender(_pastalib, few, cannot=_unknown_to_pastalib),
        "radar-pasta": Contender(radar_pasta(few), few, "pastalib", _unknown_to_pastalib),
    }
    missing = peers.absent()
    if "pastalib" in missing:
        missing["radar-pasta"] = "there is nobody to compare it with"
    return {name: one for name, one in found.items() if name not in missing}


def generate(case: Case, **options: Any) -> Any:
    """Generate greedily as users do: the model's own attention, one dynamic cache.

    Args:
        case: the work.
        options: further arguments of `model.generate`.

    Returns:
        What `model.generate` returns.
    """
    ids = case.prompt.input_ids
    arguments = {"attention_mask": torch.ones_like(ids), "do_sample": False, **options}
    return case.model.generate(input_ids=ids, **arguments)


@functools.lru_cache(maxsize=2)
def seka(model: Any) -> Any:
    """Return SEKA on random directions, since what they are makes no difference to the time.

    Args:
        model: whose keys are to be edited, in every layer.

    Returns:
        The method.
    """
    from radar_core import SEKA
    from radar_core.methods.projections import Projections, Subspace

    config = model.config
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    generator = torch.Generator().manual_seed(0)

    def subspace() -> Subspace:
        with torch.inference_mode(False):
            random = torch.randn(layers, heads, size, size, generator=generator)
            vectors = torch.linalg.qr(random)[0].contiguous()
            values = (0.9 ** torch.arange(size)).expand(layers, heads, size)
        return Subspace(vectors, values)

    distance = torch.ones(layers, heads)
    projections = Projections(
        model_type=config.model_type,
        num_layers=layers,
        layers=tuple(range(layers)),
        tokens=1,
        positive=subspace(),
        negative=subspace(),
        difference=subspace(),
        mean_distance=distance,
        frobenius_distance=distance,
    )
    return SEKA(projections)


def radar_pasta(target: Target) -> Callable[..., Any]:
    """Return Radar's way to generate under PASTA.

    Args:
        target: says which anchors count.
    """

    def method(model: Any) -> Any:
        from radar_core import PASTA

        return PASTA(peers.ALPHA, heads=peers.pasta_heads(model), keep_generated=True)

    return _radar(method, target)


def _radar(method: Any, target: Target | None = None) -> Callable[..., Any]:
    """Return a contender's way to generate under a method, or what makes it for a model."""

    def steered(case: Case, **options: Any) -> Any:
        steering = method(case.model) if callable(method) else method
        anchors = case.anchors if target is None else target.anchors(case)
        with steering.applied_to(case.model, anchors=anchors):
            return generate(case, **options)

    return steered


def _guidance(case: Case, **options: Any) -> Any:
    return generate(
        case,
        guidance_scale=SPA_STRENGTH,
        negative_prompt_ids=case.prompt.input_ids,
        negative_prompt_attention_mask=(~case.anchors).long(),
        **options,
    )


def _anchoring(case: Case, **options: Any) -> Any:
    processor = peers.anchoring_processor(case, SPA_STRENGTH)
    return generate(case, logits_processor=[processor], **options)


def _pastalib(case: Case, **options: Any) -> Any:
    with peers.pastalib(case):
        return generate(case, **options)


# -- what they cannot do ---------------------------------------------------------------------------


def _too_large(case: Case) -> str | None:
    if case.batch * case.prompt.tokens > EVERYONE_UP_TO:
        return f"left out beyond {EVERYONE_UP_TO} tokens, which it would take very long for"
    return None


def _several_or_no_text(case: Case) -> str | None:
    if case.batch > 1 or case.tokenizer is None:
        return "it answers one prompt, given as text"
    return _too_large(case)


def _keys_of_its_own(case: Case) -> str | None:
    layers = getattr(case.model.base_model, "layers", None)
    if layers is None or not hasattr(getattr(layers[0], "self_attn", None), "k_proj"):
        return f"the check does not find the keys of {type(case.model).__name__}"
    return None


def _unknown_to_pastalib(case: Case) -> str | None:
    if not peers.knows(case.model):
        return f"pastalib knows no {type(case.model).__name__}"
    if case.prompt.tokens > PASTA_UP_TO:
        return f"left out beyond {PASTA_UP_TO} tokens, whose dense masks take gigabytes"
    return None
