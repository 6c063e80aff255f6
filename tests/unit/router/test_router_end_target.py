"""What a target of the end decides: it leaves so much for the first token, and no more."""

from __future__ import annotations

import pytest

from isthmus.common.clock import NS_PER_MS
from isthmus.common.errors import InfeasibleSloError, SloShedError
from isthmus.common.types import RouteAction, Slo
from isthmus.router import RouteQuery
from isthmus.router.end_target import bounded_by_end
from isthmus.router.verdict import Admitted, Held, Rejected
from tests.support.router_cluster import LATENCY, Cluster, make_query


def cluster_of() -> Cluster:
    return Cluster(1, 1, policy="goodput", exploration=0)


def ask(cluster: Cluster, name: str, slo: Slo, num_tokens: int = 320) -> RouteQuery:
    now_ns = cluster.clock.now_ns()
    return make_query(num_tokens, name, arrival_ns=now_ns, slo=slo, max_output_tokens=16)


def busy(cluster: Cluster) -> None:
    for number in range(4):
        cluster.router.submit(ask(cluster, f"busy{number}", Slo(), 600))
    assert cluster.router.num_held


def test_a_target_of_the_end_leaves_what_the_expected_answer_does_not_take() -> None:
    cluster = cluster_of()
    query = ask(cluster, "a", Slo(e2e_ms=5_000))
    bound = bounded_by_end(query, 101, cluster.router.state)
    step_ms = LATENCY.decode_step_ms(1, 320 + 50)
    assert bound.slo.ttft_ms == pytest.approx(5_000 - 100 * step_ms)
    assert bound.is_bound_by_end
    one = bounded_by_end(query, 1, cluster.router.state)
    assert one.slo.ttft_ms == pytest.approx(5_000)


def test_the_tighter_of_two_targets_counts() -> None:
    cluster = cluster_of()
    query = ask(cluster, "a", Slo(ttft_ms=100, e2e_ms=5_000))
    assert bounded_by_end(query, 16, cluster.router.state) is query
    assert bounded_by_end(ask(cluster, "b", Slo()), 16, cluster.router.state).slo.ttft_ms is None


def test_a_strict_class_refuses_an_end_that_not_even_an_idle_instance_would_keep() -> None:
    cluster = cluster_of()
    verdict = cluster.router.submit(ask(cluster, "a", Slo("quick", e2e_ms=1, is_strict=True)))
    assert isinstance(verdict, Rejected)
    assert isinstance(verdict.error, InfeasibleSloError)
    assert "the E2E target of class quick, 1 ms, leaves for it" in verdict.error.message


def test_best_effort_is_served_though_its_end_cannot_be_kept_and_says_so() -> None:
    cluster = cluster_of()
    verdict = cluster.router.submit(ask(cluster, "a", Slo("quick", e2e_ms=1)))
    assert isinstance(verdict, Admitted)
    assert verdict.decision.action is RouteAction.DEGRADE
    assert verdict.decision.reason.startswith("slo_infeasible")


def test_who_must_end_in_time_waits_with_a_latest_start() -> None:
    cluster = cluster_of()
    busy(cluster)
    verdict = cluster.router.submit(ask(cluster, "a", Slo("agent", e2e_ms=60_000)))
    assert isinstance(verdict, Held)
    assert verdict.latest_start_ns is not None
    now_ns = cluster.clock.monotonic_ns()
    assert now_ns < verdict.latest_start_ns < now_ns + 60_000 * NS_PER_MS


def test_a_strict_class_is_shed_when_load_makes_its_end_late() -> None:
    cluster = cluster_of()
    slo = Slo("quick", e2e_ms=1_000, is_strict=True)
    late = ask(cluster, "a", slo)
    cluster.clock.advance_ms(900)
    verdict = cluster.router.submit(late)
    assert isinstance(verdict, Rejected)
    assert isinstance(verdict.error, SloShedError)
