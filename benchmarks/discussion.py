"""The prompt: a discussion of several agents of an exact length, and the tokens to anchor in it.

The text is written by a seeded generator, so every run on every machine reads the same prompt and
no sentence occurs twice (which a contender that looks anchors up as text needs).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_AGENTS = ("planner", "builder", "treasurer", "librarian", "critic", "driver")
_OPENINGS = (
    "I went through the list again, and",
    "After talking to the city office,",
    "To answer the last question,",
    "Before we decide anything,",
    "If the weather holds,",
    "As far as I can see,",
    "One thing that nobody has raised yet:",
    "Having counted twice,",
)
_CLAIMS = (
    "the {place} can hold {n} shelves once {m} of them are taken apart",
    "moving the {thing} will take {n} hours with {m} volunteers",
    "the {thing} may cost {n} dollars, of which {m} are already promised",
    "we should carry {n} boxes to the {place} on day {m}",
    "the {place} stays closed until {n} visitors have returned {m} books",
    "the truck makes {n} trips a week and needs {m} liters of fuel for each",
    "room {n} is too damp for the {thing}, and room {m} is too small",
    "insurance covers {n} items from the {thing} but not the {m} oldest ones",
)
_PLACES = ("old reading room", "station hall", "school gym", "basement", "town archive", "annex")
_THINGS = ("map collection", "newspaper volumes", "children's books", "card catalog", "paintings")
_QUESTION = "Discussion of how to move the town library:"


@dataclass(frozen=True)
class Prompt:
    """A prompt of an exact number of tokens.

    Args:
        text: the whole prompt, the chat template's own text included; "" for random tokens.
        input_ids: int64 [rows, tokens].
        content: the first token of the discussion and the one after its last; only these may be
            anchored.
    """

    text: str
    input_ids: Tensor
    content: tuple[int, int]

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.input_ids.shape[1]


def discussion(messages: int, seed: int = 0) -> str:
    """Write a discussion.

    Args:
        messages: how many messages, one a line.
        seed: the same seed gives the same text.

    Returns:
        The text.
    """
    rng = random.Random(seed)
    lines = [_QUESTION]
    for index in range(messages):
        sentences = [
            f"{rng.choice(_OPENINGS)} {rng.choice(_CLAIMS)}.".format(
                place=rng.choice(_PLACES),
                thing=rng.choice(_THINGS),
                n=rng.randrange(10, 1000),
                m=rng.randrange(2, 1000),
            )
            for _ in range(rng.randrange(1, 4))
        ]
        agent = _AGENTS[index % len(_AGENTS)]
        lines.append(f"[round {index // len(_AGENTS) + 1}] {agent}: {' '.join(sentences)}")
    return "\n".join(lines)


def build_prompt(tokenizer: Any, tokens: int, seed: int = 0) -> Prompt:
    """Build a chat prompt of exactly so many tokens, cut off in the middle of the discussion.

    Args:
        tokenizer: a transformers tokenizer, with or without a chat template.
        tokens: the length, template included.
        seed: chooses the discussion.

    Returns:
        The prompt.

    Raises:
        ValueError: `tokens` is too small for the template and a few words.
    """
    head, tail = _around_content(tokenizer)
    head_ids, tail_ids = (tokenizer(t, add_special_tokens=False).input_ids for t in (head, tail))
    room = tokens - len(head_ids) - len(tail_ids)
    if room < 16:
        raise ValueError(
            f"tokens is {tokens}, but the chat template alone takes {tokens - room}; "
            f"expected at least {tokens - room + 16}"
        )
    body = discussion(messages=room // 8 + 8, seed=seed)
    body_ids = tokenizer(body, add_special_tokens=False).input_ids[:room]
    ids = [*head_ids, *body_ids, *tail_ids]
    return Prompt(
        text=tokenizer.decode(ids, clean_up_tokenization_spaces=False),
        input_ids=torch.tensor([ids]),
        content=(len(head_ids), len(head_ids) + room),
    )


def random_prompt(vocabulary: int, tokens: int, rows: int = 1) -> Prompt:
    """Draw tokens, for models without a tokenizer.

    Args:
        vocabulary: how many tokens there are to draw from.
        tokens: the length.
        rows: how many prompts.

    Returns:
        The prompt, the same for the same arguments.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (rows, tokens), generator=generator)
    return Prompt("", ids, (0, tokens))


def build_prompts(tokenizer: Any, tokens: int, rows: int) -> Prompt:
    """Build several chat prompts of the same length; see `build_prompt`.

    Args:
        tokenizer: as in `build_prompt`.
        tokens: the length of each.
        rows: how many, each another discussion.

    Returns:
        The prompts; the text is the first one's.
    """
    built = [build_prompt(tokenizer, tokens, seed) for seed in range(rows)]
    ids = torch.cat([one.input_ids for one in built])
    return Prompt(built[0].text, ids, built[0].content)


def place_anchors(prompt: Prompt, position: float, share: float = 0.05, runs: int = 4) -> Tensor:
    """Choose tokens to anchor: so many of all tokens, in runs spread from a position to the end.

    Args:
        prompt: the prompt.
        position: where the first run starts, as a fraction of the prompt in [0, 1).
        share: the fraction of the prompt's tokens to anchor.
        runs: how many runs of neighbouring tokens.

    Returns:
        bool [rows, tokens], the same for every row.

    Raises:
        ValueError: the discussion has too few tokens left after `position`.
    """
    start, end = prompt.content
    first = max(start, round(position * prompt.tokens))
    total = max(runs, round(share * prompt.tokens))
    gap = (end - first - total) // runs
    if gap < 1:
        raise ValueError(
            f"position is {position}: {end - first} tokens of the discussion follow it, too few "
            f"for {runs} runs of {total} tokens in all; choose an earlier position"
        )
    anchors = torch.zeros(1, prompt.tokens, dtype=torch.bool)
    for run in range(runs):
        length = total // runs + (run < total % runs)
        anchors[0, first : first + length] = True
        first += length + gap
    return anchors.repeat(prompt.input_ids.shape[0], 1)


def first_run(anchors: Tensor) -> Tensor:
    """Return only the first run of anchored tokens of every row: bool [rows, tokens]."""
    begun = anchors.int().cumsum(1) > 0
    ended = (begun & ~anchors).int().cumsum(1) > 0
    return anchors & ~ended


def anchored_texts(tokenizer: Any, prompt: Prompt, anchors: Tensor) -> list[str]:
    """Return the text of every run of anchored tokens.

    Args:
        tokenizer: the prompt's tokenizer.
        prompt: the prompt.
        anchors: bool [1, tokens].

    Returns:
        One string a run, in order.
    """
    texts: list[str] = []
    run: list[int] = []
    for token, anchored in zip(
        [*prompt.input_ids[0].tolist(), 0], [*anchors[0].tolist(), False], strict=True
    ):
        if anchored:
            run.append(token)
        elif run:
            texts.append(tokenizer.decode(run, clean_up_tokenization_spaces=False))
            run = []
    return texts


def _around_content(tokenizer: Any) -> tuple[str, str]:
    """Return what the chat template puts before and after the user's text."""
    if not getattr(tokenizer, "chat_template", None):
        return "", ""
    content = "CONTENT"
    messages = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    head, _, tail = text.rpartition(content)
    return head, tail
