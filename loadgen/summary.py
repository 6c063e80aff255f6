"""What a run amounts to: attainment, goodput, percentiles, refusals, the generator's own lag."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from isthmus.loadgen.types import Record, Status, Targets, Verdict
from isthmus.workload import mean_rate
from isthmus.workload.figures import Spread, spread

# A generator that sends later than this in the tail is too slow for the rate that it was asked for.
MAX_LAG_MS = 50.0


@dataclass(frozen=True, slots=True)
class Summary:
    """``attainment`` = good / offered, refused and failed calls among the offered ones;
    ``goodput`` = good / span of the arrivals, requests per second."""

    targets: Targets
    num_offered: int
    span_s: float
    offered_rate: float
    attainment: float
    goodput: float
    verdicts: dict[str, int]
    ttft: Spread
    tpot: Spread
    second_token_gap: Spread
    e2e: Spread
    lag: Spread
    output_tokens_per_s: float
    problems: dict[str, int]

    @property
    def is_generator_late(self) -> bool:
        return (self.lag.p99 or 0.0) > MAX_LAG_MS

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_generator_late": self.is_generator_late}


def summarise(records: Sequence[Record], targets: Targets, warm_up: int = 0) -> Summary:
    """The first ``warm_up`` records are left out. Raises ValueError when none is left."""
    counted = records[warm_up:]
    if not counted:
        raise ValueError("no record to summarise")
    verdicts = Counter(record.verdict(targets) for record in counted)
    span_s = len(counted) / mean_rate([record.call for record in counted])
    good = verdicts[Verdict.GOOD]
    ends = [record.last_s for record in counted if record.status is Status.DONE]
    busy_s = max(ends, default=0.0) - counted[0].call.due_s
    num_tokens = sum(record.num_tokens for record in counted if record.status is Status.DONE)
    return Summary(
        targets=targets,
        num_offered=len(counted),
        span_s=span_s,
        offered_rate=len(counted) / span_s,
        attainment=good / len(counted),
        goodput=good / span_s,
        verdicts={verdict.value: verdicts[verdict] for verdict in Verdict},
        ttft=spread(record.ttft_ms for record in counted),
        tpot=spread(record.tpot_ms for record in counted),
        second_token_gap=spread(record.second_token_gap_ms for record in counted),
        e2e=spread(record.e2e_ms for record in counted),
        lag=spread(record.lag_ms for record in counted),
        output_tokens_per_s=num_tokens / busy_s if ends else 0.0,
        problems=dict(Counter(_kind_of(record) for record in counted if record.problem)),
    )


def _kind_of(record: Record) -> str:
    status = f"{record.http_status} " if record.http_status else ""
    return f"{status}{record.problem.splitlines()[0][:120]}"
