from __future__ import annotations

import pytest

from isthmus.common.attainment import (
    Measured,
    Verdict,
    has_missed,
    is_offered,
    judge,
    judge_error,
)
from isthmus.common.errors import (
    CancelledError,
    DeadlineError,
    DrainingError,
    InfeasibleSloError,
    InstanceLostError,
    InvalidRequestError,
    IsthmusError,
    NoInstanceError,
    QuotaError,
    SloShedError,
)
from isthmus.common.types import Slo

SLO = Slo("gold", ttft_ms=100, tpot_ms=10, e2e_ms=1_000)


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        ((100, 10, 1_000), Verdict.GOOD),
        ((101, 10, 1_000), Verdict.LATE_TTFT),
        ((100, 11, 1_000), Verdict.LATE_TPOT),
        ((101, 11, 1_000), Verdict.BOTH),
        ((101, 11, 1_001), Verdict.BOTH),
        ((100, 10, 1_001), Verdict.LATE_E2E),
        ((100, None, 100), Verdict.GOOD),  # one token has no TPOT
        ((None, None, 50), Verdict.LATE_TTFT),
    ],
)
def test_a_finished_request_is_good_when_it_met_every_target(
    measured: tuple[float | None, float | None, float], verdict: Verdict
) -> None:
    assert judge(SLO, Measured(*measured)) is verdict


def test_without_targets_all_that_finishes_is_good() -> None:
    assert judge(Slo(), Measured(None, None, 10**9)) is Verdict.GOOD


@pytest.mark.parametrize(
    ("error", "begun", "verdict"),
    [
        (QuotaError("q"), False, Verdict.REJECTED),
        (SloShedError("s"), False, Verdict.REJECTED),
        (NoInstanceError("n"), False, Verdict.REJECTED),
        (DrainingError("d"), False, Verdict.REJECTED),
        (InfeasibleSloError("i"), False, Verdict.REJECTED),
        (NoInstanceError("n"), True, Verdict.ERROR),
        (InstanceLostError("l"), False, Verdict.ERROR),
        (DeadlineError("d"), False, Verdict.ERROR),
        (InvalidRequestError("i"), False, Verdict.INVALID),
        (CancelledError("c"), True, Verdict.CANCELLED),
    ],
)
def test_an_error_is_a_refusal_only_before_anything_was_served(
    error: IsthmusError, begun: bool, verdict: Verdict
) -> None:
    assert judge_error(error, has_begun=begun) is verdict


def test_a_client_that_leaves_late_counts_as_offered_and_one_in_time_does_not() -> None:
    nothing = Measured(None, None, None)
    assert not has_missed(SLO, nothing, elapsed_ms=100)
    assert has_missed(SLO, nothing, elapsed_ms=101)
    assert has_missed(SLO, Measured(50, 11, None), elapsed_ms=60)
    assert not is_offered(Verdict.CANCELLED, has_missed=False)
    assert is_offered(Verdict.CANCELLED, has_missed=True)
    assert not is_offered(Verdict.INVALID, has_missed=True)
    assert is_offered(Verdict.REJECTED, has_missed=False)
