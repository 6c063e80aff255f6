"""Whom plans leave out only perhaps, and what is kept free for classes that weigh more."""

from __future__ import annotations

import numpy as np
import pytest

from isthmus.common import metrics
from isthmus.common.clock import NS_PER_MS
from isthmus.common.ids import RequestId
from isthmus.common.types import Slo
from isthmus.router import Outcome
from isthmus.router.binding_round import MAX_PASSED_OVER, BindingRound
from isthmus.router.capacity import Capacity
from isthmus.router.holding import HeldQuery, HoldingQueue, Lane
from isthmus.router.quantiles import Kind, bucket_of
from isthmus.router.reservation import NO_LIMIT
from isthmus.router.reserve import Reserve
from isthmus.router.shares import TenantShares
from isthmus.router.types import RouteQuery
from isthmus.router.verdict import Admitted, Held, Rejected
from isthmus.router.weighed import PREFILL_BUSY, RESERVED
from tests.support.router_cluster import Cluster, make_query

HEAVY = Slo("heavy", ttft_ms=1_000, weight=4.0, is_strict=True)
LIGHT = Slo("light", ttft_ms=5_000)
AGEING_MS = 100


def new_queue() -> HoldingQueue:
    return HoldingQueue(TenantShares(), ageing_ms=AGEING_MS, max_held=100)


def enter(
    queue: HoldingQueue, name: str, work_ms: float, latest_ms: float | None, slo: Slo = LIGHT
) -> HeldQuery:
    latest_ns = None if latest_ms is None else int(latest_ms * NS_PER_MS)
    return queue.enter(RouteQuery(RequestId(name), "m", 10, slo=slo), work_ms, latest_ns, 0, None)


def order(queue: HoldingQueue, now_ms: int = 0) -> list[str]:
    found = queue.in_order("m", now_ms * NS_PER_MS, lambda _: True)
    return [held.query.request_id for held in found]


def plan(queue: HoldingQueue, now_ms: int, hope: Capacity | None) -> list[str]:
    out = queue.left_out("m", now_ms * NS_PER_MS, Capacity.even(1), hope)
    return [held.query.request_id for held, _ in out]


def test_whom_only_the_worst_case_leaves_out_stands_by_behind_the_others() -> None:
    queue = new_queue()
    enter(queue, "long", 500.0, 100.0)
    enter(queue, "short", 300.0, 150.0)
    enter(queue, "longest", 900.0, 160.0)
    assert plan(queue, 0, Capacity.even(3)) == ["longest"]
    queue.remove(RequestId("longest"))
    assert order(queue) == ["short", "long"]
    assert queue.on_time_ms("m") == pytest.approx(300.0)
    queue.check_integrity()
    late = enter(queue, "late", 1.0, None)
    assert order(queue) == ["short", "long", "late"]  # it has no turn while one stands by
    queue.remove(late.query.request_id)
    queue.remove(RequestId("short"))
    assert plan(queue, 50, Capacity.even(3)) == []
    assert order(queue) == ["long"]
    assert queue.on_time_ms("m") == pytest.approx(500.0)  # there is time for it now
    assert plan(queue, 101, Capacity.even(3)) == ["long"]  # too late, whoever may help
    queue.check_integrity()


def test_without_hope_whom_the_plan_leaves_out_is_given_up_at_once() -> None:
    queue = new_queue()
    enter(queue, "long", 500.0, 100.0)
    enter(queue, "short", 300.0, 150.0)
    assert plan(queue, 0, None) == ["long"]


@pytest.mark.parametrize(("slo", "first_ms"), [(HEAVY, 2 * AGEING_MS), (LIGHT, AGEING_MS)])
def test_what_has_aged_gives_way_to_heavier_classes_for_a_while(slo: Slo, first_ms: int) -> None:
    queue = new_queue()
    late = enter(queue, "late", 50.0, None)
    for number in range(3):
        enter(queue, str(number), 400.0, 10_000.0 + number, slo)
    for now_ms in (first_ms - 1, first_ms):
        found = queue.in_order("m", now_ms * NS_PER_MS, lambda _: False)
        assert (next(found) is late) == (now_ms == first_ms)
    assert late.lane is Lane.LATE_OK


def arrivals(rate_per_s: float, slack_ms: float = 700.0, quantile: float = 0.9) -> Reserve:
    reserve = Reserve()
    for now_ms in np.arange(0, 30_000, 1_000 / rate_per_s):
        reserve.offered(4.0, quantile, slack_ms, int(now_ms * NS_PER_MS))
    return reserve


def test_the_more_of_a_heavier_class_come_the_sooner_somebody_must_be_free() -> None:
    now_ns = 30_000 * NS_PER_MS
    # Two of them within their slack: 0.7²/2, of which a tenth of all may miss: 286 ms.
    assert arrivals(1.0).limit_ms(1.0, 1, now_ns) == pytest.approx(286, rel=0.1)
    assert arrivals(2.0).limit_ms(1.0, 1, now_ns) == pytest.approx(71, rel=0.1)
    assert arrivals(1.0, quantile=0.99).limit_ms(1.0, 1, now_ns) == pytest.approx(29, rel=0.1)
    assert arrivals(1.0).limit_ms(1.0, 4, now_ns) == pytest.approx(16 * 286, rel=0.1)


def test_nothing_is_kept_free_for_equals_nor_by_who_is_the_only_one() -> None:
    now_ns = 30_000 * NS_PER_MS
    assert arrivals(2.0).limit_ms(4.0, 1, now_ns) == NO_LIMIT
    assert not arrivals(2.0).has_heavier(4.0)
    assert arrivals(2.0).limit_ms(1.0, 0, now_ns) == NO_LIMIT
    assert Reserve().limit_ms(1.0, 1, now_ns) == NO_LIMIT
    long_after_ns = 3_600_000 * NS_PER_MS
    assert arrivals(2.0).limit_ms(1.0, 1, long_after_ns) > 1e6


def submit(cluster: Cluster, name: str, num_tokens: int, slo: Slo) -> Admitted | Held:
    arrival_ns = cluster.clock.now_ns()
    verdict = cluster.router.submit(
        make_query(num_tokens, name, hash_chains=(), slo=slo, arrival_ns=arrival_ns)
    )
    assert isinstance(verdict, Admitted | Held)
    return verdict


def expect_heavy(cluster: Cluster) -> None:
    """The router has seen a heavier class come and go."""
    for number in range(20):
        verdict = submit(cluster, f"heavy{number}", 100, HEAVY)
        assert isinstance(verdict, Admitted)
        cluster.router.report(verdict.decision.decision_id, Outcome.finished())
        cluster.clock.advance_ms(100)


@pytest.mark.parametrize("has_heavy", [False, True])
def test_a_long_light_prompt_waits_while_the_other_instance_has_one(has_heavy: bool) -> None:
    cluster = Cluster(1, 1, policy="goodput", exploration=0)
    if has_heavy:
        expect_heavy(cluster)
    assert isinstance(submit(cluster, "first", 2_000, LIGHT), Admitted)
    holds = metrics.HOLDS.labels(reason="reserved")
    before = holds._value.get()
    second = submit(cluster, "second", 2_000, LIGHT)
    assert isinstance(second, Held) is has_heavy
    assert holds._value.get() - before == has_heavy


def test_who_leaves_room_for_heavier_classes_says_nothing_of_them() -> None:
    queue, walk = new_queue(), BindingRound(1_000.0)
    for number in range(3 * MAX_PASSED_OVER):
        light = enter(queue, f"light{number}", 500.0, 100.0)
        light.obstacle = RESERVED
        walk.passed(light, 50.0 + number)
    assert not walk.is_over
    assert walk.wait_ms == 50.0
    assert walk.stops(enter(queue, "as long", 500.0, 200.0))
    assert not walk.stops(enter(queue, "shorter", 100.0, 200.0))
    assert not walk.stops(enter(queue, "heavy", 900.0, 200.0, HEAVY))
    for number in range(MAX_PASSED_OVER):
        assert not walk.is_over
        busy = enter(queue, f"busy{number}", 10.0, 300.0)
        busy.obstacle = PREFILL_BUSY
        walk.passed(busy, 80.0)
    assert walk.is_over


def test_a_tick_that_finds_nothing_lets_time_pass() -> None:
    cluster = Cluster(1, 1, policy="goodput", exploration=0)
    expect_heavy(cluster)
    assert isinstance(submit(cluster, "first", 2_000, LIGHT), Admitted)
    assert isinstance(submit(cluster, "second", 2_000, LIGHT), Held)
    for _ in range(500):  # instants that are hardly before it is to be looked at again, too
        if cluster.router.tick():
            break
        due_ns = cluster.router.next_tick_ns()
        assert due_ns is not None
        assert due_ns >= cluster.clock.monotonic_ns() + NS_PER_MS
        cluster.clock.advance_to(due_ns - 300)
    else:
        pytest.fail("it was never begun")


def know_scatter(cluster: Cluster) -> None:
    """The router has seen a quarter of all prompts take half as long again as predicted."""
    residuals, bucket = cluster.router.knowledge.residuals, bucket_of(1_000)
    for number in range(80):
        measured_ms = 1_500.0 if number % 4 == 0 else 1_000.0
        for kind in (Kind.TTFT, Kind.LOCAL_TTFT):
            residuals.note(kind, bucket, measured_ms, 1_000.0, cluster.clock.now_ns())


@pytest.mark.parametrize(("waited_ms", "is_refused"), [(300, False), (700, False), (1_100, True)])
def test_a_strict_query_is_refused_when_it_would_more_likely_be_late_than_not(
    waited_ms: int, is_refused: bool
) -> None:
    cluster = Cluster(1, 1, policy="goodput", exploration=0)
    know_scatter(cluster)
    arrival_ns = cluster.clock.now_ns() - waited_ms * NS_PER_MS
    slo = Slo("strict", ttft_ms=2_000, is_strict=True)
    verdict = cluster.router.submit(
        make_query(1_000, "r", hash_chains=(), slo=slo, arrival_ns=arrival_ns)
    )
    assert isinstance(verdict, Rejected) is is_refused


def test_who_would_be_refused_waits_for_a_last_chance() -> None:
    cluster = Cluster(1, 1, policy="goodput", exploration=0)
    know_scatter(cluster)
    first = [submit(cluster, name, 700, Slo()) for name in ("first", "second")]
    held = submit(cluster, "strict", 1_000, Slo("strict", ttft_ms=2_000, is_strict=True))
    assert isinstance(held, Held)
    for _ in range(3):
        cluster.clock.advance_ms(100)
        assert cluster.router.tick() == []
    cluster.clock.advance_ms(450)
    for verdict in first:
        assert isinstance(verdict, Admitted)
        cluster.router.report(verdict.decision.decision_id, Outcome.finished())
    (settled,) = cluster.router.tick()
    assert isinstance(settled.verdict, Admitted)


def test_who_is_left_out_because_another_was_put_off_is_not_refused_unasked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(1, 1, policy="goodput", exploration=0)
    know_scatter(cluster)
    for name in ("first", "second"):
        submit(cluster, name, 700, Slo())
    strict = Slo("strict", ttft_ms=2_000, is_strict=True)
    assert isinstance(submit(cluster, "put off", 1_000, strict), Held)
    assert isinstance(submit(cluster, "named next", 1_000, strict), Held)
    intake = cluster.router._intake
    assert intake is not None
    held = {one.query.request_id: one for one in intake.queue._held.values()}
    plans = iter([[(held[RequestId("put off")], 0.0)], [(held[RequestId("named next")], 0.0)]])
    monkeypatch.setattr(intake.queue, "left_out", lambda *_: next(plans))
    cluster.clock.advance_ms(100)
    assert cluster.router.tick() == []
    assert held[RequestId("put off")].has_last_chance
