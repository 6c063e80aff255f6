"""What a pool can do by when, what work that has time may take of it, and how long answers are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from isthmus.common.clock import NS_PER_MS, NS_PER_S
from isthmus.common.cluster import Role
from isthmus.common.ids import InstanceId, RequestId
from isthmus.router.capacity import Capacity
from isthmus.router.demand import Demand
from isthmus.router.goodput import GoodputPolicy
from isthmus.router.holding import HeldQuery, HoldingQueue
from isthmus.router.placement import Placement
from isthmus.router.shares import TenantShares
from isthmus.router.types import RouteQuery
from tests.support.router_cluster import LAYOUT, Cluster


def test_a_worker_that_is_busy_for_minutes_is_none_for_who_has_seconds() -> None:
    pool = Capacity(np.array([0.0, 60_000.0]), np.array([1.0, 1.0]))
    by = pool.by(np.array([0.0, 3_000.0, 90_000.0]))
    assert by.tolist() == [0.0, 3_000.0, 90_000.0 + 30_000.0]
    assert pool.first_ms == 0.0


def test_slow_workers_and_helpers_count_by_their_speed() -> None:
    pool = Capacity(np.array([100.0, 0.0]), np.array([1.0, 0.25]), helpers=2.0)
    assert pool.by(np.array([1_000.0])).tolist() == [900.0 + 250.0 + 2_000.0]


def left_out(queue: HoldingQueue, capacity: Capacity) -> list[str]:
    return [held.query.request_id for held, _ in queue.left_out("m", 0, capacity)]


def enter(queue: HoldingQueue, name: str, work_ms: float, latest_ms: float) -> HeldQuery:
    query = RouteQuery(RequestId(name), "m", 10)
    return queue.enter(query, work_ms, int(latest_ms * NS_PER_MS), 0, None)


def test_who_is_too_late_already_is_left_out_however_free_the_pool_is() -> None:
    queue = HoldingQueue(TenantShares(), ageing_ms=100, max_held=100)
    enter(queue, "late", 50.0, -1.0)
    enter(queue, "in_time", 50.0, 1.0)
    assert left_out(queue, Capacity.even(8)) == ["late"]


def test_a_busy_worker_is_not_reckoned_with() -> None:
    queue = HoldingQueue(TenantShares(), ageing_ms=100, max_held=100)
    for number in range(3):
        enter(queue, str(number), 500.0, 500.0)
    both = Capacity(np.array([0.0, 0.0]), np.ones(2))
    one = Capacity(np.array([0.0, 60_000.0]), np.ones(2))
    assert len(left_out(queue, both)) == 0
    assert len(left_out(queue, one)) == 1


@pytest.mark.parametrize("names", [("p0", "p1", "p2"), ("p2", "p1", "p0")])
def test_each_prefill_instance_counts_once_whomever_it_feeds(names: tuple[str, ...]) -> None:
    """One may feed decode instances of two kinds, and others one of them alone."""
    dtypes = {"p0": "bfloat16", "p1": "int8", "p2": "int8", "d0": "bfloat16", "d1": "int8"}
    cluster = Cluster(policy="goodput")
    for name in (*names, "d0", "d1"):
        role = Role.PREFILL if name.startswith("p") else Role.DECODE
        cluster.join(name, role, kv_layout=replace(LAYOUT, dtype=dtypes[name]))
    router = cluster.router
    policy = GoodputPolicy(2_000.0, 32, exploration=0.0)
    places = Placement(router.state, router.knowledge, policy, router.sessions, cluster.clock)
    now_ns = cluster.clock.monotonic_ns()
    assert places.capacity("m", now_ns).waits.size == 3
    router.state.stream_broken(InstanceId("p1"), 1, "test")
    assert places.capacity("m", now_ns).waits.size == 2


def arrivals(demand: Demand, per_s: float, work_ms: float, slack_ms: float) -> int:
    """For ten seconds; the time after them, ns."""
    gap_ns, now_ns = int(NS_PER_S / per_s), 0
    while now_ns < 10 * NS_PER_S:
        demand.offered(work_ms, slack_ms, now_ns)
        now_ns += gap_ns
    return now_ns


def test_demand_is_the_number_of_workers_that_arrivals_keep_busy() -> None:
    demand = Demand()
    now_ns = arrivals(demand, per_s=20, work_ms=200, slack_ms=2_000)
    assert demand.workers(now_ns) == pytest.approx(4, rel=0.1)
    assert demand.mean_work_ms == pytest.approx(200)
    assert demand.workers(now_ns + 60 * NS_PER_S) < 0.1  # they have ended


def test_long_work_takes_only_workers_that_are_spare() -> None:
    demand = Demand()
    now_ns = arrivals(demand, per_s=20, work_ms=200, slack_ms=2_000)  # 4 workers of 8
    taken = 0
    while demand.spares(60_000.0, 8, now_ns):
        demand.begun(60_000.0, now_ns)
        taken += 1
    assert taken == 3
    assert demand.spares(50.0, 8, now_ns)  # too short to make anybody late
    assert demand.spares(60_000.0, 8, now_ns + 61 * NS_PER_S)


def test_short_work_takes_what_one_worker_leaves_idle_and_long_work_does_not() -> None:
    demand = Demand()
    now_ns, begun_ms = 0, 0.0
    for _ in range(100):
        demand.offered(100.0, 150.0, now_ns)  # a fifth of the time
        for _ in range(5):
            now_ns += NS_PER_S // 10
            assert not demand.spares(400.0, 1, now_ns)
            if demand.spares(200.0, 1, now_ns):
                demand.begun(200.0, now_ns)
                begun_ms += 200.0
    assert 0.6 <= begun_ms * NS_PER_MS / now_ns <= 0.8


def test_without_targets_nothing_is_kept_free() -> None:
    demand = Demand()
    for _ in range(20):
        assert demand.spares(60_000.0, 2, 0)
        demand.begun(60_000.0, 0)
