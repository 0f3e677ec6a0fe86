"""A second branch with a prompt of its own: classifier-free guidance and context-aware decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from radar_core.checks import is_number
from radar_core.methods.guard import Guard
from radar_core.methods.method import printed_as_called
from radar_core.methods.two_branch import TwoBranch

Rows = tuple[tuple[int, ...], ...]
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, repr=False)
class SecondPrompt(TwoBranch):
    """Move the logits away from what the model would say after another prompt.

    `CFG` and `CAD` make these. The other prompt may be shorter or longer; each keeps its own
    padding and positions, and what is generated follows both. Outside `generate`, the first pass
    is the prompt, later ones continue it, by its cache or by repeating it; only the last of a
    prompt's logits is steered, since the others have no counterpart.

    Args:
        strength: as in `TwoBranch`; above 1 moves away from the other prompt.
        guard: as in `TwoBranch`.
        prompt_ids: rows of token ids, one row for all prompts or one for each; None where the
            other prompt is made of the prompt itself.
        prompt_mask: rows of 0 and 1, 1 = may be attended to; None for all 1.
        removes_anchors: the other prompt is the prompt without its anchored tokens.
        context: (start, end) tokens to leave out, counted from each prompt's first real token;
            None for none.

    Without any of the last four the other prompt is the prompt's last token.

    Raises:
        ValueError: an argument is malformed.
    """

    prompt_ids: Rows | None = field(default=None, repr=False)
    prompt_mask: Rows | None = field(default=None, repr=False)
    removes_anchors: bool = False
    context: Spans | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt_ids is None:
            if self.prompt_mask is not None:
                raise ValueError("the other prompt has an attention mask, but no token ids")
        else:
            ids = _rows("the other prompt's ids", self.prompt_ids)
            object.__setattr__(self, "prompt_ids", ids)
            mask = self.prompt_mask
            if mask is None:
                mask = tuple((1,) * len(row) for row in ids)
            mask = _rows("the other prompt's attention mask", mask)
            if [len(row) for row in mask] != [len(row) for row in ids]:
                raise ValueError(
                    f"the other prompt has {len(ids)} rows of {len(ids[0])} tokens, but its "
                    f"attention mask {len(mask)} of {len(mask[0])}"
                )
            if any(value not in (0, 1) for row in mask for value in row):
                raise ValueError("the other prompt's attention mask has values besides 0 and 1")
            if not all(row[-1] for row in mask):
                raise ValueError(
                    "the other prompt's attention mask ends in 0, but the answer follows its last "
                    "token; pad on the left"
                )
            object.__setattr__(self, "prompt_mask", mask)
        if self.context is not None:
            object.__setattr__(self, "context", _spans(self.context))

    @property
    def needs_anchors(self) -> bool:
        return self.removes_anchors

    def left_out(self, seen: Tensor) -> Tensor:
        """Return which tokens of a prompt are its context: bool [B, prompt].

        Args:
            seen: bool [B, prompt], False where padded.

        Raises:
            ValueError: `context` reaches beyond a prompt.
        """
        assert self.context is not None
        place = seen.long().cumsum(1) - 1
        shortest = int(seen.sum(1).min())
        furthest = max(end for _, end in self.context)
        if furthest > shortest:
            raise ValueError(
                f"context ends at token {furthest}, but a prompt has only {shortest} tokens"
            )
        out = torch.zeros_like(seen)
        for start, end in self.context:
            out |= (place >= start) & (place < end)
        return out & seen


@printed_as_called
def CFG(
    guidance_scale: float | Sequence[float] = 1.5,
    negative_prompt_ids: Any = None,
    negative_prompt_attention_mask: Any = None,
    *,
    guard: Guard | float | None = None,
) -> SecondPrompt:
    """Classifier-free guidance, as by transformers' `guidance_scale`, in one batch of two rows.

    Takes no anchors: `CFG(1.5, ids).applied_to(model)`. Unlike transformers' it serves beams and
    returned sequences, gives padded prompts their own positions, and blends before all logits
    processors. Probabilities are the same; logits differ by a constant per row.

    Args:
        guidance_scale: 1 is off, above 1 moves away from the negative prompt.
        negative_prompt_ids: int [batch, tokens] of any length, or one row for all prompts; None
            takes the prompt's last token alone, as transformers does.
        negative_prompt_attention_mask: 0 or 1 of the same shape; None for all 1. Hidden tokens
            between others keep their positions.
        guard: as in `SPA`.

    Returns:
        The equivalent `SecondPrompt`, which prints as this call.

    Raises:
        ValueError: an argument is malformed.

    Formula: `log p(negative) + guidance_scale * (log p(prompt) - log p(negative))`. Source:
    Sanchez et al. (arXiv 2306.17806).
    """
    return SecondPrompt(
        guidance_scale,
        guard=guard,
        prompt_ids=negative_prompt_ids,
        prompt_mask=negative_prompt_attention_mask,
    )


@printed_as_called
def CAD(
    alpha: float | Sequence[float] = 0.5,
    context: Sequence[tuple[int, int]] | None = None,
    *,
    guard: Guard | float | None = None,
) -> SecondPrompt:
    """Context-aware decoding: amplify what the context changes in the answer.

    The other prompt is the prompt without its context, the gap closed. `SPA(1 + alpha)` hides the
    context in its place instead; `CFG(1 + alpha, ids)` takes any prompt without context.

    Args:
        alpha: 0 is off; the paper uses 0.5 for summaries, 1 where the context contradicts what the
            model knows.
        context: (start, end) tokens of the context, counted from the prompt's first real token;
            None takes the anchors that `applied_to`, `generate` and `chat` are given.
        guard: as in `SPA`.

    Returns:
        The equivalent `SecondPrompt`, which prints as this call.

    Raises:
        ValueError: an argument is malformed.

    Formula: `(1 + alpha) * logits(with context) - alpha * logits(without)`. Source: Shi et al.
    (arXiv 2305.14739).
    """
    if hasattr(alpha, "tolist"):
        alpha = alpha.tolist()
    values = alpha if isinstance(alpha, Sequence) else [alpha]
    if not all(map(is_number, values)):
        raise ValueError(f"alpha is {alpha!r}; expected a number such as 0.5, or one per prompt")
    strengths = [1 + value for value in values]
    return SecondPrompt(
        strengths if isinstance(alpha, Sequence) else strengths[0],
        guard=guard,
        removes_anchors=context is None,
        context=context,  # type: ignore[arg-type]
    )


def _rows(name: str, given: Any) -> Rows:
    """Turn a tensor or nested sequences of ints into tuples of rows of one length."""
    rows = given.tolist() if hasattr(given, "tolist") else given
    try:
        rows = tuple(tuple(int(value) for value in row) for row in rows)
    except TypeError:
        raise ValueError(
            f"{name} is {type(given).__name__}; expected token ids [batch, tokens]"
        ) from None
    if not rows or not rows[0] or len({len(row) for row in rows}) > 1:
        raise ValueError(
            f"{name} has rows of {[len(row) for row in rows]} tokens; expected rows of one length, "
            "padded on the left, at least one token long"
        )
    return rows


def _spans(given: Any) -> Spans:
    """Turn sequences into (start, end) tuples."""
    try:
        spans = tuple((int(start), int(end)) for start, end in given)
    except (TypeError, ValueError):
        spans = ()
    if not spans or not all(0 <= start < end for start, end in spans):
        raise ValueError(
            f"context is {given!r}; expected (start, end) tokens such as [(4, 250)], or None to "
            "take the anchors"
        )
    return spans
