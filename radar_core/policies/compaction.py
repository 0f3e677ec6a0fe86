"""A summary in place of the conversation, written by the model before every step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from radar_core.checks import check_whole
from radar_core.policies.copying import Rebuilt
from radar_core.policies.policy import Ask, Context, Turn
from radar_core.policies.tokens import token_counter
from radar_core.policies.writing import audible, write_turn
from radar_core.writing import write_history

__all__ = ["Compaction"]

logger = logging.getLogger("radar_core")

_REQUEST = (
    "Condense the conversation below. Whoever goes on with it will see your summary instead. Keep "
    "who said what where it matters, every name, number, result and open question that could still "
    "be needed, and where the speakers disagree. Be as brief as that allows, add nothing of your "
    "own, and write the summary alone."
)


@dataclass(frozen=True, eq=False)
class Compaction(Rebuilt):
    """Shows a summary of the conversation in its place.

    One more call of the model for each step of each agent, as the compaction baseline of
    Agent-Radar (arXiv 2605.30136, section 4.1) makes; the request's wording is Radar's own. Like
    there, the summary is written without regard to the query.

    Args:
        max_new_tokens: length limit of a summary, in tokens.
        keep_last: how many of the last messages that the receiver can have heard are shown in full
            after the summary instead of being summarised.
        threshold: what would be summarised is shown in full, without a call, if it has no more
            tokens than this; 0 always summarises.
        tokenizer: as in `RCRRouter`; counts for the threshold.

    Raises:
        ValueError: if a number is out of range or the tokenizer is none.
    """

    max_new_tokens: int = 256
    keep_last: int = 0
    threshold: int = 512
    tokenizer: Any = field(default=None, repr=False)
    _count: Callable[[str], int] = field(init=False, repr=False)
    _warned: list[bool] = field(init=False, repr=False, default_factory=list)

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("keep_last", 0), ("threshold", 0)):
            check_whole(name, getattr(self, name), least)
        object.__setattr__(self, "_count", token_counter(self.tokenizer))

    async def context(self, turn: Turn, ask: Ask) -> Context:
        """Write the receiver's prompt; see `Policy.context`.

        A blank summary is not used: the conversation is shown in full then, and a warning logged
        (once).

        Raises:
            ValueError: if an agent is not in the topology or the query is blank.
        """
        shown = audible(turn)
        split = max(0, len(shown) - self.keep_last)
        old, recent = shown[:split], shown[split:]
        text, _ = write_history(old, None)
        summary = ""
        if old and self._count(text) > self.threshold:
            request = [{"role": "user", "content": f"{_REQUEST}\n\n{text.rstrip()}"}]
            summary = (await ask(request, self.max_new_tokens)).strip()
            if not summary:
                self._warn(turn)
        if not summary:
            history, _ = write_history(shown, turn.receiver)
            return Context(write_turn(turn, history))
        latest, _ = write_history(recent, turn.receiver, "What was said since:")
        history = f"A summary of the conversation so far:\n\n{summary}\n\n{latest}"
        return Context(write_turn(turn, history))

    def _warn(self, turn: Turn) -> None:
        if not self._warned:
            self._warned.append(True)
            logger.warning(
                "The model's summary for %r in round %d is blank; the whole conversation is shown "
                "instead (said once)",
                turn.receiver,
                turn.round,
            )
