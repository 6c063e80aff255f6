"""Why was this request sent there: the last decisions with what was considered and what was not.

A record is made with the decision (or refusal) and gains what is told of it later: outcomes, and
the times that were measured. Memory is bounded by the number of records and by what each may hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType

from isthmus.common.errors import ErrorDetail, IsthmusError
from isthmus.common.ids import DecisionId, InstanceId, RequestId
from isthmus.common.timeline import Timeline
from isthmus.common.types import RouteDecision, Slo
from isthmus.router.admission import FilterReason
from isthmus.router.policy import Candidate
from isthmus.router.types import Outcome, OutcomeKind, RouteQuery

MAX_RECORDS = 4096
MAX_EXPLAINED = 8
MAX_FILTERED = 32
_NOBODY: Mapping[InstanceId, FilterReason] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ExplainedCandidate:
    decode: InstanceId
    prefill: InstanceId
    local_reason: str
    score: float
    queue_ms: float
    prefill_ms: float
    tpot_ms: float
    cached_tokens: int

    @classmethod
    def of(cls, candidate: Candidate) -> ExplainedCandidate:
        return cls(
            decode=candidate.decode.view.instance_id,
            prefill=candidate.prefill.view.instance_id,
            local_reason=candidate.local_reason.value,
            score=candidate.score,
            queue_ms=candidate.prefill.wait_ms,
            prefill_ms=candidate.prefill.prefill_ms,
            tpot_ms=candidate.decode.tpot_ms,
            cached_tokens=candidate.prefill.cached_tokens,
        )


@dataclass(slots=True)
class DecisionRecord:
    """``ranked``, ``explained``: the best few, best first; read them as ``candidates``, which turns
    the one into the other, since few records are ever asked for. ``filtered``: why others were
    none, the first of ``num_filtered``. Either a decision or an error. ``timeline``: what was
    measured, as far as it was told; unix nanoseconds, like ``at_ns``."""

    request_id: RequestId
    num_prompt_tokens: int
    max_output_tokens: int
    slo: Slo
    tenant: str
    at_ns: int
    decision: RouteDecision | None = None
    error: ErrorDetail | None = None
    ranked: Sequence[Candidate] = ()
    explained: tuple[ExplainedCandidate, ...] = ()
    filtered: Mapping[InstanceId, FilterReason] = field(default_factory=lambda: _NOBODY)
    num_filtered: int = 0
    outcomes: list[OutcomeKind] = field(default_factory=list)
    timeline: Timeline = field(default_factory=Timeline)
    elapsed_ms: float = 0.0  # from the request's arrival to ``at_ns``
    held_for: str = ""  # why it waited in the router; empty = it did not
    tpot_ms: float | None = None  # measured

    @classmethod
    def of(
        cls, query: RouteQuery, filtered: Mapping[InstanceId, FilterReason], at_ns: int
    ) -> DecisionRecord:
        return cls(
            request_id=query.request_id,
            num_prompt_tokens=query.num_prompt_tokens,
            max_output_tokens=query.max_output_tokens,
            slo=query.slo,
            tenant=query.tenant,
            at_ns=at_ns,
            filtered=dict(islice(filtered.items(), MAX_FILTERED)) if filtered else _NOBODY,
            num_filtered=len(filtered),
            elapsed_ms=query.elapsed_ms(at_ns),
            held_for=query.held_for,
        )

    def decided(self, decision: RouteDecision, candidates: Sequence[Candidate]) -> DecisionRecord:
        self.decision = decision
        is_short = len(candidates) <= MAX_EXPLAINED
        self.ranked = candidates if is_short else candidates[:MAX_EXPLAINED]
        return self

    @property
    def candidates(self) -> tuple[ExplainedCandidate, ...]:
        if self.ranked:
            self.explained = tuple([ExplainedCandidate.of(item) for item in self.ranked])
            self.ranked = ()
        return self.explained

    def refused(self, error: IsthmusError) -> DecisionRecord:
        self.error = ErrorDetail.of(error)
        return self

    def told(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome.kind)
        if outcome.tpot_ms is not None:
            self.tpot_ms = outcome.tpot_ms
        if outcome.timeline is not None:
            self.timeline.merge(outcome.timeline)


class DecisionLog:
    """The last ``max_records`` decisions and refusals, oldest first."""

    def __init__(self, max_records: int = MAX_RECORDS) -> None:
        self._max_records = max_records
        self._records: deque[DecisionRecord] = deque()
        self._by_decision: dict[DecisionId, DecisionRecord] = {}
        self._by_request: dict[RequestId, list[DecisionRecord]] = {}

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: DecisionRecord) -> None:
        self._records.append(record)
        if record.decision is not None:
            self._by_decision[record.decision.decision_id] = record
        self._by_request.setdefault(record.request_id, []).append(record)
        if len(self._records) > self._max_records:
            self._forget(self._records.popleft())

    def get(self, decision_id: DecisionId) -> DecisionRecord | None:
        return self._by_decision.get(decision_id)

    def of_sequence(self, request_id: RequestId) -> tuple[DecisionRecord, ...]:
        """Oldest first: those whose ``request_id`` is exactly this one. Costs no search."""
        return tuple(self._by_request.get(request_id, ()))

    def of_request(self, request_id: str) -> list[DecisionRecord]:
        """Oldest first: a request that was routed again, or has several choices, has several.

        ``request_id`` is one sequence's, the whole request's (which its sequences' begin with), or
        the one that its client gave it.
        """
        beginnings = (f"{request_id}-", f"{request_id}.")
        return [
            record
            for record in self._records
            if record.request_id == request_id or record.request_id.startswith(beginnings)
        ]

    def last(self, count: int) -> list[DecisionRecord]:
        """Newest first."""
        return list(islice(reversed(self._records), count))

    def _forget(self, oldest: DecisionRecord) -> None:
        if oldest.decision is not None:
            del self._by_decision[oldest.decision.decision_id]
        same = self._by_request[oldest.request_id]
        del same[0]
        if not same:
            del self._by_request[oldest.request_id]
