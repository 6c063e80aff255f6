"""Questions, outcomes and explanations come off the wire as they were put on it."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from isthmus.common.errors import IsthmusError, NoInstanceError
from isthmus.common.ids import InstanceId, RequestId
from isthmus.common.timeline import Event, Timeline
from isthmus.common.types import Slo
from isthmus.protos.v1 import router_pb2 as pb
from isthmus.router import Admitted, Outcome, OutcomeKind
from isthmus.router.explain import DecisionLog
from isthmus.router.wire import (
    outcome_from_pb,
    outcome_to_pb,
    query_from_pb,
    query_to_pb,
    record_from_pb,
    record_to_pb,
)
from tests.support.router_cluster import Cluster, hashes_of, make_query

NS_PER_S = 1_000_000_000


def test_a_question_keeps_its_meaning() -> None:
    now_ns = time.time_ns()
    query = make_query(
        100,
        slo=Slo("gold", 100.0, 20.0, None, quantile=0.99, weight=2.0, is_strict=True),
        tenant="acme",
        session="chat",
        hash_chains=(hashes_of(list(range(64))), ()),
        exclude=frozenset({InstanceId("p0"), InstanceId("p1")}),
        prefer_decode=InstanceId("d0"),
        needs_whole_prompt=True,
        arrival_ns=now_ns - NS_PER_S,
        deadline_ns=now_ns + 60 * NS_PER_S,
    )
    message = query_to_pb(query, may_wait=True, gateway_id="g")
    back = query_from_pb(pb.RouteRequest.FromString(message.SerializeToString()))
    assert message.elapsed_ms >= 1_000
    assert 0 < message.timeout_ms <= 60_000
    assert replace(back, arrival_ns=query.arrival_ns, deadline_ns=query.deadline_ns) == query


def test_a_question_without_times_has_none_on_the_other_side() -> None:
    assert query_from_pb(query_to_pb(make_query(), may_wait=False, gateway_id="")).deadline_ns == 0


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome.prefill_failed(InstanceId("p0")),
        Outcome.first_token(),
        Outcome.finished(12.5, Timeline({Event.ARRIVED: 5, Event.FINISHED: 9}), 40),
        Outcome.cancelled(),
        Outcome.refused(),
        Outcome.failed(InstanceId("d0")),
        Outcome.failed(None),
    ],
)
def test_an_outcome_keeps_its_meaning(outcome: Outcome) -> None:
    back = outcome_from_pb(outcome_to_pb("d", outcome))
    assert (back.kind, back.failed_instance) == (outcome.kind, outcome.failed_instance)
    assert back.tpot_ms == outcome.tpot_ms
    assert back.num_output_tokens == outcome.num_output_tokens
    said, heard = outcome.timeline, back.timeline
    assert (said is None) == (heard is None)
    if said is not None and heard is not None:
        assert heard.items() == said.items()


def test_an_outcome_that_is_not_known_here_blames_nobody() -> None:
    message = pb.ReportOutcomeRequest(decision_id="d", outcome="from_the_future")
    assert outcome_from_pb(message).kind is OutcomeKind.CANCELLED


def test_an_explanation_has_candidates_reasons_and_what_was_measured() -> None:
    cluster = Cluster(2, 2)
    decision = cluster.router.route(make_query(name="r-0.0", slo=Slo("gold", 100.0), tenant="t"))
    timeline = Timeline({Event.ARRIVED: 1, Event.FIRST_FLUSH: 3_000_001})
    cluster.router.report(decision.decision_id, Outcome.finished(1.0, timeline))
    (record,) = cluster.router.log.of_request("r")
    record.held_for, record.elapsed_ms = "in_line", 12.5
    back = record_from_pb(record_to_pb(record))
    assert (back.held_for, back.elapsed_ms, back.tpot_ms) == ("in_line", 12.5, 1.0)
    assert back.candidates == record.candidates
    assert back.candidates
    assert back.outcomes == [OutcomeKind.FINISHED]
    assert (back.request_id, back.tenant, back.slo) == ("r-0.0", "t", Slo("gold", 100.0))
    assert back.decision is not None
    assert back.decision.decode == decision.decode
    assert back.timeline.seconds(Event.ARRIVED, Event.FIRST_FLUSH) == 0.003
    assert back.error is None


def test_a_late_bound_decision_is_explained_like_any_other() -> None:
    cluster = Cluster(2, 1, policy="goodput")
    cluster.router.state.stream_broken(InstanceId("p1"), 1, "test")
    verdict = cluster.router.submit(make_query(name="r-0.0"))
    assert isinstance(verdict, Admitted)
    (record,) = cluster.router.log.of_request("r")
    back = record_from_pb(record_to_pb(record))
    assert back.decision is not None
    assert back.decision.policy == "goodput"
    assert {candidate.prefill for candidate in back.candidates} <= {"p0", "d0"}
    assert {name: reason.value for name, reason in back.filtered.items()} == {"p1": "suspect"}


def test_a_refusal_is_explained_with_its_error_and_who_was_left_out() -> None:
    cluster = Cluster(1, 1)
    cluster.router.state.stream_broken(InstanceId("d0"), 1, "test")
    with pytest.raises(NoInstanceError):
        cluster.router.route(make_query(name="r-0.0"))
    (record,) = cluster.router.log.of_request("r-0.0")
    back = record_from_pb(record_to_pb(record))
    assert back.decision is None
    assert back.error is not None
    error: IsthmusError = back.error.to_error()
    assert isinstance(error, NoInstanceError)
    assert error.reason == "out_of_reach"
    assert error.retry_after_ms > 0
    reasons = {name: reason.value for name, reason in back.filtered.items()}
    assert reasons == {"d0": "suspect", "p0": "incompatible"}


def test_explanations_are_found_by_any_of_a_requests_names() -> None:
    log = Cluster(1, 1).router
    for name in ("mine.a1b2-0.0", "mine.a1b2-1.0", "mine2.c3-0.0", "other-0.0"):
        log.route(make_query(name=name))
    found = {
        asked: [record.request_id for record in log.log.of_request(asked)]
        for asked in ("mine", "mine.a1b2", "mine.a1b2-1.0", "min", "")
    }
    assert found["mine"] == found["mine.a1b2"] == ["mine.a1b2-0.0", "mine.a1b2-1.0"]
    assert found["mine.a1b2-1.0"] == ["mine.a1b2-1.0"]
    assert found["min"] == found[""] == []


def test_records_of_one_sequence_are_those_that_are_kept() -> None:
    cluster = Cluster(1, 1)
    log = DecisionLog(max_records=2)
    for name in ("a", "b", "a"):
        cluster.router.route(make_query(name=name))
        log.add(cluster.router.log.last(1)[0])
    assert [record.request_id for record in log.of_sequence(RequestId("a"))] == ["a"]
    assert len(log.of_sequence(RequestId("b"))) == 1
    cluster.router.route(make_query(name="c"))
    log.add(cluster.router.log.last(1)[0])
    assert log.of_sequence(RequestId("b")) == ()
