"""Long prompts that cannot be in time must not make others late, and waiting must cost little."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.common.clock import NS_PER_MS
from isthmus.common.cluster import Role
from isthmus.common.ids import RequestId
from isthmus.common.types import Slo
from isthmus.router import Outcome, RouteQuery
from isthmus.router.capacity import Capacity
from isthmus.router.holding import HeldQuery, HoldingQueue, Lane
from isthmus.router.placement import Placement
from isthmus.router.pools import SPEED_MEMORY_MS, Pool
from isthmus.router.shares import TenantShares
from isthmus.router.verdict import Admitted, Held
from tests.support.router_cluster import LATENCY, Cluster, make_info, make_query

CHATTY = Slo("chatty", tpot_ms=40)
KEEN = Slo("keen", ttft_ms=1_000)


def cluster_with_a_resident(prefills: int = 1) -> Cluster:
    cluster = Cluster(prefills, 1, policy="goodput", exploration=0, ageing_ms=100)
    send(cluster, make_query(64, "resident", slo=CHATTY), is_computed=True)
    return cluster


def send(cluster: Cluster, query: RouteQuery, *, is_computed: bool) -> Admitted:
    verdict = cluster.router.submit(query)
    assert isinstance(verdict, Admitted)
    if is_computed:
        cluster.router.report(verdict.decision.decision_id, Outcome.first_token())
    return verdict


@pytest.mark.parametrize("prefills", [0, 1])
def test_late_work_is_computed_beside_residents_that_keep_their_pace(prefills: int) -> None:
    cluster = cluster_with_a_resident(prefills)
    if prefills:
        send(cluster, make_query(4_000, "long"), is_computed=False)
    late = make_query(2_000, "late", slo=KEEN, arrival_ns=cluster.clock.now_ns())
    verdict = cluster.router.submit(late)
    assert isinstance(verdict, Admitted)
    assert verdict.decision.prefill is None


def test_late_work_spares_residents_until_all_that_is_late_has_starved() -> None:
    cluster = Cluster(1, 1, policy="goodput", exploration=0, ageing_ms=100)
    slow = replace(LATENCY, decode_seq=10.0)
    cluster.router.state.registered(make_info("d0", Role.DECODE, epoch=2, latency=slow))
    guarded = Slo("guarded", tpot_ms=40)
    send(cluster, make_query(64, "resident", slo=guarded), is_computed=True)
    assert isinstance(cluster.router.submit(make_query(320, "late")), Held)
    settled_after_ms = 0
    while not cluster.router.tick():
        settled_after_ms += 10
        cluster.clock.advance_ms(10)
        assert settled_after_ms < 1_000, "it is never served"
    assert 150 < settled_after_ms <= 250, "it gives way for twice the time that ages it"


def test_prompts_that_wait_at_a_decode_instance_count_in_the_tpot_of_newcomers() -> None:
    idle, behind = (Cluster(1, 1, policy="goodput", exploration=0) for _ in range(2))
    predicted_ms = []
    for cluster in (idle, behind):
        if cluster is behind:
            cluster.report("d0", waiting_seqs=1, waiting_tokens=3_000)
        verdict = cluster.router.submit(make_query(320, "r"))
        assert isinstance(verdict, Admitted)
        assert verdict.decision.prefill is not None
        predicted_ms.append(verdict.decision.predicted_tpot_ms)
    left_ms = 5 + 3_000 - 325  # when the newcomer's own prompt has been computed
    assert predicted_ms[1] - predicted_ms[0] > left_ms / 128


def test_looks_are_not_repeated_while_nothing_has_made_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = cluster_with_a_resident()
    send(cluster, make_query(4_000, "long"), is_computed=False)
    busy = {"running_seqs": 1, "waiting_seqs": 4, "waiting_tokens": 20_000}
    cluster.report("d0", **busy)
    verdict = cluster.router.submit(make_query(2_000, "late", slo=KEEN))
    assert isinstance(verdict, Held)
    cluster.router.tick()
    looked: list[RequestId] = []
    look = Placement.look

    def counted(self: Placement, query: RouteQuery, now_ns: int, **how: bool) -> object:
        looked.append(query.request_id)
        return look(self, query, now_ns, **how)

    monkeypatch.setattr(Placement, "look", counted)
    for _ in range(20):
        cluster.report("d0", **busy)
        cluster.clock.advance_ms(1)
        cluster.router.tick()
    assert not looked
    cluster.report("d0", running_seqs=1)
    cluster.clock.advance_ms(100)
    cluster.router.tick()
    assert looked == [RequestId("late")]


def test_late_work_beyond_its_share_is_paid_back_before_more_goes_first() -> None:
    queue = HoldingQueue(TenantShares(), ageing_ms=100, max_held=100)

    def enter(name: str, work_ms: float, latest_ms: int | None) -> HeldQuery:
        query = RouteQuery(RequestId(name), "m", 10)
        latest_ns = None if latest_ms is None else latest_ms * NS_PER_MS
        return queue.enter(query, work_ms, latest_ns, 0, None)

    def first() -> HeldQuery:
        queue.left_out("m", now_ns, Capacity.even(1))
        return next(queue.in_order("m", now_ns, lambda _: True))

    now_ns = 200 * NS_PER_MS
    for number in range(12):
        enter(f"t{number}", 100.0, 1_000 + 100 * number)
    for name in ("late0", "late1"):
        enter(name, 5_000.0, None)
    assert first().lane is Lane.LATE_OK  # it has aged, and nothing was started yet
    queue.started(first(), now_ns)
    for _ in range(11):
        assert first().lane is Lane.ON_TIME
        queue.started(first(), now_ns)


def test_a_long_prompt_is_not_taken_for_the_work_of_many_instances() -> None:
    pool = Pool(ready_ms=0.0, num_workers=2)
    pool.started(100 * SPEED_MEMORY_MS, 0)
    assert pool.speed(0) == 2
    for _ in range(30):
        pool.started(0.1 * SPEED_MEMORY_MS, 0)
    assert pool.speed(0) == pytest.approx(4)


def test_a_long_lane_of_which_nothing_is_spare_is_asked_about_once() -> None:
    queue = HoldingQueue(TenantShares(None), ageing_ms=1_000, max_held=1_000)
    for number in range(500):
        queue.enter(make_query(name=str(number)), 100.0 + number % 7, None, 0, None)
    asked: list[float] = []

    def is_spare(work_ms: float) -> bool:
        asked.append(work_ms)
        return work_ms < 100.5

    found = list(queue.in_order("m", 0, is_spare))
    assert len(found) == sum(not number % 7 for number in range(500))
    refused = [work_ms for work_ms in asked if work_ms >= 100.5]
    assert len(refused) <= 7
