"""Who starts, who waits, who is refused: the seam of ``verdict`` on virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.common.clock import NS_PER_MS
from isthmus.common.cluster import InstanceState, Role
from isthmus.common.errors import (
    CapacityError,
    DeadlineError,
    InfeasibleSloError,
    InvalidRequestError,
    NoInstanceError,
    SloShedError,
)
from isthmus.common.ids import RequestId
from isthmus.common.types import LocalPrefillReason, RouteAction, Slo
from isthmus.router import Outcome, RouteQuery
from isthmus.router.holding import HoldingQueue
from isthmus.router.intake import PLAN_MS
from isthmus.router.verdict import Admitted, Held, Rejected, Settled
from tests.support.router_cluster import LATENCY, Cluster, make_info, make_query

STRICT = Slo("strict", ttft_ms=1_000, is_strict=True)
KEEN = Slo("keen", ttft_ms=1_000)


def cluster_of(prefills: int = 1, decodes: int = 1, **config: object) -> Cluster:
    return Cluster(prefills, decodes, policy="goodput", exploration=0, **config)


def ask(cluster: Cluster, name: str, num_tokens: int = 320, **changes: object) -> RouteQuery:
    now_ns = cluster.clock.now_ns()
    return make_query(num_tokens, name, arrival_ns=now_ns, **changes)


def admitted(cluster: Cluster, query: RouteQuery) -> Admitted:
    verdict = cluster.router.submit(query)
    assert isinstance(verdict, Admitted), verdict
    return verdict


def busy(cluster: Cluster, count: int = 2) -> list[Admitted]:
    """As many prompts as may be sent ahead: more than a step of work waits at every instance."""
    made = []
    for number in range(count):
        verdict = cluster.router.submit(ask(cluster, f"busy{number}", 600))
        if isinstance(verdict, Admitted):
            made.append(verdict)
    return made


def tick(cluster: Cluster) -> list[Settled]:
    return cluster.router.tick()


def test_idle_cluster_admits_at_once_and_books_both_legs() -> None:
    cluster = cluster_of()
    decision = admitted(cluster, ask(cluster, "a")).decision
    assert decision.action is RouteAction.ADMIT
    assert decision.policy == "goodput"
    assert len(cluster.router.state.ledger.unreported("p0")) == 1
    assert cluster.router.state.ledger.pending("d0").decode_blocks == 21
    cluster.check()


def test_query_waits_while_nobody_could_begin_it_and_holds_nothing() -> None:
    cluster = cluster_of()
    made = busy(cluster, 4)
    booked = len(cluster.router.state.ledger)
    assert booked == len(made) < 4
    assert cluster.router.num_held == 4 - booked
    cluster.check()


def test_who_comes_while_nobody_could_begin_costs_no_tick_of_its_own() -> None:
    cluster = cluster_of()
    busy(cluster, 4)
    cluster.router.tick()
    due_ns = cluster.router.next_tick_ns()
    assert due_ns is not None
    assert due_ns > cluster.clock.monotonic_ns()
    for number in range(3):
        assert isinstance(cluster.router.submit(ask(cluster, f"late{number}")), Held)
        assert cluster.router.next_tick_ns() == due_ns


def test_who_could_come_too_late_is_looked_at_with_the_next_plan() -> None:
    cluster = cluster_of()
    busy(cluster, 4)
    cluster.router.tick()
    now_ns = cluster.clock.monotonic_ns()
    for number in range(2):  # the plan is of now, then the tick that made it has been
        assert isinstance(cluster.router.submit(ask(cluster, f"keen{number}", slo=KEEN)), Held)
        due_ns = cluster.router.next_tick_ns()
        assert due_ns is not None
        assert due_ns - now_ns == number * PLAN_MS * NS_PER_MS
        cluster.router.tick()


def test_first_token_lets_the_next_one_start() -> None:
    cluster = cluster_of()
    woken: list[bool] = []
    cluster.router.on_progress = lambda: woken.append(True)
    made = busy(cluster, 5)
    assert tick(cluster) == []
    cluster.router.report(made[0].decision.decision_id, Outcome.first_token())
    assert woken
    settled = tick(cluster)
    assert [item.request_id for item in settled] == [f"busy{len(made)}"]
    assert isinstance(settled[0].verdict, Admitted)
    assert settled[0].verdict.decision.action is RouteAction.QUEUE


def test_whoever_must_start_first_goes_first() -> None:
    cluster = cluster_of()
    made = busy(cluster, 2)
    while isinstance(cluster.router.submit(ask(cluster, "fill", 600)), Admitted):
        pass
    cluster.router.cancel(RequestId("fill"))
    patient = Slo("patient", ttft_ms=60_000)
    hurried = Slo("hurried", ttft_ms=5_000)
    assert isinstance(cluster.router.submit(ask(cluster, "patient", slo=patient)), Held)
    assert isinstance(cluster.router.submit(ask(cluster, "hurried", slo=hurried)), Held)
    for one in made:
        cluster.router.report(one.decision.decision_id, Outcome.first_token())
        if settled := tick(cluster):
            break
    assert settled[0].request_id == "hurried"


def test_cancelled_query_is_never_heard_of_again() -> None:
    cluster = cluster_of()
    made = busy(cluster, 5)
    for number in range(len(made), 5):
        assert cluster.router.cancel(RequestId(f"busy{number}"))
        assert not cluster.router.cancel(RequestId(f"busy{number}"))
    assert cluster.router.next_tick_ns() is not None
    for one in made:
        cluster.router.report(one.decision.decision_id, Outcome.first_token())
    assert tick(cluster) == []
    assert cluster.router.next_tick_ns() is None


def test_a_refusal_that_breaks_off_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has left the line without a verdict would wait for ever."""
    cluster = cluster_of()
    busy(cluster, 3)
    deadline_ns = cluster.clock.now_ns() + 50 * NS_PER_MS
    cluster.router.submit(ask(cluster, "late", 600, deadline_ns=deadline_ns))
    cluster.clock.advance_ms(60)
    with monkeypatch.context() as broken:
        broken.setattr(cluster.router.log, "add", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tick(cluster)
    (settled,) = [found for found in tick(cluster) if found.request_id == "late"]
    assert isinstance(settled.verdict, Rejected)
    assert isinstance(settled.verdict.error, DeadlineError)
    assert all(found.request_id != "late" for found in tick(cluster))


def test_deadline_ends_a_wait() -> None:
    cluster = cluster_of()
    busy(cluster, 5)
    deadline_ns = cluster.clock.now_ns() + 50 * NS_PER_MS
    held = cluster.router.submit(ask(cluster, "late", 600, deadline_ns=deadline_ns))
    assert isinstance(held, Held)
    next_ns = cluster.router.next_tick_ns()
    assert next_ns is not None
    assert next_ns <= deadline_ns
    cluster.clock.advance_ms(50)
    ended = {item.request_id: item.verdict for item in tick(cluster)}
    verdict = ended[RequestId("late")]
    assert isinstance(verdict, Rejected)
    assert isinstance(verdict.error, DeadlineError)


def test_an_id_that_waits_already_is_refused_and_the_first_one_waits_on() -> None:
    cluster = cluster_of()
    busy(cluster, 5)
    first = cluster.router.submit(ask(cluster, "twice", 600))
    assert isinstance(first, Held)
    second = cluster.router.submit(ask(cluster, "twice", 100))
    assert isinstance(second, Rejected)
    assert isinstance(second.error, InvalidRequestError)
    assert second.error.param == "request_id"
    assert cluster.router.cancel(first.request_id)


def test_who_was_settled_before_a_tick_breaks_off_is_told_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = cluster_of()
    busy(cluster, 5)
    deadline_ns = cluster.clock.now_ns() + 50 * NS_PER_MS
    held = cluster.router.submit(ask(cluster, "late", 600, deadline_ns=deadline_ns))
    assert isinstance(held, Held)
    cluster.clock.advance_ms(50)

    def broken(*_: object) -> list[object]:
        raise ValueError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(HoldingQueue, "in_order", broken)
        with pytest.raises(ValueError, match="broken"):
            tick(cluster)
        assert cluster.router.next_tick_ns() is not None
        told = {item.request_id: item.verdict for item in tick(cluster)}
    assert isinstance(told[held.request_id], Rejected)


def test_prompt_too_long_for_its_target_is_told_apart_from_overload() -> None:
    cluster = cluster_of()
    verdict = cluster.router.submit(ask(cluster, "long", 2_000, slo=STRICT))
    assert isinstance(verdict, Rejected)
    assert isinstance(verdict.error, InfeasibleSloError)
    assert verdict.error.limit_ms == 1_000
    assert verdict.error.predicted_ms == pytest.approx(2_000 + 4 * 5)
    assert verdict.error.retry_after_ms == 0


def test_infeasible_request_of_a_best_effort_class_is_served_with_a_weaker_promise() -> None:
    cluster = cluster_of()
    decision = admitted(cluster, ask(cluster, "long", 2_000, slo=KEEN)).decision
    assert decision.action is RouteAction.DEGRADE


def test_step_longer_than_the_tpot_target_is_infeasible_too() -> None:
    cluster = cluster_of()
    slo = Slo("quick", tpot_ms=10, is_strict=True)
    verdict = cluster.router.submit(ask(cluster, "quick", slo=slo))
    assert isinstance(verdict, Rejected)
    assert isinstance(verdict.error, InfeasibleSloError)


def test_overload_refuses_the_strict_with_a_time_to_come_back_and_keeps_the_others() -> None:
    cluster = cluster_of()
    for number in range(40):
        slo = STRICT if number % 2 else KEEN
        cluster.router.submit(ask(cluster, str(number), 600, slo=slo))
    shed = tick(cluster)
    assert shed
    for item in shed:
        assert isinstance(item.verdict, Rejected)
        assert int(item.request_id) % 2
        error = item.verdict.error
        assert isinstance(error, SloShedError)
        assert error.http_status == 429
        assert error.reason == "overload"
        assert error.limit_ms == 1_000
        assert error.predicted_ms is not None
        assert error.predicted_ms > 600
        assert 1_000 <= error.retry_after_ms <= 60_000
    assert cluster.router.num_held >= 18
    cluster.check()


def test_newcomer_that_pushes_a_resident_over_its_target_waits() -> None:
    cluster = cluster_of(prefills=3)
    slow = replace(LATENCY, decode_seq=10.0)
    cluster.router.state.registered(make_info("d0", Role.DECODE, epoch=2, latency=slow))
    cluster.router.state.deregistered("d1")
    guarded = Slo("guarded", tpot_ms=55)
    first = admitted(cluster, ask(cluster, "a", slo=guarded))
    admitted(cluster, ask(cluster, "b", slo=guarded))
    assert isinstance(cluster.router.submit(ask(cluster, "c")), Held)
    cluster.router.report(first.decision.decision_id, Outcome.finished())
    assert [item.request_id for item in tick(cluster)] == ["c"]


def test_full_decode_instance_makes_a_query_wait_before_any_prefill_is_begun() -> None:
    cluster = cluster_of()
    cluster.report("d0", running_seqs=16, running_context_tokens=4_000, free_blocks=500)
    held = cluster.router.submit(ask(cluster, "a"))
    assert isinstance(held, Held)
    assert len(cluster.router.state.ledger) == 0
    cluster.report("d0", running_seqs=15, running_context_tokens=4_000, free_blocks=500)
    assert [item.request_id for item in tick(cluster)] == ["a"]


def test_nobody_to_serve_is_said_at_once_and_to_those_who_wait() -> None:
    cluster = cluster_of()
    made = busy(cluster, 5)
    cluster.router.state.registered(make_info("d0", Role.DECODE, state=InstanceState.DRAINING))
    settled = tick(cluster)
    assert len(settled) == 5 - len(made)
    for item in settled:
        assert isinstance(item.verdict, Rejected)
        assert isinstance(item.verdict.error, NoInstanceError)
    verdict = cluster.router.submit(ask(cluster, "z"))
    assert isinstance(verdict, Rejected)
    assert isinstance(verdict.error, NoInstanceError)


def test_full_queue_refuses() -> None:
    cluster = cluster_of(max_held=1)
    made = busy(cluster, 10)
    assert cluster.router.num_held == 1
    verdict = cluster.router.submit(ask(cluster, "z", 600))
    assert isinstance(verdict, Rejected)
    assert isinstance(verdict.error, CapacityError)
    assert verdict.error.reason == "queue_full"
    assert made


def test_short_prompt_and_mixed_instances_are_served_where_they_decode() -> None:
    cluster = cluster_of()
    decision = admitted(cluster, ask(cluster, "short", 15)).decision
    assert decision.prefill is None
    assert decision.local_reason is LocalPrefillReason.SHORT_PROMPT
    mixed = Cluster(mixed=1, policy="goodput")
    decision = admitted(mixed, ask(mixed, "a")).decision
    assert decision.local_reason is LocalPrefillReason.MIXED_ROLE


def test_prefix_draws_a_query_and_an_epoch_takes_that_away() -> None:
    cluster = cluster_of(4, 1)
    query = ask(cluster, "a")
    cluster.store("p2", query.hash_chains[0][:15])
    decision = admitted(cluster, query).decision
    assert decision.prefill is not None
    assert decision.prefill.instance_id == "p2"
    assert decision.cached_tokens == 240
    cluster.join("p2", Role.PREFILL, epoch=2)
    again = admitted(cluster, ask(cluster, "b")).decision
    assert again.cached_tokens == 0


def test_policies_that_do_not_hold_answer_at_once_behind_the_same_seam() -> None:
    cluster = Cluster(1, 1)
    assert isinstance(cluster.router.submit(make_query()), Admitted)
    assert cluster.router.tick() == []
    assert cluster.router.next_tick_ns() is None
    empty = Cluster()
    assert isinstance(empty.router.submit(make_query()), Rejected)


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "power_of_two", "prefix_only"])
def test_baselines_decide_behind_the_same_seam(policy: str) -> None:
    cluster = Cluster(3, 3, policy=policy)
    names = set()
    for number in range(12):
        verdict = cluster.router.submit(make_query(name=str(number)))
        assert isinstance(verdict, Admitted)
        assert verdict.decision.decode is not None
        names.add(verdict.decision.decode.instance_id)
    assert names == {"d0", "d1", "d2"}


def test_prefix_only_goes_where_the_prefix_is_whatever_waits_there() -> None:
    cluster = Cluster(3, 1, policy="prefix_only")
    query = make_query()
    cluster.store("p1", query.hash_chains[0][:15])
    cluster.report("p1", waiting_seqs=9, waiting_tokens=9_000)
    verdict = cluster.router.submit(query)
    assert isinstance(verdict, Admitted)
    assert verdict.decision.prefill is not None
    assert verdict.decision.prefill.instance_id == "p1"
