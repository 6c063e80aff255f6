"""A call is judged by when it was due, and by both of its targets at once."""

from __future__ import annotations

import pytest

from isthmus.loadgen import Record, Status, Targets, Verdict, summarise
from isthmus.workload import Call

TARGETS = Targets(ttft_ms=500, tpot_ms=50)


def record(
    due_s: float = 1.0, first_s: float = 1.4, last_s: float = 1.8, tokens: int = 11, **more: object
) -> Record:
    made = Record(Call(0, due_s, 10, tokens), sent_s=due_s, first_s=first_s, last_s=last_s)
    made.num_tokens, made.status = tokens, Status.DONE
    for name, value in more.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("made", "verdict"),
    [
        (record(), Verdict.GOOD),
        (record(first_s=1.6, last_s=1.8), Verdict.LATE_TTFT),
        (record(last_s=2.4), Verdict.LATE_TPOT),
        (record(first_s=1.6, last_s=2.4), Verdict.LATE_BOTH),
        (record(tokens=1, last_s=1.4), Verdict.GOOD),  # no time between tokens to be late in
        (record(status=Status.REJECTED), Verdict.REJECTED),
        (record(status=Status.ERROR), Verdict.ERROR),
        (record(status=Status.TIMEOUT), Verdict.TIMEOUT),
    ],
)
def test_verdicts(made: Record, verdict: Verdict) -> None:
    assert made.verdict(TARGETS) is verdict


def test_a_call_that_was_sent_late_is_late() -> None:
    late = record(due_s=1.0, sent_s=1.5, first_s=1.9, last_s=2.0)
    assert late.ttft_ms == pytest.approx(900)
    assert late.lag_ms == pytest.approx(500)
    assert late.verdict(TARGETS) is Verdict.LATE_TTFT


def test_goodput_is_the_offered_rate_times_the_attainment() -> None:
    records = [record(due_s=float(i), first_s=i + 0.1, last_s=i + 0.2) for i in range(10)]
    records[3].status = Status.REJECTED
    records[3].problem, records[3].http_status = "slow down", 429
    summary = summarise(records, TARGETS)
    assert summary.offered_rate == pytest.approx(1.0)
    assert summary.attainment == pytest.approx(0.9)
    assert summary.goodput == pytest.approx(0.9)
    assert summary.verdicts["good"] == 9
    assert summary.problems == {"429 slow down": 1}
    assert summary.ttft.count == 10
    assert not summary.is_generator_late


def test_warm_up_calls_do_not_count() -> None:
    records = [record(due_s=0.0, first_s=5.0), *[record(due_s=float(i)) for i in (1, 2)]]
    records[2].first_s, records[2].last_s = 2.4, 2.8
    assert summarise(records, TARGETS, warm_up=1).attainment == 1.0
    with pytest.raises(ValueError, match="no record"):
        summarise(records, TARGETS, warm_up=3)


def test_what_was_not_measured_is_not_zero() -> None:
    summary = summarise([record(tokens=1), record(due_s=2.0, first_s=2.1, tokens=1)], TARGETS)
    assert (summary.tpot.count, summary.tpot.p50, summary.tpot.p99) == (0, None, None)
    assert summary.ttft.count == 2


def test_a_slow_generator_is_told() -> None:
    records = [record(sent_s=1.2) for _ in range(10)]
    assert summarise(records, TARGETS).is_generator_late
