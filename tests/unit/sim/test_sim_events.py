from __future__ import annotations

import pytest

from isthmus.common.clock import VirtualClock
from isthmus.sim.events import EventQueue


def test_events_happen_in_the_order_of_their_time() -> None:
    queue = EventQueue(VirtualClock())
    seen: list[tuple[int, str]] = []
    for when, name in ((30, "c"), (10, "a"), (20, "b")):
        queue.at(when, lambda name: seen.append((queue.now_ns, name)), name)
    assert queue.run() == 3
    assert seen == [(10, "a"), (20, "b"), (30, "c")]


def test_events_of_one_instant_happen_in_the_order_in_which_they_were_planned() -> None:
    queue = EventQueue(VirtualClock())
    seen: list[int] = []
    for number in range(20):
        queue.at(5, seen.append, number)
    queue.run()
    assert seen == list(range(20))


def test_an_event_may_plan_others_and_what_is_past_happens_now() -> None:
    queue = EventQueue(VirtualClock())
    seen: list[int] = []

    def first(_: object) -> None:
        queue.at(1, lambda _: seen.append(queue.now_ns))
        queue.after(7, lambda _: seen.append(queue.now_ns))

    queue.at(10, first)
    queue.run()
    assert seen == [10, 17]


def test_a_run_stops_at_its_limit_and_goes_on_later() -> None:
    queue = EventQueue(VirtualClock())
    seen: list[int] = []
    for when in (10, 20, 30):
        queue.at(when, seen.append, when)
    assert queue.run(until_ns=20) == 2
    assert queue.run(max_events=0) == 0
    assert queue.run() == 1
    assert seen == [10, 20, 30]


def test_time_does_not_go_back() -> None:
    clock = VirtualClock(5)
    with pytest.raises(AssertionError):
        clock.advance_to(4)
