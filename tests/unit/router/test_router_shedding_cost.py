"""What refusals tell, what they cost, and that nobody pays for what he did not get."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from isthmus.common.errors import SloShedError
from isthmus.common.ids import RequestId
from isthmus.common.types import Slo
from isthmus.router.holding import HeldQuery, HoldingQueue
from isthmus.router.shares import TenantShares
from isthmus.router.verdict import Rejected
from tests.support.router_cluster import Cluster, make_query

STRICT = Slo("strict", ttft_ms=1_000, is_strict=True)


class CountingList(list[HeldQuery]):
    """Counts the entries that anybody goes through."""

    num_seen = 0

    def __iter__(self) -> Iterator[HeldQuery]:
        for held in super().__iter__():
            CountingList.num_seen += 1
            yield held


def test_shedding_many_goes_through_the_line_a_few_times_not_once_for_each() -> None:
    cluster = Cluster(1, 1, policy="goodput", exploration=0)
    for number in range(400):
        arrival_ns = cluster.clock.now_ns()
        query = make_query(600, str(number), hash_chains=(), slo=STRICT, arrival_ns=arrival_ns)
        cluster.router.submit(query)
    intake = cluster.router._intake
    assert intake is not None
    line = intake.queue._lines["m"]
    num_held = len(line.on_time)
    line.on_time, CountingList.num_seen = CountingList(line.on_time), 0
    shed = cluster.router.tick()
    assert len(shed) > 300
    assert num_held <= CountingList.num_seen <= 20 * num_held
    predicted = []
    for item in shed:
        assert isinstance(item.verdict, Rejected)
        assert isinstance(item.verdict.error, SloShedError)
        predicted.append(item.verdict.error.predicted_ms)
    # Whoever is left out stands in nobody's way.
    assert max(predicted) <= 610 + 2 * 1_000
    intake.queue.check_integrity()


def test_refusal_at_once_tells_the_time_that_it_was_refused_for() -> None:
    cluster = Cluster(1, 1, policy="goodput", exploration=0)
    tight = Slo("tight", ttft_ms=650, is_strict=True)
    arrival_ns = cluster.clock.now_ns() - 45_000_000  # what is left is less than it takes
    query = make_query(600, "a", slo=tight, arrival_ns=arrival_ns)
    verdict = cluster.router.submit(query)
    assert isinstance(verdict, Rejected)
    assert isinstance(verdict.error, SloShedError)
    assert verdict.error.predicted_ms is not None
    assert verdict.error.predicted_ms > 650


def test_tenant_does_not_pay_for_what_left_the_line_unserved() -> None:
    queue = HoldingQueue(TenantShares(), ageing_ms=1_000, max_held=1_000)

    def enter(name: str, tenant: str) -> HeldQuery:
        return queue.enter(make_query(100, name, tenant=tenant), 100.0, None, 0, None)

    kept = enter("kept", "a")
    for number in range(50):
        enter(str(number), "a")
    for number in range(50):
        queue.remove(RequestId(str(number)))
    other = enter("other", "b")
    later = enter("later", "a")
    assert later.tag == pytest.approx(kept.tag + 100)
    assert other.tag == 0
    order = queue.in_order("m", 0, lambda _: True)
    assert [held.query.request_id for held in order][-1] == "later"
    queue.started(kept, 0)
    queue.remove(RequestId("later"))
    assert enter("again", "a").tag == pytest.approx(kept.tag + 100)  # what was served is paid for
    queue.check_integrity()
