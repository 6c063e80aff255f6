"""One call of a load: what is sent and when, what came back, and whether that was good enough.

::

    due_s ── sent_s ──────────── first_s ── second_s ── … ── last_s
      │ lag    │                    │
      └────────┴──── TTFT ──────────┘└──── TPOT · (tokens − 1) ────┘

All times are seconds from the start of the run. TTFT counts from when the call was due, not
from when the generator got round to sending it: a stalled client or a full connection pool must
not make a server look quick ("coordinated omission").
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from isthmus.common import attainment
from isthmus.common.types import Slo
from isthmus.workload import Call


class Status(Enum):
    DONE = "done"
    REJECTED = "rejected"  # the server said no: 429, 503 and the like, before any token
    ERROR = "error"  # everything else that is not a whole answer
    TIMEOUT = "timeout"  # the generator gave up waiting


class Verdict(Enum):
    GOOD = "good"
    LATE_TTFT = "late_ttft"
    LATE_TPOT = "late_tpot"
    LATE_BOTH = "both"
    REJECTED = "rejected"
    ERROR = "error"
    TIMEOUT = "timeout"


_FINISHED = {
    attainment.Verdict.GOOD: Verdict.GOOD,
    attainment.Verdict.LATE_TTFT: Verdict.LATE_TTFT,
    attainment.Verdict.LATE_TPOT: Verdict.LATE_TPOT,
    attainment.Verdict.BOTH: Verdict.LATE_BOTH,
}
"""Of calls that have no target of their whole time."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Milliseconds; None = no target."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    @property
    def slo(self) -> Slo:
        return Slo(ttft_ms=self.ttft_ms, tpot_ms=self.tpot_ms)

    def scaled(self, factor: float) -> Targets:
        return Targets(
            None if self.ttft_ms is None else self.ttft_ms * factor,
            None if self.tpot_ms is None else self.tpot_ms * factor,
        )


@dataclass(slots=True)
class Record:
    """What is known of a call; filled in as it goes on."""

    call: Call
    sent_s: float = 0.0
    first_s: float = 0.0
    second_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    status: Status = Status.TIMEOUT
    http_status: int = 0
    problem: str = ""
    ended_s: float = 0.0  # answered, refused or given up

    @property
    def lag_ms(self) -> float:
        return (self.sent_s - self.call.due_s) * 1e3

    @property
    def ttft_ms(self) -> float | None:
        return (self.first_s - self.call.due_s) * 1e3 if self.first_s else None

    @property
    def second_token_gap_ms(self) -> float | None:
        return (self.second_s - self.first_s) * 1e3 if self.second_s else None

    @property
    def tpot_ms(self) -> float | None:
        """None for answers of one token: they have no time between tokens."""
        if not self.first_s or self.num_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_tokens - 1) * 1e3

    @property
    def e2e_ms(self) -> float | None:
        return (self.last_s - self.call.due_s) * 1e3 if self.status is Status.DONE else None

    def verdict(self, targets: Targets) -> Verdict:
        if self.status is not Status.DONE:
            return Verdict(self.status.value)
        measured = attainment.Measured(self.ttft_ms, self.tpot_ms, self.e2e_ms)
        return _FINISHED[attainment.judge(targets.slo, measured)]
