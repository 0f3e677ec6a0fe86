"""What a discussion is about."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from radar_core.transcript import check_unicode

__all__ = ["Task"]


@dataclass(frozen=True)
class Task:
    """A task, and what each agent alone knows of it.

    Args:
        text: the question or task; not blank.
        notes: private notes by the agent's name; they stand below its system prompt, so nobody
            else sees them and they are never anchored.
        id: differs from every other task's of the same log; "" is taken from the text and notes.

    Raises:
        ValueError: the text is blank, notes is no mapping of str to str, or a text holds half a
            surrogate pair.
    """

    text: str
    notes: Mapping[str, str] = field(default_factory=dict)
    id: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text.strip():
            raise ValueError(f"a task's text must be a str that is not blank, got {self.text!r}")
        if not isinstance(self.notes, Mapping) or not all(
            isinstance(part, str) for pair in self.notes.items() for part in pair
        ):
            raise ValueError(f"a task's notes must be str by agents' names, got {self.notes!r}")
        if not isinstance(self.id, str):
            raise ValueError(f"a task's id must be a str, got {self.id!r}")
        check_unicode("a task's text", self.text)
        check_unicode("a task's id", self.id)
        for name, note in self.notes.items():
            check_unicode("a name in a task's notes", name)
            check_unicode(f"a task's notes for {name}", note)
        if not self.id:
            object.__setattr__(self, "id", self.digest)

    @property
    def label(self) -> str:
        """What a message calls it: its id, and how its text begins where that says no more."""
        return f"task {self.id!r}" + f" ({self.text[:60]!r})" * (self.id == self.digest)

    @property
    def digest(self) -> str:
        """Sixteen characters that differ between tasks with different texts or notes."""
        content = json.dumps([self.text, dict(self.notes)], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]
