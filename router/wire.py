"""What goes into a router and comes out of it ⇄ messages.

Instants become time passed and time left on the way out, and instants again on the way in: two
clocks that disagree change no target and no deadline. What a newer version says that this one does
not know (an outcome, a filter's reason) is left out, or taken for the nearest that it knows.
"""

from __future__ import annotations

import time

from isthmus.common.clock import NS_PER_MS
from isthmus.common.errors import ErrorDetail
from isthmus.common.ids import InstanceId, RequestId
from isthmus.protos.convert.decisions import decision_from_pb, decision_to_pb
from isthmus.protos.convert.errors import error_from_pb, error_to_pb
from isthmus.protos.convert.kv_events import split_hashes
from isthmus.protos.convert.requests import slo_from_pb, slo_to_pb, timeline_from_pb, timeline_to_pb
from isthmus.protos.convert.times import instant_after, ms_left
from isthmus.protos.v1 import router_pb2 as pb
from isthmus.router.admission import FilterReason
from isthmus.router.explain import DecisionRecord, ExplainedCandidate
from isthmus.router.types import Outcome, OutcomeKind, RouteQuery

_OUTCOMES = {kind.value: kind for kind in OutcomeKind}
_FILTERS = {reason.value: reason for reason in FilterReason}


def query_to_pb(query: RouteQuery, *, may_wait: bool, gateway_id: str) -> pb.RouteRequest:
    return pb.RouteRequest(
        request_id=query.request_id,
        model=query.model,
        num_prompt_tokens=query.num_prompt_tokens,
        hash_chains=[b"".join(chain) for chain in query.hash_chains],
        slo=slo_to_pb(query.slo),
        tenant=query.tenant,
        max_output_tokens=query.max_output_tokens,
        exclude=sorted(query.exclude),
        prefer_decode=query.prefer_decode or "",
        needs_whole_prompt=query.needs_whole_prompt,
        elapsed_ms=query.elapsed_ms(time.time_ns()),
        timeout_ms=max(1, ms_left(query.deadline_ns)) if query.deadline_ns else 0,
        may_wait=may_wait,
        gateway_id=gateway_id,
        session=query.session,
    )


def query_from_pb(message: pb.RouteRequest) -> RouteQuery:
    return RouteQuery(
        request_id=RequestId(message.request_id),
        model=message.model,
        num_prompt_tokens=message.num_prompt_tokens,
        hash_chains=tuple(split_hashes(data) for data in message.hash_chains),
        slo=slo_from_pb(message.slo),
        tenant=message.tenant,
        session=message.session,
        max_output_tokens=message.max_output_tokens,
        arrival_ns=time.time_ns() - int(message.elapsed_ms * NS_PER_MS),
        deadline_ns=instant_after(message.timeout_ms) if message.timeout_ms else 0,
        exclude=frozenset(map(InstanceId, message.exclude)),
        prefer_decode=InstanceId(message.prefer_decode) if message.prefer_decode else None,
        needs_whole_prompt=message.needs_whole_prompt,
    )


def outcome_to_pb(decision_id: str, outcome: Outcome) -> pb.ReportOutcomeRequest:
    return pb.ReportOutcomeRequest(
        decision_id=decision_id,
        outcome=outcome.kind.value,
        timeline=timeline_to_pb(outcome.timeline) if outcome.timeline is not None else None,
        failed_instance=outcome.failed_instance or "",
        tpot_ms=outcome.tpot_ms,
        num_output_tokens=outcome.num_output_tokens,
    )


def outcome_from_pb(message: pb.ReportOutcomeRequest) -> Outcome:
    """An outcome that is not known here ends the reservation and blames nobody."""
    return Outcome(
        kind=_OUTCOMES.get(message.outcome, OutcomeKind.CANCELLED),
        failed_instance=InstanceId(message.failed_instance) if message.failed_instance else None,
        tpot_ms=message.tpot_ms if message.HasField("tpot_ms") else None,
        timeline=timeline_from_pb(message.timeline) if message.HasField("timeline") else None,
        num_output_tokens=message.num_output_tokens,
    )


def record_to_pb(record: DecisionRecord) -> pb.Explanation:
    return pb.Explanation(
        request_id=record.request_id,
        num_prompt_tokens=record.num_prompt_tokens,
        max_output_tokens=record.max_output_tokens,
        slo=slo_to_pb(record.slo),
        tenant=record.tenant,
        at_unix_ns=record.at_ns,
        decision=decision_to_pb(record.decision) if record.decision is not None else None,
        error=error_to_pb(record.error.to_error()) if record.error is not None else None,
        candidates=[_candidate_to_pb(item) for item in record.candidates],
        filtered=[
            pb.FilteredInstance(instance_id=name, reason=reason.value)
            for name, reason in record.filtered.items()
        ],
        num_filtered=record.num_filtered,
        outcomes=[kind.value for kind in record.outcomes],
        timeline=timeline_to_pb(record.timeline),
        elapsed_ms=record.elapsed_ms,
        held_for=record.held_for,
        tpot_ms=record.tpot_ms,
    )


def record_from_pb(message: pb.Explanation) -> DecisionRecord:
    error = ErrorDetail.of(error_from_pb(message.error)) if message.HasField("error") else None
    return DecisionRecord(
        request_id=RequestId(message.request_id),
        num_prompt_tokens=message.num_prompt_tokens,
        max_output_tokens=message.max_output_tokens,
        slo=slo_from_pb(message.slo),
        tenant=message.tenant,
        at_ns=message.at_unix_ns,
        decision=decision_from_pb(message.decision) if message.HasField("decision") else None,
        error=error,
        explained=tuple(_candidate_from_pb(item) for item in message.candidates),
        filtered={
            InstanceId(item.instance_id): _FILTERS[item.reason]
            for item in message.filtered
            if item.reason in _FILTERS
        },
        num_filtered=message.num_filtered,
        outcomes=[_OUTCOMES[name] for name in message.outcomes if name in _OUTCOMES],
        timeline=timeline_from_pb(message.timeline),
        elapsed_ms=message.elapsed_ms,
        held_for=message.held_for,
        tpot_ms=message.tpot_ms if message.HasField("tpot_ms") else None,
    )


def _candidate_to_pb(candidate: ExplainedCandidate) -> pb.ExplainedCandidate:
    return pb.ExplainedCandidate(
        decode=candidate.decode,
        prefill=candidate.prefill,
        local_reason=candidate.local_reason,
        score=candidate.score,
        queue_ms=candidate.queue_ms,
        prefill_ms=candidate.prefill_ms,
        tpot_ms=candidate.tpot_ms,
        cached_tokens=candidate.cached_tokens,
    )


def _candidate_from_pb(message: pb.ExplainedCandidate) -> ExplainedCandidate:
    return ExplainedCandidate(
        decode=InstanceId(message.decode),
        prefill=InstanceId(message.prefill),
        local_reason=message.local_reason,
        score=message.score,
        queue_ms=message.queue_ms,
        prefill_ms=message.prefill_ms,
        tpot_ms=message.tpot_ms,
        cached_tokens=message.cached_tokens,
    )
