"""Who is served next."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

from radar_core.policies.dacs.registry import Urgency

__all__ = ["SteeringQueue", "Ticket"]

T = TypeVar("T")


@dataclass(eq=False)
class Ticket(Generic[T]):
    """A place in the queue, which something put back keeps.

    Args:
        item: what waits.
        urgency: decides its level.
        order: its place within its level; the first has the smallest.
        batched: whether it belongs to the batch of LOW items that is being served.
    """

    item: T
    urgency: Urgency
    order: int
    batched: bool = False

    @property
    def place(self) -> tuple[int, int]:
        """HIGH, then the LOW items of the batch under way, then MEDIUM, then LOW; FIFO in each."""
        levels = {Urgency.HIGH: 0, Urgency.MEDIUM: 2, Urgency.LOW: 1 if self.batched else 3}
        return levels[self.urgency], self.order


@dataclass
class SteeringQueue(Generic[T]):
    """HIGH first; MEDIUM next; LOW in batches when neither waits; first in, first out in each.

    When the first LOW item is taken, all that wait then form a batch, which MEDIUM items that come
    later do not break up, so that LOW ones are served at all; HIGH ones go in between. (In the
    published implementation a HIGH item goes to the very front, so that of two the later is first.)
    """

    _waiting: list[Ticket[T]] = field(default_factory=list)
    _orders: count[int] = field(default_factory=count)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> list[Ticket[T]]:
        """What waits, next one first."""
        return sorted(self._waiting, key=lambda ticket: ticket.place)

    def put(self, item: T, urgency: Urgency) -> Ticket[T]:
        """Add an item at the end of its level.

        Args:
            item: what waits.
            urgency: its level.

        Returns:
            Its ticket.
        """
        ticket = Ticket(item, urgency, next(self._orders))
        self._waiting.append(ticket)
        return ticket

    def put_back(self, ticket: Ticket[T]) -> None:
        """Put something taken back where it was: before all that came after it."""
        self._waiting.append(ticket)

    def remove(self, ticket: Ticket[T]) -> None:
        """Take a ticket out if it waits."""
        if ticket in self._waiting:
            self._waiting.remove(ticket)

    def take(self) -> Ticket[T] | None:
        """Take the next one.

        Returns:
            Its ticket; None if nothing waits.
        """
        if not self._waiting:
            return None
        ticket = min(self._waiting, key=lambda waiting: waiting.place)
        if ticket.urgency is Urgency.LOW and not ticket.batched:
            for waiting in self._waiting:
                waiting.batched = waiting.urgency is Urgency.LOW
        self._waiting.remove(ticket)
        return ticket
