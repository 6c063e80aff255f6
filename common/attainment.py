"""What became of a request, in the words that goodput is counted in.

A request is *good* when it finished without error and met all the targets it had. Live requests,
simulated ones and those of a load generator are judged by the same functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from isthmus.common.errors import (
    CancelledError,
    CapacityError,
    DrainingError,
    InfeasibleSloError,
    InvalidRequestError,
    IsthmusError,
)
from isthmus.common.types import Slo


class Verdict(Enum):
    GOOD = "good"
    LATE_TTFT = "late_ttft"
    LATE_TPOT = "late_tpot"
    BOTH = "both"  # late in TTFT and in TPOT
    LATE_E2E = "late_e2e"  # in time for both, but not at the end
    REJECTED = "rejected"
    ERROR = "error"
    CANCELLED = "cancelled"
    INVALID = "invalid"  # the client's mistake: was never an offer of work

    __hash__ = object.__hash__  # looked up for every request


_LATE = {
    (False, True): Verdict.LATE_TTFT,
    (True, False): Verdict.LATE_TPOT,
    (False, False): Verdict.BOTH,
}
"""By whether it was in time for the TTFT and for the TPOT."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Milliseconds; None = did not happen (no token yet, or too few for a TPOT)."""

    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None


def judge(slo: Slo, measured: Measured) -> Verdict:
    """Of a request that finished. A target on what did not happen is met, but for the TTFT."""
    is_in_time = meets_ttft(slo, measured), meets_tpot(slo, measured)
    if is_in_time == (True, True):
        return Verdict.LATE_E2E if _is_missed(slo.e2e_ms, measured.e2e_ms) else Verdict.GOOD
    return _LATE[is_in_time]


def meets_ttft(slo: Slo, measured: Measured) -> bool:
    has_no_token = slo.ttft_ms is not None and measured.ttft_ms is None
    return not (has_no_token or _is_missed(slo.ttft_ms, measured.ttft_ms))


def meets_tpot(slo: Slo, measured: Measured) -> bool:
    return not _is_missed(slo.tpot_ms, measured.tpot_ms)


def judge_error(error: IsthmusError, *, has_begun: bool) -> Verdict:
    """Of a request that ``error`` ended. ``has_begun``: tokens of it had come."""
    if isinstance(error, CancelledError):
        return Verdict.CANCELLED
    is_refusal = isinstance(error, CapacityError | DrainingError | InfeasibleSloError)
    if is_refusal and not has_begun:
        return Verdict.REJECTED
    is_invalid = isinstance(error, InvalidRequestError) and not is_refusal
    return Verdict.INVALID if is_invalid else Verdict.ERROR


def is_offered(verdict: Verdict, *, has_missed: bool) -> bool:
    """Whether it counts in a goodput ratio. A client that leaves while all is in time has changed
    its mind; one that leaves after a target was missed has not been served."""
    if verdict is Verdict.CANCELLED:
        return has_missed
    return verdict is not Verdict.INVALID


def has_missed(slo: Slo, measured: Measured, elapsed_ms: float) -> bool:
    """Whether a request that has not finished, ``elapsed_ms`` after its arrival, has missed a
    target already."""
    ttft_ms = elapsed_ms if measured.ttft_ms is None else measured.ttft_ms
    so_far = Measured(ttft_ms, measured.tpot_ms, elapsed_ms)
    return judge(slo, so_far) is not Verdict.GOOD


def _is_missed(target_ms: float | None, value_ms: float | None) -> bool:
    return target_ms is not None and value_ms is not None and value_ms > target_ms
