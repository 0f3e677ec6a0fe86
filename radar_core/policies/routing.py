"""RCR-Router's choice: the most important items that fit a token budget."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from radar_core.policies.memory import MemoryItem
from radar_core.writing import write_header

__all__ = ["Shown", "choose", "show", "words_of"]

_DECIMALS = 6  # of scores that are compared, so that rounding decides no order

Count = Callable[[str], int]


@dataclass(frozen=True)
class Shown:
    """An item and how it is shown.

    Args:
        item: the item; cut short if it alone was larger than the budget.
        text: its heading, its text and a blank line.
    """

    item: MemoryItem
    text: str


def choose(
    memory: Sequence[MemoryItem],
    scores: Sequence[float],
    budget: int,
    near_duplicate: float,
    receiver: str,
    count: Count,
) -> list[Shown]:
    """Take items, the most important first, while they fit.

    Of equals the newer round goes first, then the earlier in the transcript. What does not fit is
    passed over, and so is what says the same as an item taken before. If the first item is larger
    than the whole budget, its longest beginning that fits is all that is taken.

    Args:
        memory: the items.
        scores: the importance of each.
        budget: the most tokens of all that is shown, headings counted.
        near_duplicate: what share of all their sequences of three words two items must have in
            common to say the same, in (0, 1].
        receiver: name of the agent that reads them.
        count: counts tokens.

    Returns:
        What to show, in the transcript's order; none only without items.

    Raises:
        ValueError: if not one character of the first item fits.
    """
    ranked = sorted(
        range(len(memory)),
        key=lambda at: (-round(scores[at], _DECIMALS), -memory[at].round, memory[at].source),
    )
    chosen: list[Shown] = []
    taken: list[frozenset[tuple[str, ...]]] = []
    left = budget
    for place in ranked:
        shown = Shown(memory[place], show(memory[place], receiver))
        tokens = count(shown.text)
        if not chosen and tokens > budget:
            return [_cut_short(memory[place], budget, receiver, count)]
        sequences = _sequences(shown.item.text)
        if tokens > left or any(_common(sequences, other) >= near_duplicate for other in taken):
            continue
        chosen.append(shown)
        taken.append(sequences)
        left -= tokens
    # A tokenizer may need more tokens for a whole than for its parts.
    while count("".join(shown.text for shown in _in_order(chosen))) > budget:
        chosen.pop()
    return _in_order(chosen)


def show(item: MemoryItem, receiver: str) -> str:
    """Write an item: a heading with sender, round and kind, its text, a blank line."""
    return f"{write_header(item.sender, item.round, receiver, item.kind)}{item.text}\n\n"


def words_of(text: str) -> list[str]:
    """List the words of a text, without case."""
    return re.findall(r"\w+", text.casefold())


def _in_order(chosen: list[Shown]) -> list[Shown]:
    return sorted(chosen, key=lambda shown: shown.item.source)


def _cut_short(item: MemoryItem, budget: int, receiver: str, count: Count) -> Shown:
    """Cut an item to the longest beginning that fits, without its heading if that is long."""
    bare = 2 * count(show(replace(item, text=""), receiver)) > budget

    def beginning(length: int) -> Shown:
        text = item.text[: _whole(item.text, length)].rstrip()
        index, start, _ = item.source
        source = index, start, start + len(text)
        kept = replace(item, text=text, tokens=count(text), source=source)
        return Shown(kept, f"{text}\n\n" if bare else show(kept, receiver))

    low, high = 0, len(item.text)
    while low < high:
        middle = (low + high + 1) // 2
        if count(beginning(middle).text) <= budget:
            low = middle
        else:
            high = middle - 1
    if low == 0:
        raise ValueError(
            f"a budget of {budget} tokens does not hold one character of {receiver!r}'s most "
            "important item; raise base_budget"
        )
    return beginning(low)


def _sequences(text: str) -> frozenset[tuple[str, ...]]:
    """List a text's sequences of three words: one changed word or number changes three of them."""
    words = words_of(text) or [text]
    return frozenset(tuple(words[at : at + 3]) for at in range(max(1, len(words) - 2)))


def _common(one: frozenset[tuple[str, ...]], other: frozenset[tuple[str, ...]]) -> float:
    return len(one & other) / len(one | other)


def _whole(text: str, end: int) -> int:
    """Move a cut back so that it parts no character from its accents, joiners and modifiers."""
    cut = end
    while 0 < cut < len(text) and _belong_together(text[cut - 1], text[cut]):
        cut -= 1
    return cut or end


def _belong_together(before: str, after: str) -> bool:
    return (
        "\u200d" in (before, after)  # zero width joiner
        or unicodedata.category(after).startswith("M")
        or "\U0001f3fb" <= after <= "\U0001f3ff"  # skin tones
    )
