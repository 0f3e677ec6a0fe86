"""The numbers of the released SPA package, `anchoring` 0.1.0, from spans instead of strings.

The package is a logits processor with a second, shorter prompt: the text with one placeholder for
each anchored string, wherever it occurs. This follows it step by step, with its limits, its place
among the processors and its habit of hiding the placeholders from the prompt's pass only. It
changes nothing in the model, and so costs what the package costs: a second model's pass per token.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from radar_core.hooks.prompts import (
    call_arguments,
    check_generation,
    given_tokens,
    refuse_continuous_batching,
    replace_generate,
)
from radar_core.hooks.undo import Undo
from radar_core.methods.spa import SPA

logger = logging.getLogger("radar_core")

PLACEHOLDER = "MASKTOKEN"
LARGEST_MOVE = 1e3
LARGEST_MODULATED_MOVE = 1e2
SMALLEST_PROBABILITY = 1e-6
# How near to 0 or 1 a strength counts as exactly that.
CLOSE = 1e-4


def put_on(model: Any, method: SPA, anchors: Tensor, undo: Undo) -> None:
    """Let `generate` steer one prompt as the released package does; other calls are refused.

    Args:
        model: the model.
        method: SPA with a tokenizer.
        anchors: bool [1, prompt].
        undo: is told how to end this.

    Raises:
        ValueError: there is no tokenizer, or more than one prompt.
    """
    if method.tokenizer is None:
        raise ValueError(
            f"reference is {method.reference!r}, which works on text, but there is no tokenizer; "
            "pass SPA(..., tokenizer=tokenizer) or use Steered(model, tokenizer, method)"
        )
    if anchors.shape[0] != 1:
        raise ValueError(
            f"anchors has {anchors.shape[0]} rows, but {method.reference} steers a single prompt; "
            "call generate once for each, or leave reference out"
        )
    generating = False

    def steered(generate: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal generating
        arguments = dict(call_arguments(generate, args, kwargs))
        check_generation(model, anchors, arguments)
        processor = released_processor(model, method, anchors, arguments)
        given = arguments.get("logits_processor") or ()
        arguments["logits_processor"] = LogitsProcessorList([*given, processor])
        generating = True
        try:
            return generate(**arguments)
        finally:
            generating = False

    def before(module: Any, args: Any) -> None:
        if not generating:
            raise ValueError(
                f"the model was called without generate, but {method.reference} steers only "
                "there, as a logits processor; leave reference out"
            )

    replace_generate(model, steered, undo)
    refuse_continuous_batching(model, undo)
    undo.add(model.register_forward_pre_hook(before).remove)


def released_processor(
    model: Any, method: SPA, anchors: Tensor, arguments: dict[str, Any]
) -> ReleasedSPA:
    """Return the processor for a call of `generate`.

    Raises:
        ValueError: the package cannot serve the call.
    """
    name = method.reference
    config = arguments.get("generation_config") or model.generation_config
    for option in ("num_beams", "num_return_sequences"):
        value = arguments.get(option, getattr(config, option, None))
        if value not in (None, 1):
            raise ValueError(f"{option} is {value}, which {name} crashes on; leave reference out")
    prompt = given_tokens(arguments)
    if prompt.dim() != 2:
        raise ValueError(f"inputs_embeds was given, but {name} works on text; give input_ids")
    mask = arguments.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        raise ValueError(f"attention_mask hides tokens, but {name} takes no padded prompt")
    second, hidden = second_prompt(method.tokenizer, prompt, anchors)
    if method.masking == "attention" and not any(hidden):
        logger.warning("%s finds no placeholder in its second prompt, and hides nothing", name)
    return ReleasedSPA(model, method, second, hidden)


class ReleasedSPA(LogitsProcessor):
    """Blends scores with those of the second prompt; serves one `generate`.

    Args:
        model: the model, which runs the second prompt too.
        method: SPA.
        second: int64 [1, n], the second prompt.
        hidden: for each of its tokens, whether the prompt's pass hides it.
    """

    def __init__(self, model: Any, method: SPA, second: Tensor, hidden: list[bool]) -> None:
        self.model = model
        self.strength = method.strengths()[0]
        self.modulated = method.modulated and abs(self.strength) > 1
        self.second = second
        self.mask: Tensor | None = None
        if method.masking == "attention":
            self.mask = (~torch.tensor([hidden], device=second.device)).to(second.dtype)
        self.cache: Any = None
        self.cache_name = ""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if abs(self.strength - 1) < CLOSE:
            return scores
        other = self._next_logits(input_ids)
        if abs(self.strength) < CLOSE:
            return other
        other = other.to(scores.device)
        broken = scores.isnan().any() | other.isnan().any()
        full, other = (
            torch.where(broken, logits.nan_to_num(0.0), logits) for logits in (scores, other)
        )
        move = (self.strength - 1) * (full - other)
        if self.modulated:
            share = full.softmax(-1).clamp(SMALLEST_PROBABILITY, 1)
            weight = (self.strength - 1) / share.max() * share
            move = (weight * (full - other)).clamp(-LARGEST_MODULATED_MOVE, LARGEST_MODULATED_MOVE)
        else:
            move = move.nan_to_num(0.0).clamp(-LARGEST_MOVE, LARGEST_MOVE)
        return (full + move).clamp(-LARGEST_MOVE, LARGEST_MOVE)

    def _next_logits(self, input_ids: Tensor) -> Tensor:
        """Run the second prompt's next pass, on its own cache: [1, V]."""
        if self.cache is None:
            output = self.model(self.second, attention_mask=self.mask, use_cache=True)
            self.cache_name = "cache" if "cache" in output else "past_key_values"
        else:
            # No mask: from here on the placeholders are in sight.
            output = self.model(input_ids[:, -1:], use_cache=True, **{self.cache_name: self.cache})
        self.cache = output[self.cache_name]
        return output.logits[:, -1]


# -- the second prompt -----------------------------------------------------------------------------


def second_prompt(tokenizer: Any, prompt: Tensor, anchors: Tensor) -> tuple[Tensor, list[bool]]:
    """Return the package's second prompt, and which of its tokens it takes for placeholders.

    Args:
        tokenizer: the prompt's tokenizer.
        prompt: int64 [1, tokens].
        anchors: bool [1, tokens]; each run of them is one anchor, without the space around it.

    Returns:
        Token ids int64 [1, n], and n booleans.

    Raises:
        ValueError: the tokenizer does not give back the prompt's tokens for its text.
    """
    ids = prompt[0].tolist()
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if _encode(tokenizer, text) != ids:
        raise ValueError(
            "the tokenizer does not give back the prompt's tokens for its text, which is all that "
            "the released package sees; leave reference out"
        )
    placeholder = tokenizer.mask_token or PLACEHOLDER
    texts = [
        tokenizer.decode(run, clean_up_tokenization_spaces=False).strip()
        for run in _runs(ids, anchors[0].tolist())
    ]
    second = _encode(tokenizer, replace_anchors(text, texts, placeholder))
    hidden = find_placeholders(tokenizer, second, placeholder)
    return torch.tensor([second], device=prompt.device), hidden


def replace_anchors(text: str, anchors: Iterable[str], placeholder: str) -> str:
    """Put a placeholder for every occurrence of an anchor, longest first, and one for neighbours.

    Args:
        text: the prompt; `<anchor>` tags in it mark anchors too, and are taken out.
        anchors: strings.
        placeholder: the placeholder.
    """
    found = {*anchors, *re.findall(r"<anchor>(.*?)</anchor>", text, flags=re.DOTALL)}
    text = re.sub(r"</?anchor>", "", text)
    longest_first = sorted(found - {"", " "}, key=len, reverse=True)
    if longest_first:
        text = re.sub("|".join(map(re.escape, longest_first)), lambda _: placeholder, text)
    one = re.escape(placeholder)
    return re.sub(rf"{one}(?:\s+{one})+", lambda _: placeholder, text)


def find_placeholders(tokenizer: Any, ids: Sequence[int], placeholder: str) -> list[bool]:
    """Return which tokens the package takes for a placeholder: by the text of each single token.

    It looks for the placeholder's own tokens in a row, then for any token that reads like one of
    them, then (where the placeholder is one token) for two or three that read like it together;
    and if all of that finds nothing, for any token that contains it or a part of it.
    """
    texts = [tokenizer.decode([token]) for token in ids]
    stripped = [text.strip() for text in texts]
    own = tokenizer.encode(placeholder, add_special_tokens=False)
    parts = [tokenizer.decode([token]) for token in own]
    hidden = [text in parts for text in stripped]
    for start in range(len(texts) - len(parts) + 1):
        if texts[start : start + len(parts)] == parts:
            hidden[start : start + len(parts)] = [True] * len(parts)
    if len(parts) == 1 and len(parts[0]) > 2:
        for start in range(len(texts) - 1):
            for count in (2, 3):
                together = stripped[start : start + count]
                if len(together) == count and placeholder in "".join(together):
                    hidden[start : start + count] = [True] * count
    if not any(hidden):
        hidden = [
            placeholder in text or (len(short) > 2 and short in placeholder)
            for text, short in zip(texts, stripped, strict=True)
        ]
    return hidden


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def _runs(ids: list[int], anchored: list[bool]) -> list[list[int]]:
    """Return the token ids of each run of anchored tokens."""
    runs: list[list[int]] = []
    for place, (token, chosen) in enumerate(zip(ids, anchored, strict=True)):
        if not chosen:
            continue
        if place and anchored[place - 1]:
            runs[-1].append(token)
        else:
            runs.append([token])
    return runs
