"""Selective prompt anchoring: two branches, one of which cannot see the anchors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from radar_core.checks import is_whole
from radar_core.methods.method import check_flag
from radar_core.methods.two_branch import TwoBranch
from radar_kernels import blend_logits

Masking = Literal["attention", "embedding"]
Branch = Literal["second", "direct"]
Reference = Literal["anchoring-0.1.0"]


@dataclass(frozen=True, repr=False)
class SPA(TwoBranch):
    """Move the logits away from what the model would say without seeing the anchors.

    Args:
        strength: number from -1000 to 1000, or one for each prompt (a sequence, or a tensor or
            array of them). 1 is off (no second branch runs), above 1 emphasises the anchors, 0
            ignores them, below 0 reverses them. All anchors of a prompt share it: a token is
            hidden from the second branch or not.
        guard: leave tokens alone of which the unsteered model is sure: a probability such as 0.9,
            or a `Guard`; None for never.
        masking: how the second branch loses the anchors: "attention" lets no token attend to them;
            "embedding" puts the embedding of a mask token in the place of each, as the paper does.
            Positions are kept either way.
        modulated: weight each token's move by its probability over the largest one, as the
            released package does by default (it wants strengths up to 20 then).
        branch: "second" hides the anchors from the whole second branch. "direct" hides them only
            from the tokens that predict the answer (positions >= prompt length - 1), so that
            both branches share the prompt, which runs once (its keys are then copied for each).
        mask_token_id: the token that "embedding" puts in; None takes the tokenizer's mask token
            (the model config's where there is no tokenizer), else the padding token, else the
            end token; `Steering.method` says which.
        reference: "anchoring-0.1.0" gives the released package's own numbers on a single prompt,
            at its cost (two passes a token), with "attention" for its `use_attention_mask=True`
            and `modulated` for its `modulated_by_prob`: a second, shorter prompt with one
            placeholder for every occurrence of an anchor's text, hidden from the prompt's pass
            only, blended among `generate`'s logits processors. None for Radar's own.
        tokenizer: the model's; where the mask token is looked up, and what `reference` needs;
            `Steered` gives its own.

    Raises:
        ValueError: an argument is malformed, or two of them cannot be combined.

    Formula: `strength * logits(full) + (1 - strength) * logits(anchors hidden)`; positions of
    hidden tokens are kept. Source: Tian and Zhang, ICML 2025 (arXiv 2408.09121). Equal to
    classifier-free guidance with `guidance_scale = strength` and the masked prompt as the
    unconditional one.
    """

    masking: Masking = field(default="attention", kw_only=True)
    modulated: bool = field(default=False, kw_only=True)
    branch: Branch = field(default="second", kw_only=True)
    mask_token_id: int | None = field(default=None, kw_only=True)
    reference: Reference | None = field(default=None, kw_only=True)
    tokenizer: Any = field(default=None, kw_only=True, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.masking not in ("attention", "embedding"):
            raise ValueError(f'masking is {self.masking!r}; expected "attention" or "embedding"')
        if self.branch not in ("second", "direct"):
            raise ValueError(f'branch is {self.branch!r}; expected "second" or "direct"')
        check_flag("modulated", self.modulated)
        token = self.mask_token_id
        if token is not None:
            if not is_whole(token) or token < 0:
                raise ValueError(f"mask_token_id is {token!r}; expected the id of a token")
            if self.masking != "embedding":
                raise ValueError(
                    f"mask_token_id is {token}, but masking is {self.masking!r}, which hides "
                    'anchors from attention; pass masking="embedding"'
                )
        if self.branch == "direct" and self.masking == "embedding":
            raise ValueError(
                'branch is "direct", whose branches share the prompt, but masking is "embedding", '
                'which gives the second one other tokens; pass masking="attention"'
            )
        self._check_reference()

    def _check_reference(self) -> None:
        if self.reference is None:
            return
        if self.reference != "anchoring-0.1.0":
            raise ValueError(f'reference is {self.reference!r}; expected "anchoring-0.1.0" or None')
        beyond = {
            "guard": self.guard is not None,
            "mask_token_id": self.mask_token_id is not None,
            'branch="direct"': self.branch == "direct",
            "a strength for each of several prompts": len(self.strengths()) > 1,
        }
        for name, given in beyond.items():
            if given:
                raise ValueError(
                    f"reference is {self.reference!r}, and that package knows no {name}; leave one "
                    "of them out"
                )

    @property
    def needs_logits(self) -> bool:
        return self.modulated or super().needs_logits

    def blend(self, first: Tensor, second: Tensor, strength: Tensor) -> Tensor:
        blended = blend_logits(first, second, strength, modulated=self.modulated)
        return self.guarded(first, blended)

    def for_tokenizer(self, tokenizer: Any) -> SPA:
        if tokenizer is None or self.tokenizer is not None:
            return self
        return replace(self, tokenizer=tokenizer)

    def settled(self, config: Any) -> SPA:
        """Return the method with its mask token settled for a model.

        Args:
            config: the model's text configuration.

        Raises:
            ValueError: there is no mask, padding or end token, or it is not in the vocabulary.
        """
        if self.masking != "embedding" or self.reference is not None:
            return self
        token = self.mask_token_id
        if token is None:
            token = _mask_token(self.tokenizer, config)
        if token >= config.vocab_size:
            raise ValueError(
                f"mask_token_id is {token}, but the model's vocabulary has {config.vocab_size} "
                "tokens; expected one of them"
            )
        return replace(self, mask_token_id=token)


def _mask_token(tokenizer: Any, config: Any) -> int:
    """Return the mask, else padding, else end token of a tokenizer, else of a model's config."""
    names = ("mask_token_id", "pad_token_id", "eos_token_id")
    for source in (tokenizer, config):
        for name in names:
            token = getattr(source, name, None)
            if isinstance(token, list):  # several end tokens
                token = token[0]
            if token is not None:
                return token
    raise ValueError(
        f"neither the tokenizer nor the model knows any of {list(names)}; pass mask_token_id="
    )
