from __future__ import annotations

import pytest
from prometheus_client import generate_latest

from isthmus.common.clock import VirtualClock
from isthmus.gateway.goodput import NUM_PERIODS, PERIOD_S, GoodputWindow

MS = 1_000


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(10**18)


def test_the_ratio_is_of_what_was_offered_by_class_and_tenant(clock: VirtualClock) -> None:
    window = GoodputWindow(clock)
    for is_good in (True, True, True, False):
        window.add("gold", "a", is_good=is_good)
        clock.advance_ms(PERIOD_S * MS)
    window.add("bulk", "a", is_good=False)
    assert window.ratios() == {("gold", "a"): 0.75, ("bulk", "a"): 0.0}


def test_what_ended_a_minute_ago_counts_no_more(clock: VirtualClock) -> None:
    window = GoodputWindow(clock)
    window.add("gold", "a", is_good=False)
    clock.advance_ms(NUM_PERIODS * PERIOD_S * MS - 1)
    assert window.ratios() == {("gold", "a"): 0.0}
    window.add("gold", "a", is_good=True)
    clock.advance_ms(PERIOD_S * MS)
    assert window.ratios() == {("gold", "a"): 1.0}


def test_memory_is_bounded_by_periods_whatever_the_rate(clock: VirtualClock) -> None:
    window = GoodputWindow(clock)
    for _ in range(1_000):
        window.add("gold", "a", is_good=True)
        clock.advance_ms(PERIOD_S * MS)
    assert len(window._periods) == NUM_PERIODS


def test_a_gauge_without_requests_behind_it_disappears(clock: VirtualClock) -> None:
    window = GoodputWindow(clock)
    window.add("gold-of-this-test", "a", is_good=True)
    window.publish()
    assert 'goodput_ratio{slo_class="gold-of-this-test",tenant="a"} 1.0' in shown()
    clock.advance_ms(2 * NUM_PERIODS * PERIOD_S * MS)
    window.publish()
    assert "gold-of-this-test" not in shown()


def shown() -> str:
    return generate_latest().decode()
