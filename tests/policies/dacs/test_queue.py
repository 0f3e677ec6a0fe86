"""Who is served next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radar_core.policies.dacs.queue import SteeringQueue
from radar_core.policies.dacs.registry import Urgency

LOW, MEDIUM, HIGH = Urgency.LOW, Urgency.MEDIUM, Urgency.HIGH


def filled(*urgencies):
    queue = SteeringQueue()
    tickets = [queue.put(number, urgency) for number, urgency in enumerate(urgencies)]
    return queue, tickets


def drained(queue):
    order = []
    while (ticket := queue.take()) is not None:
        order.append(ticket.item)
    return order


def test_high_first_and_first_in_first_out_within_a_level():
    queue, _ = filled(LOW, MEDIUM, HIGH, LOW, MEDIUM, HIGH)
    assert [ticket.item for ticket in queue.waiting] == [2, 5, 1, 4, 0, 3]
    assert drained(queue) == [2, 5, 1, 4, 0, 3]
    assert queue.take() is None


@given(st.lists(st.sampled_from([LOW, MEDIUM, HIGH]), max_size=20))
def test_what_waits_together_is_sorted_by_level_and_arrival(urgencies):
    queue, _ = filled(*urgencies)
    expected = sorted(range(len(urgencies)), key=lambda n: (-urgencies[n].rank, n))
    assert drained(queue) == expected


def test_a_batch_of_low_ones_is_finished_before_medium_ones_that_come_later():
    queue, _ = filled(LOW, LOW)
    assert queue.take().item == 0
    queue.put("later medium", MEDIUM)
    queue.put("later low", LOW)
    queue.put("later high", HIGH)
    assert drained(queue) == ["later high", 1, "later medium", "later low"]


def test_what_is_put_back_keeps_its_place():
    queue, tickets = filled(MEDIUM, MEDIUM)
    assert queue.take() is tickets[0]
    queue.put("urgent", HIGH)
    queue.put_back(tickets[0])
    assert drained(queue) == ["urgent", 0, 1]


def test_an_interrupted_low_one_comes_back_before_medium_ones_that_came_later():
    queue, tickets = filled(LOW)
    queue.take()
    queue.put("medium", MEDIUM)
    queue.put_back(tickets[0])
    assert drained(queue) == [0, "medium"]


def test_removal():
    queue, tickets = filled(LOW, HIGH)
    queue.remove(tickets[1])
    queue.remove(tickets[1])
    assert len(queue) == 1 and drained(queue) == [0]
