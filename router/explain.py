"""Why was this request sent there: the last decisions with what was considered and what was not."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from isthmus.common.ids import DecisionId, InstanceId, RequestId
from isthmus.common.types import RouteDecision
from isthmus.router.admission import FilterReason
from isthmus.router.policy import Candidate
from isthmus.router.types import OutcomeKind

MAX_RECORDS = 256
MAX_EXPLAINED = 8


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
    """``candidates`` : the best few, best first. ``filtered``: why others were none."""

    decision: RouteDecision
    num_prompt_tokens: int
    at_ns: int  # monotonic
    candidates: tuple[ExplainedCandidate, ...]
    filtered: dict[InstanceId, FilterReason]
    outcomes: list[OutcomeKind] = field(default_factory=list)


class DecisionLog:
    """The last ``MAX_RECORDS`` decisions."""

    def __init__(self, max_records: int = MAX_RECORDS) -> None:
        self._max_records = max_records
        self._order: deque[DecisionId] = deque()
        self._records: dict[DecisionId, DecisionRecord] = {}

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: DecisionRecord) -> None:
        self._order.append(record.decision.decision_id)
        self._records[record.decision.decision_id] = record
        if len(self._order) > self._max_records:
            del self._records[self._order.popleft()]

    def get(self, decision_id: DecisionId) -> DecisionRecord | None:
        return self._records.get(decision_id)

    def of_request(self, request_id: RequestId) -> list[DecisionRecord]:
        """Oldest first: a request that was routed again has several."""
        return [
            record
            for decision_id in self._order
            if (record := self._records[decision_id]).decision.request_id == request_id
        ]

    def last(self, count: int) -> list[DecisionRecord]:
        """Newest first."""
        newest = list(self._order)[::-1][:count]
        return [self._records[decision_id] for decision_id in newest]
