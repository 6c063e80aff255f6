"""What the router learns and gives back when decisions end, and how it refuses."""

from __future__ import annotations

import pytest

from isthmus.common.cluster import InstanceState, Role
from isthmus.common.errors import (
    CapacityError,
    ContextLengthError,
    ModelNotFoundError,
    NoInstanceError,
)
from isthmus.common.ids import DecisionId, InstanceId, RequestId
from isthmus.common.types import LocalPrefillReason
from isthmus.router import FilterReason, Outcome, OutcomeKind
from isthmus.router.explain import MAX_RECORDS
from tests.support.router_cluster import Cluster, make_query

P0, D0 = InstanceId("p0"), InstanceId("d0")


def breaker_of(cluster: Cluster, name: str) -> str:
    instances = {i.instance_id: i for i in cluster.router.snapshot().instances}
    return instances[InstanceId(name)].breaker


def fail(cluster: Cluster, name: str, times: int) -> None:
    for number in range(times):
        decision = cluster.router.route(make_query(name=str(number)))
        cluster.router.report(decision.decision_id, Outcome.failed(InstanceId(name)))


# --- ledger ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "end",
    [Outcome.finished(), Outcome.cancelled(), Outcome.refused(), Outcome.failed(None)],
    ids=lambda outcome: outcome.kind.value,
)
@pytest.mark.parametrize("has_first_token", [True, False])
def test_every_end_frees_the_reservation(end: Outcome, has_first_token: bool) -> None:
    cluster = Cluster(1, 1)
    decision = cluster.router.route(make_query())
    ledger = cluster.router.state.ledger
    assert [prompt.prefill_tokens for prompt in ledger.unreported(P0)] == [320]
    assert ledger.pending(D0).decode_seqs == 1
    assert ledger.pending(D0).decode_blocks == 21
    if has_first_token:
        cluster.router.report(decision.decision_id, Outcome.first_token())
        assert ledger.unreported(P0) == []
        assert ledger.pending(D0).decode_seqs == 1
    cluster.router.report(decision.decision_id, end)
    cluster.router.report(decision.decision_id, end)
    assert len(ledger) == 0
    assert ledger.num_open(P0) == ledger.num_open(D0) == 0
    cluster.check()


def test_request_in_the_report_is_not_counted_again() -> None:
    cluster = Cluster(1, 1)
    first = cluster.router.route(make_query(name="a"))
    cluster.clock.advance_ms(50)
    cluster.report("p0", waiting_seqs=1, waiting_tokens=320)
    ledger = cluster.router.state.ledger
    assert ledger.unreported(P0) == []
    second = cluster.router.route(make_query(name="b"))
    assert [prompt.prefill_tokens for prompt in ledger.unreported(P0)] == [320]
    cluster.clock.advance_ms(50)
    cluster.report("p0", waiting_seqs=1, waiting_tokens=320)  # b is still on its way
    assert [prompt.prefill_tokens for prompt in ledger.unreported(P0)] == [320]
    cluster.clock.advance_ms(2_000)
    cluster.report("p0", waiting_seqs=1, waiting_tokens=320)  # b is not coming, or a has gone
    assert ledger.unreported(P0) == []
    for decision in (first, second):
        cluster.router.report(decision.decision_id, Outcome.finished())
    cluster.check()


def test_decode_load_is_projected_to_the_handoff() -> None:
    cluster = Cluster(1, 1)
    decision = cluster.router.route(make_query())
    cluster.clock.advance_ms(50)
    cluster.report("d0", free_blocks=979)  # blocks are taken, the sequence is not there yet
    ledger = cluster.router.state.ledger
    assert ledger.pending(D0).decode_seqs == 1
    assert ledger.pending(D0).decode_blocks == 0
    cluster.router.report(decision.decision_id, Outcome.first_token())
    cluster.clock.advance_ms(50)
    cluster.report("d0", running_seqs=1, running_context_tokens=321, free_blocks=979)
    assert ledger.pending(D0).decode_seqs == 0
    cluster.router.report(decision.decision_id, Outcome.finished())
    cluster.check()


def test_untold_outcome_expires() -> None:
    cluster = Cluster(1, 1, reservation_ttl_ms=1_000)
    cluster.router.route(make_query(name="a"))
    cluster.clock.advance_ms(1_000)
    decision = cluster.router.route(make_query(name="b"))
    assert cluster.router.snapshot().num_reservations == 1
    cluster.router.report(decision.decision_id, Outcome.finished())
    assert len(cluster.router.feedback) == 0


def test_first_token_renews_a_reservation() -> None:
    cluster = Cluster(1, 1, reservation_ttl_ms=1_000)
    decision = cluster.router.route(make_query(name="a"))
    cluster.clock.advance_ms(900)
    cluster.router.report(decision.decision_id, Outcome.first_token())
    cluster.clock.advance_ms(900)
    cluster.router.route(make_query(name="b"))
    assert decision.decision_id in cluster.router.state.ledger


def test_unknown_decision_is_harmless() -> None:
    cluster = Cluster(1, 1)
    for outcome in (Outcome.first_token(), Outcome.finished(5.0), Outcome.cancelled()):
        cluster.router.report(DecisionId("nobody's"), outcome)
    assert cluster.router.snapshot().num_reservations == 0


# --- breakers -------------------------------------------------------------------------------


def test_failures_in_a_row_open_the_breaker_and_a_probe_closes_it() -> None:
    cluster = Cluster(1, 1, breaker_failures=3, breaker_open_ms=2_000)
    fail(cluster, "p0", 3)
    assert breaker_of(cluster, "p0") == "open"
    local = cluster.router.route(make_query())
    assert local.local_reason is LocalPrefillReason.NO_PREFILL_INSTANCE
    cluster.router.report(local.decision_id, Outcome.finished())
    cluster.clock.advance_ms(2_000)
    cluster.report("p0")
    cluster.report("d0")
    probe = cluster.router.route(make_query())
    assert probe.prefill is not None
    assert cluster.router.route(make_query()).prefill is None  # one probe at a time
    cluster.router.report(probe.decision_id, Outcome.finished())
    assert breaker_of(cluster, "p0") == "closed"


def test_failed_probe_opens_again() -> None:
    cluster = Cluster(1, 1, breaker_failures=1, breaker_open_ms=1_000)
    fail(cluster, "p0", 1)
    cluster.clock.advance_ms(1_000)
    fail(cluster, "p0", 1)
    assert breaker_of(cluster, "p0") == "open"


def test_successes_between_failures_keep_it_closed() -> None:
    cluster = Cluster(1, 1, breaker_failures=2)
    for _ in range(5):
        fail(cluster, "p0", 1)
        decision = cluster.router.route(make_query())
        cluster.router.report(decision.decision_id, Outcome.finished())
    assert breaker_of(cluster, "p0") == "closed"


def test_client_aborts_and_refusals_are_no_failures() -> None:
    cluster = Cluster(1, 1, breaker_failures=3)
    for number in range(20):
        decision = cluster.router.route(make_query(name=str(number)))
        outcome = Outcome.cancelled() if number % 2 else Outcome.refused()
        cluster.router.report(decision.decision_id, outcome)
    assert breaker_of(cluster, "p0") == breaker_of(cluster, "d0") == "closed"


@pytest.mark.parametrize("end", [Outcome.cancelled(), None], ids=["cancelled", "expired"])
def test_probe_that_proves_nothing_gives_its_place_back(end: Outcome | None) -> None:
    cluster = Cluster(1, 1, breaker_failures=1, breaker_open_ms=1_000, reservation_ttl_ms=500)
    fail(cluster, "p0", 1)
    cluster.clock.advance_ms(1_000)
    probe = cluster.router.route(make_query())
    assert probe.prefill is not None
    if end is None:
        cluster.clock.advance_ms(500)
    else:
        cluster.router.report(probe.decision_id, end)
    assert cluster.router.route(make_query()).prefill is not None


def test_hidden_prefill_failure_counts_though_the_client_noticed_nothing() -> None:
    cluster = Cluster(1, 1, breaker_failures=3)
    for number in range(3):
        decision = cluster.router.route(make_query(name=str(number)))
        cluster.router.report(decision.decision_id, Outcome.prefill_failed(P0))
        cluster.router.report(decision.decision_id, Outcome.first_token())
        cluster.router.report(decision.decision_id, Outcome.finished())
    assert breaker_of(cluster, "p0") == "open"
    assert breaker_of(cluster, "d0") == "closed"


def test_each_prefill_instance_that_let_a_request_down_is_blamed() -> None:
    cluster = Cluster(2, 1, breaker_failures=1)
    decision = cluster.router.route(make_query())
    assert decision.prefill is not None
    assert decision.alternate is not None
    for ref in (decision.prefill, decision.alternate):
        cluster.router.report(decision.decision_id, Outcome.prefill_failed(ref.instance_id))
    assert cluster.router.snapshot().num_reservations == 1  # the request goes on
    cluster.router.report(decision.decision_id, Outcome.first_token())
    cluster.router.report(decision.decision_id, Outcome.finished())
    assert [breaker_of(cluster, name) for name in ("p0", "p1", "d0")] == ["open", "open", "closed"]
    assert cluster.router.snapshot().num_reservations == 0


def test_the_time_of_two_attempts_teaches_nothing_about_the_first() -> None:
    cluster = Cluster(1, 1, breaker_failures=9)
    view = cluster.router.cluster.get(P0)
    assert view is not None
    decision = cluster.router.route(make_query())
    cluster.clock.advance_ms(60_000)
    cluster.router.report(decision.decision_id, Outcome.prefill_failed(P0))
    cluster.router.report(decision.decision_id, Outcome.first_token())
    assert view.prefill_factor == 1.0
    cluster.router.report(decision.decision_id, Outcome.finished())


def test_restarted_instance_is_not_blamed_for_its_past() -> None:
    cluster = Cluster(1, 1, breaker_failures=1)
    before = cluster.router.route(make_query())
    fail(cluster, "p0", 1)
    cluster.join("p0", Role.PREFILL, epoch=2)
    assert breaker_of(cluster, "p0") == "closed"
    cluster.router.report(before.decision_id, Outcome.failed(P0))
    assert breaker_of(cluster, "p0") == "closed"
    decision = cluster.router.route(make_query())
    assert decision.prefill is not None
    assert decision.prefill.epoch == 2


def test_restart_clears_cache_and_reservations_at_once() -> None:
    cluster = Cluster(2, 1)
    query = make_query()
    cluster.store("p0", query.hash_chains[0])
    cluster.router.route(query)
    cluster.join("p0", Role.PREFILL, epoch=2)
    assert cluster.router.state.index.match(query.hash_chains) == {}
    assert cluster.router.state.ledger.num_open(P0) == 0
    cluster.router.state.registered(cluster.join("p0", Role.PREFILL, epoch=1))  # a late record
    assert cluster.router.cluster.views[P0].info.epoch == 2
    cluster.check()


# --- corrections ----------------------------------------------------------------------------


def test_predictions_follow_what_is_measured() -> None:
    cluster = Cluster(1, 1)
    first = cluster.router.route(make_query())
    decision = first
    for _ in range(60):
        cluster.clock.advance_ms(3 * first.predicted_ttft_ms)
        cluster.report("p0")
        cluster.report("d0")
        cluster.router.report(decision.decision_id, Outcome.first_token())
        tpot_ms = 2 * first.predicted_tpot_ms
        cluster.router.report(decision.decision_id, Outcome.finished(tpot_ms))
        decision = cluster.router.route(make_query())
    # The measured TTFT grows with nothing, so the prediction must have come close to it.
    assert decision.predicted_ttft_ms == pytest.approx(3 * first.predicted_ttft_ms, rel=0.1)
    assert decision.predicted_tpot_ms == pytest.approx(2 * first.predicted_tpot_ms, rel=0.1)


def test_a_burst_corrects_a_prediction_once_and_not_for_every_request() -> None:
    """All were predicted before the first of them told that the instance is half as fast."""
    cluster = Cluster(1, 1)
    decisions = [cluster.router.route(make_query(name=str(number))) for number in range(50)]
    assert all(decision.prefill is not None for decision in decisions)
    past_ms = 0.0
    for decision in decisions:
        cluster.clock.advance_ms(2 * decision.predicted_ttft_ms - past_ms)
        past_ms = 2 * decision.predicted_ttft_ms
        cluster.router.report(decision.decision_id, Outcome.first_token())
        cluster.router.report(decision.decision_id, Outcome.finished())
    factor = cluster.router.cluster.views[P0].prefill_factor
    assert factor == pytest.approx(2, rel=0.05)
    cluster.report("p0")
    cluster.report("d0")
    again = [cluster.router.route(make_query(name=f"again {number}")) for number in range(50)]
    # A queue is as slow as its requests, and not once more by the factor …
    assert again[-1].predicted_ttft_ms == pytest.approx(factor * 50 * 325, rel=0.01)
    # … and the decode instance, of which nothing is known, is not taken for twice as fast.
    assert all(decision.prefill is not None for decision in again)


# --- re-routing -----------------------------------------------------------------------------


def test_reroute_avoids_the_failed_instance() -> None:
    cluster = Cluster(2, 2)
    query = make_query()
    first = cluster.router.route(query)
    assert first.decode is not None
    failed = first.decode.instance_id
    cluster.router.report(first.decision_id, Outcome.failed(failed))
    second = cluster.router.reroute(query, failed, "stream broke")
    assert second.decode is not None
    assert second.decode.instance_id != failed
    assert second.decision_id != first.decision_id
    assert failed in second.reason
    assert cluster.router.snapshot().num_reservations == 1
    assert [r.decision.decision_id for r in cluster.router.log.of_request(RequestId("r"))] == [
        first.decision_id,
        second.decision_id,
    ]


def test_reroute_without_the_only_prefill_is_local() -> None:
    cluster = Cluster(1, 1)
    decision = cluster.router.reroute(make_query(), P0, "handshake failed")
    assert decision.local_reason is LocalPrefillReason.NO_PREFILL_INSTANCE


# --- refusals -------------------------------------------------------------------------------


def test_empty_cluster_refuses_with_a_time_to_retry() -> None:
    with pytest.raises(NoInstanceError) as caught:
        Cluster().router.route(make_query())
    assert 1_000 <= caught.value.retry_after_ms <= 60_000
    assert caught.value.stage == "route"


def test_prefill_alone_cannot_serve() -> None:
    cluster = Cluster(2, 0)
    with pytest.raises(NoInstanceError):
        cluster.router.route(make_query())
    assert not cluster.router.snapshot().is_ready


def test_refusal_names_each_reason_and_waits_for_the_first() -> None:
    cluster = Cluster(1, 1, breaker_failures=1, breaker_open_ms=30_000)
    fail(cluster, "d0", 1)
    with pytest.raises(NoInstanceError, match="d0: breaker_open") as caught:
        cluster.router.route(make_query())
    assert 20_000 <= caught.value.retry_after_ms <= 36_000
    cluster.join("d1", Role.DECODE, state=InstanceState.STARTING)
    with pytest.raises(NoInstanceError, match="d1: not_ready") as caught:
        cluster.router.route(make_query())
    assert caught.value.retry_after_ms < 5_000


@pytest.mark.parametrize(
    "limits", [{"max_model_len": 320}, {"num_blocks": 20}], ids=["tokens", "blocks"]
)
def test_prompt_that_never_fits_is_the_clients_error(limits: dict[str, int]) -> None:
    cluster = Cluster(1)
    cluster.join("d0", Role.DECODE, **limits)
    with pytest.raises(ContextLengthError, match="319"):
        cluster.router.route(make_query(320))
    assert cluster.router.route(make_query(319)).decode is not None


def test_prompt_too_long_for_prefill_only_is_computed_on_decode() -> None:
    cluster = Cluster(decodes=1)
    cluster.join("p0", Role.PREFILL, max_model_len=100)
    decision = cluster.router.route(make_query(320))
    assert decision.local_reason is LocalPrefillReason.NO_PREFILL_INSTANCE
    assert cluster.router.log.last(1)[0].filtered == {P0: FilterReason.TOO_LONG}


def test_unknown_model_names_the_known_ones() -> None:
    with pytest.raises(ModelNotFoundError, match="served: m"):
        Cluster(1, 1).router.route(make_query(model="gpt"))


def test_full_decode_instance_is_passed_over_while_another_has_room() -> None:
    cluster = Cluster(1, 2)
    cluster.report("d0", running_seqs=4, running_context_tokens=16_000, free_blocks=3)
    decision = cluster.router.route(make_query())
    assert decision.decode is not None
    assert decision.decode.instance_id == "d1"
    assert cluster.router.log.last(1)[0].filtered == {D0: FilterReason.FULL}


def test_requests_queue_when_all_are_full_and_are_refused_when_the_queue_is_long() -> None:
    cluster = Cluster(1, 1)
    cluster.report("d0", running_seqs=16, running_context_tokens=16_000, free_blocks=3)
    assert cluster.router.route(make_query()).decode is not None
    cluster.report("d0", running_seqs=16, waiting_seqs=200, free_blocks=3)
    with pytest.raises(CapacityError) as caught:
        cluster.router.route(make_query())
    assert not isinstance(caught.value, NoInstanceError)
    assert 1_000 <= caught.value.retry_after_ms <= 60_000
    assert cluster.router.snapshot().num_reservations == 1


# --- explanations ---------------------------------------------------------------------------


def test_decision_can_be_explained_afterwards() -> None:
    cluster = Cluster(2, 2)
    cluster.router.state.stream_broken(InstanceId("p1"), 1, "test")
    decision = cluster.router.route(make_query(exclude=frozenset({InstanceId("d1")})))
    cluster.router.report(decision.decision_id, Outcome.first_token())
    cluster.router.report(decision.decision_id, Outcome.finished())
    record = cluster.router.log.get(decision.decision_id)
    assert record is not None
    assert record.filtered == {
        InstanceId("p1"): FilterReason.SUSPECT,
        InstanceId("d1"): FilterReason.EXCLUDED,
    }
    assert [(c.decode, c.prefill) for c in record.candidates] == [(D0, P0), (D0, D0)]
    assert record.candidates[0].score < record.candidates[1].score
    assert record.outcomes == [OutcomeKind.FIRST_TOKEN, OutcomeKind.FINISHED]


def test_decision_log_is_bounded() -> None:
    cluster = Cluster(1, 1)
    for number in range(MAX_RECORDS + 20):
        decision = cluster.router.route(make_query(33, name=str(number)))
        cluster.router.report(decision.decision_id, Outcome.finished())
    assert len(cluster.router.log) == MAX_RECORDS
    assert cluster.router.log.last(1)[0].decision == decision
