"""Who takes part in a discussion."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from radar_core.checks import check_has
from radar_core.policies.policy import Policy
from radar_core.transcript import check_unicode

__all__ = ["Agent", "names_of"]


@dataclass(frozen=True)
class Agent:
    """A participant of a discussion.

    Args:
        name: differs from every other agent's; the schedule's graphs know the agent by it.
        role: what it is, in a few words, for those who read it and for policies that route by role.
        system: its system prompt; "" for none.
        policy: decides what it is shown; None for the discussion's policy.
        instruction: what it has to do with the task, put after the task's text; None for nothing.

    Raises:
        ValueError: the name or the role is blank, or a text is no str, or holds half a surrogate
            pair.
    """

    name: str
    role: str
    system: str = ""
    policy: Policy | None = None
    instruction: str | None = None

    def __post_init__(self) -> None:
        for field in ("name", "role"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"an agent's {field} must be a non-empty str, got {value!r}")
            check_unicode(f"an agent's {field}", value)
        for field in ("system", "instruction"):
            value = getattr(self, field)
            if not isinstance(value, str) and (value is not None or field == "system"):
                raise ValueError(f"{self.name}'s {field} must be a str, got {value!r}")
            check_unicode(f"{self.name}'s {field}", value or "")
        if self.policy is not None:
            check_has(f"{self.name}'s policy", self.policy, "context", "FullContext()")


def names_of(agents: Iterable[Agent]) -> list[str]:
    """Return the agents' names.

    Raises:
        ValueError: one of them is no `Agent`.
    """
    names = []
    for agent in agents:
        if not isinstance(agent, Agent):
            raise ValueError(
                f"agents must hold Agent objects, such as Agent('ann', 'planner'), got {agent!r}"
            )
        names.append(agent.name)
    return names
