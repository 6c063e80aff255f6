"""What became of each request of a run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from isthmus.common.clock import NS_PER_MS
from isthmus.sim.requests import SimRequest


class RequestEnd(Enum):
    FINISHED = "finished"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    FAILED = "failed"
    UNFINISHED = "unfinished"  # the run ended first


@dataclass(eq=False, slots=True)
class Record:
    """Times count from the start of the run; None = never happened. Predictions are of the last
    decision, and count from when it was made."""

    request: SimRequest
    end: RequestEnd | None = None
    reason: str = ""  # of a rejection or failure
    routed_ns: int | None = None
    first_ns: int | None = None
    second_ns: int | None = None
    end_ns: int | None = None
    num_tokens: int = 0
    num_cached: int = 0
    is_local: bool = False
    num_attempts: int = 0
    predicted_ttft_ms: float = 0.0
    predicted_tpot_ms: float = 0.0

    @property
    def ttft_ms(self) -> float | None:
        if self.first_ns is None:
            return None
        return (self.first_ns - self.request.arrival_ns) / NS_PER_MS

    @property
    def tpot_ms(self) -> float | None:
        """None for an output of one token."""
        if self.end is not RequestEnd.FINISHED or self.num_tokens < 2:
            return None
        assert self.end_ns is not None
        assert self.first_ns is not None
        return (self.end_ns - self.first_ns) / NS_PER_MS / (self.num_tokens - 1)

    @property
    def e2e_ms(self) -> float | None:
        if self.end is not RequestEnd.FINISHED or self.end_ns is None:
            return None
        return (self.end_ns - self.request.arrival_ns) / NS_PER_MS

    @property
    def second_gap_ms(self) -> float | None:
        if self.second_ns is None or self.first_ns is None:
            return None
        return (self.second_ns - self.first_ns) / NS_PER_MS

    @property
    def meets_ttft(self) -> bool:
        limit = self.request.slo.ttft_ms
        return self.ttft_ms is not None and (limit is None or self.ttft_ms <= limit)

    @property
    def meets_tpot(self) -> bool:
        """Of a finished request; an output of one token has none to miss."""
        limit, tpot_ms = self.request.slo.tpot_ms, self.tpot_ms
        is_finished = self.end is RequestEnd.FINISHED
        return is_finished and (limit is None or tpot_ms is None or tpot_ms <= limit)

    @property
    def is_good(self) -> bool:
        limit, e2e_ms = self.request.slo.e2e_ms, self.e2e_ms
        is_in_time = limit is None or (e2e_ms is not None and e2e_ms <= limit)
        return self.meets_ttft and self.meets_tpot and is_in_time
