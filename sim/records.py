"""What became of each request of a run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from isthmus.common.attainment import (
    Measured,
    Verdict,
    has_missed,
    is_offered,
    judge,
    meets_tpot,
    meets_ttft,
)
from isthmus.common.clock import NS_PER_MS
from isthmus.sim.requests import SimRequest


class RequestEnd(Enum):
    FINISHED = "finished"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    FAILED = "failed"
    UNFINISHED = "unfinished"  # the run ended first


_VERDICTS = {
    RequestEnd.REJECTED: Verdict.REJECTED,
    RequestEnd.CANCELLED: Verdict.CANCELLED,
    RequestEnd.FAILED: Verdict.ERROR,
    RequestEnd.UNFINISHED: None,
}


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
    def measured(self) -> Measured:
        return Measured(self.ttft_ms, self.tpot_ms, self.e2e_ms)

    @property
    def meets_ttft(self) -> bool:
        """False without a token, target or not: it was not served."""
        return self.first_ns is not None and meets_ttft(self.request.slo, self.measured)

    @property
    def meets_tpot(self) -> bool:
        """Of a finished request; an output of one token has none to miss."""
        is_finished = self.end is RequestEnd.FINISHED
        return is_finished and meets_tpot(self.request.slo, self.measured)

    @property
    def verdict(self) -> Verdict | None:
        """None for what the end of the run cut off, which no live request has. The run is over."""
        assert self.end is not None, "the run is over"
        if self.end is RequestEnd.FINISHED:
            return judge(self.request.slo, self.measured)
        return _VERDICTS[self.end]

    @property
    def is_good(self) -> bool:
        return self.verdict is Verdict.GOOD

    @property
    def is_offered(self) -> bool:
        if self.verdict is not Verdict.CANCELLED:
            return True
        return is_offered(Verdict.CANCELLED, has_missed=self._has_missed)

    @property
    def _has_missed(self) -> bool:
        """Whether it had missed a target when it ended; of the TPOT nothing is known then, as the
        tokens of an answer are not timed one by one."""
        assert self.end_ns is not None, "the run is over"
        elapsed_ms = (self.end_ns - self.request.arrival_ns) / NS_PER_MS
        return has_missed(self.request.slo, self.measured, elapsed_ms)
