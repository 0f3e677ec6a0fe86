"""Who competes for a whole reply: every contender runs the model's own `generate`."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.discussion import Prompt, anchored_texts

SPA_STRENGTH = 1.4
BIAS = 2.0


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
    """

    strength: float = 1.0
    bias: float = 0.0

    @property
    def amplification(self) -> float:
        """How much the blend enlarges rounding errors of its two branches."""
        return abs(self.strength) + abs(self.strength - 1.0)

    @property
    def is_steered(self) -> bool:
        """Whether the anchors matter, so that each position of theirs is work of its own."""
        return self != Target()


@dataclass(frozen=True)
class Contender:
    """Somebody's way to generate a reply.

    Args:
        generate: (case, **options of generate) -> what `model.generate` returns.
        target: what the result must be; None where only the released package knows.
        twin: the contender that must give the same tokens and probabilities (in fp32).
        one_prompt: whether it can only answer one prompt, given as text.
    """

    generate: Callable[..., Any]
    target: Target | None = None
    twin: str | None = None
    one_prompt: bool = False

    def can(self, case: Case) -> bool:
        """Whether it can do the work at all."""
        return not self.one_prompt or (case.batch == 1 and case.tokenizer is not None)


def contenders() -> dict[str, Contender]:
    """Return everyone who can run here, by provider name, each after its twin.

    Returns:
        Providers; `anchoring` is missing when that package is not installed.
    """
    from radar_core import SPA, AttentionBias, NoSteering

    spa = Target(strength=SPA_STRENGTH)
    found = {
        "unsteered": Contender(generate, Target()),
        "radar-unsteered": Contender(_radar(NoSteering()), Target(), twin="unsteered"),
        "radar-bias": Contender(_radar(AttentionBias(BIAS)), Target(bias=BIAS)),
        "transformers-cfg": Contender(_guidance, spa),
        "radar-spa": Contender(_radar(SPA(SPA_STRENGTH)), spa, twin="transformers-cfg"),
    }
    if importlib.util.find_spec("anchoring"):
        found["anchoring"] = Contender(_anchoring, one_prompt=True)
    return found


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


def _radar(method: Any) -> Callable[..., Any]:
    def steered(case: Case, **options: Any) -> Any:
        with method.applied_to(case.model, anchors=case.anchors):
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
    return generate(case, logits_processor=[anchoring_processor(case)], **options)


def anchoring_processor(case: Case) -> Any:
    """Build the released SPA package's logits processor with the settings nearest to SPA.

    It finds the anchors as text and puts one placeholder in the place of each, so its second
    prompt is shorter than the first. A processor keeps its cache and serves one `generate` only.

    Args:
        case: the work.

    Returns:
        An `anchoring.SPALogitsProcessor`.

    Raises:
        ValueError: the tokenizer does not give back the prompt's tokens for its text.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from anchoring import SPALogitsProcessor, format_spa_input

    def encode(text: str) -> Tensor:
        return case.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids

    if not torch.equal(encode(case.prompt.text), case.prompt.input_ids):
        raise ValueError("the tokenizer does not give back the prompt's tokens for its text")
    placeholder = case.tokenizer.mask_token or "MASKTOKEN"
    _, replaced = format_spa_input(
        case.prompt.text,
        anchored_texts(case.tokenizer, case.prompt, case.anchors),
        placeholder,
        whole_word_only=False,
    )
    return SPALogitsProcessor(
        aux_model=case.model,
        aux_input_ids=encode(replaced),
        mask_token=placeholder,
        strength=SPA_STRENGTH,
        modulated_by_prob=False,
        tokenizer=case.tokenizer,
        use_attention_mask=True,
    )
