"""A prompt whose head a decode instance holds is not predicted as if all of it were computed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.common.cluster import Role
from isthmus.common.types import RouteDecision, Slo
from isthmus.router import RouteQuery
from isthmus.router.links import SETUP_MS
from isthmus.router.verdict import Admitted
from tests.support.router_cluster import LAYOUT, Cluster, make_query

POLICIES = ["goodput", "least_predicted_load", "round_robin"]
HELD_BLOCKS = 40  # of the 50 that the prompt has


def cluster_of(
    policy: str, *, least: int = 64, dtype: str = "float32", decodes: int = 1
) -> Cluster:
    """``dtype``: of the decode instances' KV."""
    cluster = Cluster(policy=policy, exploration=0)
    for number in range(decodes):  # with residents, which a local prefill would hold up
        name = f"d{number}"
        cluster.join(name, Role.DECODE, kv_layout=replace(LAYOUT, dtype=dtype))
        cluster.report(name, running_seqs=8, running_context_tokens=4_000, free_blocks=700)
    cluster.join("p0", Role.PREFILL, fetch_min_tokens=least)
    return cluster


def decided(cluster: Cluster, query: RouteQuery) -> RouteDecision:
    verdict = cluster.router.submit(query)
    assert isinstance(verdict, Admitted)
    assert verdict.decision.prefill is not None
    return verdict.decision


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_fetched_is_not_predicted_as_computed(policy: str) -> None:
    cluster = cluster_of(policy)
    query = make_query(800)
    cluster.store("d0", query.hash_chains[0][:HELD_BLOCKS])
    decision = decided(cluster, query)
    assert decision.cached_tokens == 640
    computed_ms = 5 + 160
    assert computed_ms + SETUP_MS < decision.predicted_ttft_ms < computed_ms + 2 * SETUP_MS
    cluster.check()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("why", ["never", "too_little", "whole", "has_it", "dtype"])
def test_what_is_not_fetched_is_computed(policy: str, why: str) -> None:
    least = {"never": 0, "too_little": 641}.get(why, 64)
    cluster = cluster_of(policy, least=least, dtype="bfloat16" if why == "dtype" else "float32")
    query = make_query(800, needs_whole_prompt=why == "whole")
    cluster.store("d0", query.hash_chains[0][:HELD_BLOCKS])
    if why == "has_it":
        cluster.store("p0", query.hash_chains[0][: HELD_BLOCKS - 2])
    decision = decided(cluster, query)
    assert decision.cached_tokens == (608 if why == "has_it" else 0)
    chunks = 1 if why == "has_it" else 2
    assert decision.predicted_ttft_ms == pytest.approx(5 * chunks + 800 - decision.cached_tokens)


@pytest.mark.parametrize("policy", ["goodput", "least_predicted_load"])
def test_the_decode_instance_that_holds_the_head_is_chosen(policy: str) -> None:
    cluster = cluster_of(policy, decodes=6)
    query = make_query(800)
    cluster.store("d4", query.hash_chains[0][:HELD_BLOCKS])
    decision = decided(cluster, query)
    assert decision.decode is not None
    assert decision.decode.instance_id == "d4"


def test_a_fetch_makes_a_target_feasible() -> None:
    cluster = cluster_of("goodput")
    query = make_query(800, slo=Slo("keen", ttft_ms=400, is_strict=True))
    cluster.store("d0", query.hash_chains[0][:HELD_BLOCKS])
    assert decided(cluster, query).predicted_ttft_ms < 400


def test_of_many_holders_only_those_with_most_count() -> None:
    cluster = cluster_of("goodput", decodes=12)
    query = make_query(800)
    for number in range(12):
        cluster.store(f"d{number}", query.hash_chains[0][: 20 + number])
    assert decided(cluster, query).cached_tokens == 31 * 16
