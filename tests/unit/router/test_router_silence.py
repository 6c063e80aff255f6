"""An instance that tells nothing is avoided while others of its kind do, and never for that alone
left idle when nobody else is there."""

from __future__ import annotations

import pytest

from isthmus.common.types import Slo
from isthmus.router import Outcome
from isthmus.router.verdict import Admitted, Held
from tests.support.router_cluster import Cluster, make_query

POLICIES = ("goodput", "least_predicted_load")
LONG_MS = 3_600_000.0
KEEN = Slo("keen", ttft_ms=2_000, tpot_ms=200)


def cluster_of(policy: str, prefills: int, decodes: int) -> Cluster:
    return Cluster(prefills, decodes, policy=policy, exploration=0)


def places(cluster: Cluster, count: int, slo: Slo) -> list[tuple[str, str]]:
    """Who serves so many requests, one after the other; each must begin at once, and none
    tells how long it took."""
    found = []
    for number in range(count):
        query = make_query(
            600,
            f"{cluster.clock.monotonic_ns()}-{number}",
            slo=slo,
            arrival_ns=cluster.clock.now_ns(),
        )
        verdict = cluster.router.submit(query)
        assert isinstance(verdict, Admitted), verdict
        decision = verdict.decision
        prefill = decision.prefill.instance_id if decision.prefill is not None else ""
        found.append((prefill, decision.decode.instance_id))
        cluster.router.report(decision.decision_id, Outcome.cancelled())
    return found


@pytest.mark.parametrize("slo", [Slo(), KEEN], ids=["no_target", "keen"])
@pytest.mark.parametrize("policy", POLICIES)
def test_who_is_silent_is_avoided_while_others_report(policy: str, slo: Slo) -> None:
    cluster = cluster_of(policy, 2, 2)
    assert {name for pair in places(cluster, 8, slo) for name in pair} == {"p0", "p1", "d0", "d1"}
    cluster.clock.advance_ms(LONG_MS)
    cluster.report("p1")
    cluster.report("d1")
    assert set(places(cluster, 8, slo)) == {("p1", "d1")}
    cluster.report("p0")
    cluster.report("d0")
    assert {name for pair in places(cluster, 8, slo) for name in pair} == {"p0", "p1", "d0", "d1"}


@pytest.mark.parametrize("slo", [Slo(), KEEN], ids=["no_target", "keen"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("prefills", [0, 1, 2])
def test_all_are_used_when_all_are_silent(policy: str, slo: Slo, prefills: int) -> None:
    cluster = cluster_of(policy, prefills, 2)
    for silence_ms in (2_500.0, 60_000.0, LONG_MS):
        cluster.clock.advance_ms(silence_ms)
        names = {name for pair in places(cluster, 8, slo) for name in pair if name}
        assert names >= {"d0", "d1"}


def test_prefill_instances_that_are_all_silent_work_for_decode_instances_that_report() -> None:
    cluster = cluster_of("goodput", 2, 1)
    cluster.clock.advance_ms(LONG_MS)
    cluster.report("d0")
    assert {prefill for prefill, _ in places(cluster, 8, KEEN)} == {"p0", "p1"}


def test_the_only_one_left_is_used_though_it_is_silent() -> None:
    cluster = cluster_of("goodput", 1, 1)
    cluster.clock.advance_ms(LONG_MS)
    assert places(cluster, 1, KEEN) == [("p0", "d0")]


def test_work_of_others_that_a_silent_instance_spoke_of_ends_some_time() -> None:
    cluster = cluster_of("goodput", 1, 1)
    for name in ("p0", "d0"):
        cluster.report(name, waiting_seqs=10, waiting_tokens=4_000)
    query = make_query(600, "r", slo=Slo("gold", ttft_ms=60_000), arrival_ns=cluster.clock.now_ns())
    assert isinstance(cluster.router.submit(query), Held)
    cluster.clock.advance_ms(3_000)
    assert cluster.router.tick() == []
    cluster.clock.advance_ms(3_000)
    assert [type(settled.verdict) for settled in cluster.router.tick()] == [Admitted]


def test_retry_after_is_not_longer_for_silence() -> None:
    """What ``least_predicted_load`` doubts of an instance is bounded too."""
    waits = []
    for silence_ms in (10_000.0, LONG_MS):
        cluster = cluster_of("least_predicted_load", 0, 1)
        cluster.clock.advance_ms(silence_ms)
        decision = cluster.router.route(make_query())
        waits.append(decision.predicted_ttft_ms)
    assert waits[0] == waits[1]
