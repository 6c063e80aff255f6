"""What a run amounts to: attainment, goodput, percentiles, refusals, use of the instances, and how
right the router's predictions were. Words and fields are those of the load generator's summary."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from isthmus.common.clock import NS_PER_MS, NS_PER_S
from isthmus.common.ids import InstanceId
from isthmus.sim.cluster import SimCluster
from isthmus.sim.records import Record, RequestEnd
from isthmus.sim.sim_instance import SimInstance
from isthmus.workload.figures import Spread, spread


@dataclass(frozen=True, slots=True)
class ClassReport:
    """``attainment`` = good / offered; refused, failed and unfinished requests are offered and not
    good, cancelled ones offered if they had missed a target. ``goodput`` = good / span of the
    arrivals."""

    num_offered: int
    attainment: float
    ttft_attainment: float
    tpot_attainment: float
    goodput: float
    verdicts: dict[str, int]
    rejected: dict[str, int]  # by reason
    ttft: Spread
    tpot: Spread
    second_token_gap: Spread
    e2e: Spread


@dataclass(frozen=True, slots=True)
class RoleReport:
    """Of all instances, dead ones too. ``utilisation``: share of the time in which one ran a step,
    on average; it is idle while it is dead."""

    num_instances: int
    num_gpus: int
    utilisation: float
    num_preempted: int


@dataclass(frozen=True, slots=True)
class Coverage:
    """Measured / predicted, and how often the prediction was not exceeded; None without any."""

    count: int
    covered: float | None
    ratio_p50: float | None
    ratio_p90: float | None


@dataclass(frozen=True, slots=True)
class SimReport:
    name: str
    policy: str
    num_instances: int
    num_gpus: int
    span_s: float  # of the arrivals
    offered_rate: float
    total: ClassReport
    classes: dict[str, ClassReport]
    tenants: dict[str, float]  # attainment
    roles: dict[str, RoleReport]
    coverage: dict[str, Coverage]
    goodput_per_gpu: float
    output_tokens_per_s: float
    local_share: float  # prompts computed by the decode instance
    cached_share: float  # prompt tokens from a prefix cache
    transferred_gb: float
    num_retried: int
    num_events: int
    num_reports: int
    simulated_s: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def make_report(name: str, cluster: SimCluster, warm_up: float = 0.0) -> SimReport:
    """Of a run that is over. The first share ``warm_up`` of the requests is not counted."""
    records = cluster.records[int(len(cluster.records) * warm_up) :]
    if not records:
        raise ValueError("no request was offered")
    span_s = _span_s(records)
    finished = [record for record in records if record.end is RequestEnd.FINISHED]
    computed = [record for record in records if record.first_ns is not None]
    total = _class_report(records, span_s)
    instances = [*cluster.instances.values(), *cluster.retired]
    gpus = _gpus(instances)
    num_gpus = sum(gpus.values())
    ends = [record.end_ns for record in finished if record.end_ns is not None]
    lasted_s = (max(ends, default=0) - records[0].request.arrival_ns) / NS_PER_S
    simulated_s = cluster.since_start_ns / NS_PER_S
    roles = defaultdict(list)
    for instance in instances:
        roles[instance.spec.role.value].append(instance)
    return SimReport(
        name=name,
        policy=cluster.router.snapshot().policy,
        num_instances=len(gpus),
        num_gpus=num_gpus,
        span_s=span_s,
        offered_rate=len(records) / span_s,
        total=total,
        classes=_by(records, lambda r: r.request.slo.class_name, span_s),
        tenants={
            tenant: report.attainment
            for tenant, report in _by(records, lambda r: r.request.tenant, span_s).items()
        },
        roles={
            role: RoleReport(
                num_instances=len(_gpus(members)),
                num_gpus=sum(_gpus(members).values()),
                utilisation=sum(i.busy_ns for i in members)
                / NS_PER_S
                / max(1e-9, simulated_s * len(_gpus(members))),
                num_preempted=sum(instance.num_preempted for instance in members),
            )
            for role, members in sorted(roles.items())
        },
        coverage={
            "ttft": _coverage((_routed_ttft_ms(r), r.predicted_ttft_ms) for r in finished),
            "tpot": _coverage((r.tpot_ms, r.predicted_tpot_ms) for r in finished),
        },
        goodput_per_gpu=total.goodput / num_gpus,
        output_tokens_per_s=sum(r.num_tokens for r in finished) / lasted_s if ends else 0.0,
        local_share=sum(r.is_local for r in computed) / len(computed) if computed else 0.0,
        cached_share=sum(r.num_cached for r in computed)
        / max(1, sum(r.request.num_prompt for r in computed)),
        transferred_gb=(cluster.handovers.num_bytes + cluster.fetches.num_bytes) / 1e9,
        num_retried=sum(record.num_attempts > 1 for record in records),
        num_events=cluster.queue.num_done,
        num_reports=cluster.feed.num_reports,
        simulated_s=simulated_s,
    )


def verdict(record: Record) -> str:
    """One of ``isthmus_requests_total``'s outcomes, or ``unfinished`` when the run ended first."""
    found = record.verdict
    return RequestEnd.UNFINISHED.value if found is None else found.value


def _gpus(epochs: Iterable[SimInstance]) -> dict[InstanceId, int]:
    """Of each instance, dead or alive: one that came back is one, and one that is dead is paid for
    all the same."""
    return {epoch.spec.instance_id: epoch.spec.num_gpus for epoch in epochs}


def _class_report(records: Sequence[Record], span_s: float) -> ClassReport:
    offered = [record for record in records if record.is_offered]
    num_offered = max(1, len(offered))
    num_good = sum(record.is_good for record in offered)
    rejected = Counter(r.reason for r in offered if r.end is RequestEnd.REJECTED)
    return ClassReport(
        num_offered=len(offered),
        attainment=num_good / num_offered,
        ttft_attainment=sum(record.meets_ttft for record in offered) / num_offered,
        tpot_attainment=sum(record.meets_tpot for record in offered) / num_offered,
        goodput=num_good / span_s,
        verdicts=dict(Counter(verdict(record) for record in records)),
        rejected=dict(rejected),
        ttft=spread(record.ttft_ms for record in offered),
        tpot=spread(record.tpot_ms for record in offered),
        second_token_gap=spread(record.second_gap_ms for record in offered),
        e2e=spread(record.e2e_ms for record in offered),
    )


def _by(
    records: Sequence[Record], key: Callable[[Record], str], span_s: float
) -> dict[str, ClassReport]:
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if key(record):
            groups[key(record)].append(record)
    return {name: _class_report(group, span_s) for name, group in sorted(groups.items())}


def _span_s(records: Sequence[Record]) -> float:
    """Of n arrivals n − 1 gaps are seen; they stand for n."""
    first, last = records[0].request.arrival_ns, records[-1].request.arrival_ns
    seen_s = (last - first) / NS_PER_S
    return max(1e-9, seen_s * len(records) / max(1, len(records) - 1))


def _routed_ttft_ms(record: Record) -> float | None:
    """Counted from the decision, as predicted; None for who was sent twice."""
    if record.first_ns is None or record.routed_ns is None or record.num_attempts != 1:
        return None
    return (record.first_ns - record.routed_ns) / NS_PER_MS


def _coverage(pairs: Iterable[tuple[float | None, float]]) -> Coverage:
    known = [(measured, said) for measured, said in pairs if measured is not None and said > 0]
    ratios = spread(measured / said for measured, said in known)
    covered = sum(measured <= said for measured, said in known)
    share = covered / len(known) if known else None
    return Coverage(len(known), share, ratios.p50, ratios.p90)
