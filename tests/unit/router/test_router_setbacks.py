"""The goodput path after something went wrong: lost news, slow spells, absences, cancels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.common.cluster import Role
from isthmus.common.errors import SloShedError
from isthmus.common.ids import InstanceId, RequestId
from isthmus.common.types import RouteAction, Slo
from isthmus.router import Outcome, RouteQuery
from isthmus.router.prices import PriceBook, Stage
from isthmus.router.quantiles import Kind, Promise, ResidualTable
from isthmus.router.verdict import Admitted, Held, Rejected
from tests.support.router_cluster import LATENCY, Cluster, make_query

STRICT = Slo("strict", ttft_ms=1_000, is_strict=True)


def cluster_of(prefills: int = 1, decodes: int = 1, **config: object) -> Cluster:
    return Cluster(prefills, decodes, policy="goodput", exploration=0, **config)


def ask(cluster: Cluster, name: str, num_tokens: int = 320, **changes: object) -> RouteQuery:
    return make_query(num_tokens, name, arrival_ns=cluster.clock.now_ns(), **changes)


def idle_for(cluster: Cluster, span_ms: float, *names: str) -> None:
    """Time passes; the instances report that nothing is there."""
    for _ in range(int(span_ms / 100)):
        cluster.clock.advance_ms(100)
        for name in names or ("p0", "d0"):
            cluster.report(name)


def test_prompt_whose_outcome_never_came_is_not_waited_for() -> None:
    cluster = cluster_of()
    assert isinstance(cluster.router.submit(ask(cluster, "lost", 600)), Admitted)
    idle_for(cluster, 3_000)
    assert cluster.router.state.ledger.pending("p0").prompts_ms == 0
    verdict = cluster.router.submit(ask(cluster, "next", 600, slo=STRICT))
    assert isinstance(verdict, Admitted)
    assert verdict.decision.prefill is not None
    assert verdict.decision.predicted_ttft_ms == pytest.approx(600 + 2 * 5)
    cluster.check()


def test_prompt_that_reports_speak_of_is_waited_for_however_long_it_takes() -> None:
    cluster = cluster_of()
    made = cluster.router.submit(ask(cluster, "slow", 600))
    assert isinstance(made, Admitted)
    for _ in range(30):
        cluster.clock.advance_ms(100)
        cluster.report("p0", running_seqs=1)
        cluster.report("d0")
    assert cluster.router.state.ledger.pending("p0").prompts_ms == pytest.approx(600 + 2 * 5)
    cluster.check()


def test_successor_of_a_cancelled_prompt_begins_when_that_was_cancelled() -> None:
    cluster = cluster_of()
    first = cluster.router.submit(ask(cluster, "first", 2_000))
    assert isinstance(first, Admitted)
    ledger = cluster.router.state.ledger
    cluster.clock.advance_ms(2_000)
    cluster.report("p0", running_seqs=1)
    cluster.report("d0")
    second = cluster.router.route(ask(cluster, "second", 600))
    assert second.prefill is not None
    cluster.clock.advance_ms(400)
    cluster.router.report(first.decision.decision_id, Outcome.cancelled())
    assert ledger.pending("p0").head_since_ns == cluster.clock.monotonic_ns()
    assert ledger.pending("p0").head_ms == pytest.approx(600 + 2 * 5)
    cluster.check()


def test_slow_spell_refuses_as_overload_and_is_over_when_it_is_over() -> None:
    cluster = cluster_of()
    for view in cluster.router.cluster:
        view.prefill_factor = view.decode_factor = 3.0
        view.measured_ns = cluster.clock.monotonic_ns()
    cluster.report("p0")
    cluster.report("d0")
    both = Slo("both", ttft_ms=700, tpot_ms=50, is_strict=True)
    refused = cluster.router.submit(ask(cluster, "during", 600, slo=both))
    assert isinstance(refused, Rejected)
    assert isinstance(refused.error, SloShedError)
    assert refused.error.retry_after_ms >= 1_000
    idle_for(cluster, 61_000)
    assert isinstance(cluster.router.submit(ask(cluster, "after", 600, slo=both)), Admitted)


def test_absence_of_the_quick_instance_is_no_reason_to_call_a_target_infeasible() -> None:
    cluster = cluster_of(decodes=2)
    slow = replace(LATENCY, prefill_token=4)
    cluster.join("p9", Role.PREFILL, latency=slow)
    cluster.join("d9", Role.DECODE, latency=slow)
    for name in ("d0", "d1"):
        cluster.router.state.deregistered(InstanceId(name))
        cluster.router.state.stream_broken(InstanceId(name), 1, "gone")
    with_all = cluster.router.submit(ask(cluster, "a", 600, slo=STRICT))
    assert isinstance(with_all, Admitted)
    cluster.router.report(with_all.decision.decision_id, Outcome.finished())
    cluster.router.state.stream_broken(InstanceId("p0"), 1, "silent")
    refused = cluster.router.submit(ask(cluster, "b", 600, slo=STRICT))
    assert isinstance(refused, Rejected)
    assert isinstance(refused.error, SloShedError)
    assert refused.error.http_status == 429
    assert refused.error.retry_after_ms >= 1_000
    cluster.report("p0")
    excluded = ask(cluster, "c", 600, slo=STRICT, exclude=frozenset({InstanceId("p0")}))
    verdict = cluster.router.submit(excluded)
    assert isinstance(verdict, Rejected)
    assert isinstance(verdict.error, SloShedError)
    assert isinstance(cluster.router.submit(ask(cluster, "d", 600, slo=STRICT)), Admitted)


def test_best_effort_with_a_step_target_that_nobody_meets_is_served_at_once_and_told_so() -> None:
    cluster = cluster_of()
    quick = Slo("quick", tpot_ms=10)
    for number in range(2):
        query = ask(cluster, f"quick{number}", 100, slo=quick)
        verdict = cluster.router.submit(query)
        assert isinstance(verdict, Admitted)
        assert verdict.decision.action is RouteAction.DEGRADE
        assert verdict.decision.reason.startswith("slo_infeasible")
        cluster.router.report(verdict.decision.decision_id, Outcome.first_token())
    # Nor does anybody wait for what it cannot have anyway.
    verdict = cluster.router.submit(ask(cluster, "other", 100))
    assert isinstance(verdict, Admitted)
    assert verdict.decision.action is RouteAction.ADMIT
    assert not verdict.decision.reason.startswith("slo_infeasible")
    cluster.check()


def test_prompt_with_much_kv_gets_its_turn_when_it_has_waited_long() -> None:
    cluster = cluster_of(ageing_ms=1_000)
    cluster.report("d0", running_seqs=4, running_context_tokens=4_000, free_blocks=100)
    assert isinstance(cluster.router.submit(ask(cluster, "much", 3_000)), Held)

    def small(name: str) -> list[RequestId]:
        cluster.clock.advance_ms(200)
        cluster.report("p0")
        cluster.report("d0", running_seqs=4, running_context_tokens=4_000, free_blocks=100)
        assert isinstance(cluster.router.submit(ask(cluster, name, 100)), Held)
        return [settled.request_id for settled in cluster.router.tick()]

    assert small("before") == ["before"]
    cluster.clock.advance_ms(1_000)
    assert small("behind") == []
    cluster.report("p0")
    cluster.report("d0", running_seqs=1, running_context_tokens=1_000, free_blocks=900)
    assert cluster.router.tick()[0].request_id == "much"
    cluster.check()


def test_others_go_where_no_room_is_kept_for_one_that_has_waited_long() -> None:
    cluster = cluster_of(ageing_ms=1_000)
    cluster.join("d1", Role.DECODE)

    def crowded(**free: int) -> None:
        cluster.report("p0")
        for name, free_blocks in free.items():
            cluster.report(
                name, running_seqs=4, running_context_tokens=4_000, free_blocks=free_blocks
            )

    def small(name: str) -> str:
        """Where it goes; it ends at once."""
        cluster.router.submit(ask(cluster, name, 100))
        [settled] = cluster.router.tick()
        assert settled.request_id == name
        assert isinstance(settled.verdict, Admitted)
        decision = settled.verdict.decision
        assert decision.decode is not None
        cluster.router.report(decision.decision_id, Outcome.cancelled())
        return decision.decode.instance_id

    crowded(d0=80, d1=100)
    assert isinstance(cluster.router.submit(ask(cluster, "much", 3_000)), Held)
    cluster.clock.advance_ms(200)
    crowded(d0=80, d1=100)
    assert {small(f"young-{number}") for number in range(4)} == {"d0", "d1"}
    cluster.clock.advance_ms(1_000)
    crowded(d0=80, d1=100)
    assert cluster.router.tick() == []
    assert {small(f"old-{number}") for number in range(4)} == {"d0"}, "d1 lacks less"
    cluster.router.state.stream_broken(InstanceId("d1"), 1, "reset")
    cluster.clock.advance_ms(200)
    crowded(d0=80)
    assert cluster.router.tick() == []
    assert isinstance(cluster.router.submit(ask(cluster, "behind", 100)), Held)
    assert cluster.router.tick() == [], "room is kept on the only one that is left"
    crowded(d0=900)
    assert cluster.router.tick()[0].request_id == "much"
    cluster.check()


def test_room_is_not_kept_from_others_while_it_is_not_the_turn_of_who_waits_for_it() -> None:
    """Else nobody would begin: not those with a target for want of room, and not the other one,
    whose share of the work is used up, before they have."""
    cluster = cluster_of(ageing_ms=1_000)
    cluster.report("d0", running_seqs=4, running_context_tokens=4_000, free_blocks=100)
    for name in ("first", "second"):
        assert isinstance(cluster.router.submit(ask(cluster, name, 3_000)), Held)
    for free_blocks in (100, 290, 100):  # "first" begins, and room is kept for "second"
        cluster.clock.advance_ms(1_200)
        cluster.report("p0")
        cluster.report("d0", running_seqs=4, running_context_tokens=4_000, free_blocks=free_blocks)
        for settled in cluster.router.tick():
            assert settled.request_id == "first"
            assert isinstance(settled.verdict, Admitted)
            cluster.router.report(settled.verdict.decision.decision_id, Outcome.cancelled())
    begun: list[str] = []
    for number in range(400):
        cluster.clock.advance_ms(100)
        cluster.report("p0")
        cluster.report("d0")
        keen = Slo("keen", ttft_ms=2_000, is_strict=True)
        verdict = cluster.router.submit(ask(cluster, f"keen-{number}", 100, slo=keen))
        verdicts = [verdict, *(settled.verdict for settled in cluster.router.tick())]
        for admitted in verdicts:
            assert not isinstance(admitted, Rejected)
            if isinstance(admitted, Admitted):
                begun.append(admitted.decision.request_id)
                cluster.router.report(admitted.decision.decision_id, Outcome.first_token())
                cluster.router.report(admitted.decision.decision_id, Outcome.finished(20.0))
    assert "second" in begun
    cluster.check()


def test_room_is_kept_for_nobody_who_has_left() -> None:
    cluster = cluster_of(ageing_ms=1_000)
    cluster.report("d0", running_seqs=4, running_context_tokens=4_000, free_blocks=100)
    assert isinstance(cluster.router.submit(ask(cluster, "much", 3_000)), Held)
    cluster.clock.advance_ms(1_200)
    cluster.report("p0")
    cluster.report("d0", running_seqs=4, running_context_tokens=4_000, free_blocks=100)
    assert cluster.router.tick() == []
    assert isinstance(cluster.router.submit(ask(cluster, "behind", 100)), Held)
    assert cluster.router.tick() == []
    assert cluster.router.cancel(RequestId("much"))
    cluster.clock.advance_ms(200)
    cluster.report("d0", running_seqs=4, running_context_tokens=4_000, free_blocks=100)
    assert [settled.request_id for settled in cluster.router.tick()] == ["behind"]
    cluster.check()


def test_prices_count_nobody_twice_and_no_request_for_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[bool] = []

    def count(
        self: PriceBook, stage: Stage, quantile: float, has_missed: bool, now_ns: int
    ) -> None:
        counted.append(has_missed)

    monkeypatch.setattr(PriceBook, "count", count)
    cluster = cluster_of()
    keen = Slo("keen", ttft_ms=1_000)
    large = cluster.router.submit(ask(cluster, "large", 2_000, slo=keen))
    assert isinstance(large, Admitted)
    cluster.clock.advance_ms(2_100)
    cluster.router.report(large.decision.decision_id, Outcome.first_token())
    cluster.router.report(large.decision.decision_id, Outcome.finished(25.0))
    assert counted == []
    made: dict[str, Admitted] = {}
    for number in range(8):
        verdict = cluster.router.submit(ask(cluster, str(number), 600, slo=keen))
        if isinstance(verdict, Admitted):
            made[str(number)] = verdict
    for _ in range(20):
        for settled in cluster.router.tick():
            assert isinstance(settled.verdict, Admitted)
            made[settled.request_id] = settled.verdict
        cluster.clock.advance_ms(700)
        for verdict in list(made.values()):
            cluster.router.report(verdict.decision.decision_id, Outcome.first_token())
            cluster.router.report(verdict.decision.decision_id, Outcome.finished(25.0))
        cluster.report("p0")
        cluster.report("d0")
    assert len(made) == 8
    assert any(one.decision.action is RouteAction.DEGRADE for one in made.values())
    assert len(counted) == 8


def test_reading_what_was_never_measured_leaves_no_trace() -> None:
    table = ResidualTable()
    assert table.of(Kind.TTFT, 0).ratio(0.9, 0) > 1.0
    assert len(table) == 0
    table.observe(Promise(Kind.TTFT, 0, 0.9, 1_000.0, 2_000.0), 3_000.0, 0)
    assert len(table) == 1
    assert table.ratio(Kind.TPOT, 0, 0.5, 0) == 1.0


@pytest.mark.parametrize("policy", ["goodput", "least_predicted_load", "round_robin"])
def test_instances_that_have_gone_leave_nothing_behind(policy: str) -> None:
    cluster = Cluster(0, 1, policy=policy)
    state = cluster.router.state
    for number in range(100):
        name = InstanceId(f"gone-{number}")
        cluster.join(name, Role.DECODE)
        decision = cluster.router.route(make_query(name=str(number), prefer_decode=name))
        state.deregistered(name)
        state.stream_broken(name, 1, "test")
        cluster.router.report(decision.decision_id, Outcome.failed(name))
    assert len(state.dirty) <= 2


@pytest.mark.parametrize("policy", ["goodput", "least_predicted_load"])
def test_a_prompt_where_nobody_decodes_holds_nobody_up(policy: str) -> None:
    cluster = Cluster(1, 1, policy=policy, min_remote_tokens=32)
    view = cluster.router.state.cluster.views[InstanceId("d0")]
    assert cluster.router.route(make_query(20, "local")).prefill is None
    assert view.prompt_ms == 0.0
    cluster.router.route(make_query(20, "beside the local one"))
    assert view.prompt_ms > 0.0
