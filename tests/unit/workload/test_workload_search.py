"""A rate is an answer only when its calls came for long enough to tell."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from isthmus.common.errors import ConfigError
from isthmus.common.types import Slo
from isthmus.workload import Call, at_rate, repeat
from isthmus.workload.search import (
    LASTING,
    MOST_CALLS,
    Outcome,
    RateSearch,
    longest_wait_s,
    overlapping,
)

Server = Callable[[float, int], Outcome]


def one_at_a_time(service_s: float, wait_s: float) -> Server:
    """Serves calls in their turn; good is who waits no longer than ``wait_s``."""

    def run(rate: float, num_calls: int) -> Outcome:
        calls = at_rate([Call(i, float(i), 1, 1) for i in range(num_calls)], rate)
        free_s, ends = 0.0, []
        for call in calls:
            free_s = max(free_s, call.due_s) + service_s
            ends.append(free_s)
        took = sorted(end - call.due_s for end, call in zip(ends, calls, strict=True))
        spans = [(call.due_s, end) for end, call in zip(ends, calls, strict=True)]
        good = sum(seconds - service_s <= wait_s for seconds in took)
        return Outcome(good / num_calls, took[num_calls // 2], overlapping(spans))

    return run


def search(server: Server, num_calls: int, wait_s: float, start: float = 1.0) -> RateSearch:
    rates = RateSearch(start, 0.9, 0.05, 0.0, 1e6, num_calls, wait_s)
    for _ in range(100):
        if rates.is_over:
            return rates
        rates.tell(server(rates.rate, rates.copies * num_calls))
    raise AssertionError("the search does not end")


@pytest.mark.parametrize("num_calls", [5, 12, 100, 1000])
def test_fewer_calls_do_not_make_a_server_faster(num_calls: int) -> None:
    """Ten a second is all it does; in five TTFT targets a backlog of a tenth of that may pass."""
    found = search(one_at_a_time(0.1, wait_s=3.0), num_calls, wait_s=3.0)
    assert 9.0 <= found.passing <= 10.0 * (1 + 1 / (0.9 * LASTING)) * 1.01
    assert not found.is_capped


def test_a_target_too_long_to_be_tried_gives_a_lower_bound() -> None:
    found = search(one_at_a_time(0.1, wait_s=1e4), 100, wait_s=1e4)
    assert found.is_capped
    assert found.passing == pytest.approx(MOST_CALLS / (LASTING * 1e4))


def test_a_rate_is_tried_for_longer_when_its_calls_took_long() -> None:
    rates = RateSearch(10.0, 0.9, 0.05, 0.0, 1e6, 20, 0.1)
    assert rates.copies == 1
    rates.tell(Outcome(1.0, call_s=2.0, overlapping=1.0))
    assert (rates.rate, rates.copies, rates.passing) == (10.0, 5, 0.0)
    rates.tell(Outcome(1.0, call_s=2.0, overlapping=1.0))
    assert (rates.rate, rates.passing) == (20.0, 10.0)


def test_calls_that_take_the_longer_the_more_come_are_no_answer() -> None:
    """A backlog in which no target counts: half of the calls have none."""

    def run(rate: float, num_calls: int) -> Outcome:
        over_s = max(0.0, num_calls / 10.0 - num_calls / rate)
        return Outcome(1.0, 0.1 + over_s / 2, overlapping=1.0)

    found = search(run, 100, wait_s=1.0)
    assert 10.0 <= found.passing <= 15.0
    assert found.is_capped


def test_a_search_that_a_lower_rate_cannot_help_ends() -> None:
    """One call in five is bad, and all had the server to themselves."""
    rates = RateSearch(1.0, 0.9, 0.05, 0.0, 1e6, 10, 1.0)
    rates.tell(Outcome(0.8, call_s=0.2, overlapping=0.05))
    assert rates.is_over
    assert rates.passing == 0.0


def test_a_search_goes_down_while_calls_share_the_server() -> None:
    found = search(one_at_a_time(10.0, wait_s=1.0), 100, wait_s=1.0)
    assert found.passing == pytest.approx(0.1, rel=0.1)


def test_calls_that_overlap() -> None:
    assert overlapping([]) == 0.0
    assert overlapping([(0, 1), (1, 2), (3, 4)]) == 0.0
    assert overlapping([(2, 3), (0, 10), (4, 5), (11, 12)]) == 0.75


def test_a_target_that_limits_no_wait_is_no_target_of_a_search() -> None:
    assert longest_wait_s([Slo(ttft_ms=500.0, e2e_ms=9e3), Slo(), Slo(e2e_ms=2e3)]) == 2.0
    with pytest.raises(ConfigError, match="needs a TTFT target"):
        longest_wait_s([Slo(), Slo(tpot_ms=50.0)])


def test_copies_come_one_after_the_other_with_prefixes_of_their_own() -> None:
    calls = [Call(0, 0.0, 8, 1, (1, 2)), Call(1, 1.0, 8, 1, (1, 3))]
    made = repeat(calls, 2)
    assert [call.index for call in made] == [0, 1, 2, 3]
    assert [call.due_s for call in made] == [0.0, 1.0, 2.0, 3.0]
    assert made[2].blocks[0] == made[3].blocks[0]
    assert made[2].blocks[0] not in calls[0].blocks
