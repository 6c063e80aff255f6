"""The metrics of one class of service, looked up once: a label costs as much as an observation.

Classes and the labels of tenants come from the configuration, and verdicts, decisions and reasons
are words of ours, so there are few of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from prometheus_client import Counter, Histogram

from isthmus.common import metrics
from isthmus.common.tally import Tally


@dataclass(frozen=True, slots=True)
class ClassMetrics:
    ttft: Tally
    tpot: Tally
    e2e: Tally
    second_token_gap: Tally
    predicted_ttft: Tally
    predicted_tpot: Tally
    ttft_slack: Histogram
    tpot_slack: Histogram


@cache
def metrics_of(slo_class: str) -> ClassMetrics:
    return ClassMetrics(
        ttft=metrics.TTFT.labels(slo_class=slo_class),
        tpot=metrics.TPOT.labels(slo_class=slo_class),
        e2e=metrics.E2E.labels(slo_class=slo_class),
        second_token_gap=metrics.SECOND_TOKEN_GAP.labels(slo_class=slo_class),
        predicted_ttft=metrics.PREDICTED_TTFT.labels(slo_class=slo_class),
        predicted_tpot=metrics.PREDICTED_TPOT.labels(slo_class=slo_class),
        ttft_slack=metrics.SLACK.labels(slo_class=slo_class, target="ttft"),
        tpot_slack=metrics.SLACK.labels(slo_class=slo_class, target="tpot"),
    )


@cache
def offered_counter(slo_class: str, tenant: str) -> Counter:
    return metrics.REQUESTS_OFFERED.labels(slo_class=slo_class, tenant=tenant)


@cache
def outcome_counter(slo_class: str, tenant: str, outcome: str) -> Counter:
    return metrics.REQUESTS.labels(slo_class=slo_class, tenant=tenant, outcome=outcome)


@cache
def admission_counter(slo_class: str, tenant: str, decision: str, reason: str) -> Counter:
    return metrics.ADMISSION.labels(
        slo_class=slo_class, tenant=tenant, decision=decision, reason=reason
    )
