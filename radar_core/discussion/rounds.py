"""Who hears whom and who is silent, where that differs from round to round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from radar_core.schedule import Schedule
from radar_core.topology import Topology

__all__ = ["Rounds"]


@dataclass(frozen=True)
class Rounds:
    """One schedule for each round.

    Args:
        schedules: of each round, first round first; the temporal edges of the first are not used.
        silent: for each round the agents that do not speak in it; () if all always do.

    Raises:
        ValueError: there is no round, the schedules have different agents, `silent` has another
            length or names an unknown agent, or nobody speaks in a round.
    """

    schedules: Sequence[Schedule]
    silent: Sequence[frozenset[str]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedules", tuple(self.schedules))
        if not self.schedules:
            raise ValueError("a discussion needs at least one round")
        silent = tuple(map(frozenset, self.silent)) or (frozenset(),) * len(self.schedules)
        object.__setattr__(self, "silent", silent)
        if len(silent) != len(self.schedules):
            raise ValueError(
                f"{len(self.schedules)} rounds, but silent has {len(silent)} entries; expected one "
                "for each round"
            )
        for schedule, quiet in zip(self.schedules, silent, strict=True):
            if schedule.agents != self.agents:
                raise ValueError(
                    "every round must have the same agents in the same order, got "
                    f"{', '.join(self.agents)} and {', '.join(schedule.agents)}"
                )
            for name in quiet:
                schedule.spatial.check_agent(name, "the silent agent")
            if len(quiet) == len(self.agents):
                raise ValueError("nobody speaks in one of the rounds; leave that round out")

    def __len__(self) -> int:
        return len(self.schedules)

    @classmethod
    def repeated(cls, schedule: Schedule, rounds: int) -> Rounds:
        """Use one schedule in every round.

        Args:
            schedule: the schedule.
            rounds: how many rounds.

        Returns:
            The rounds; nobody is silent.
        """
        return cls((schedule,) * rounds)

    @property
    def agents(self) -> tuple[str, ...]:
        """The names of all agents, in order."""
        return self.schedules[0].agents

    @property
    def topology(self) -> Topology:
        """Who sends to whom in any round."""
        edges = [
            edge
            for place, schedule in enumerate(self.schedules)
            for edge in (*schedule.spatial.edges, *(schedule.temporal.edges if place else ()))
        ]
        return Topology(edges, self.agents)

    def speakers(self, round: int) -> int:
        """Count the agents that speak in a round."""
        return len(self.agents) - len(self.silent[round])

    def waves(self, round: int) -> list[list[str]]:
        """Group a round's speakers: those of one group do not hear each other within the round.

        Args:
            round: the round, counted from 0.

        Returns:
            The groups in the order in which they speak; within a group in the schedule's order.
        """
        schedule = self.schedules[round]
        wave: dict[str, int] = {}
        for name in schedule.order():
            heard = [wave[a] for a, b in schedule.spatial.edges if b == name]
            wave[name] = 1 + max(heard, default=-1)
        groups: list[list[str]] = [[] for _ in range(1 + max(wave.values()))]
        for name, place in wave.items():
            if name not in self.silent[round]:
                groups[place].append(name)
        return [group for group in groups if group]
