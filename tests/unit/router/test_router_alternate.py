"""Whom a decode instance may ask when the prefill instance of its decision fails."""

from __future__ import annotations

import pytest

from isthmus.common.cluster import Role
from isthmus.common.ids import InstanceId
from isthmus.protos.convert.decisions import decision_from_pb, decision_to_pb
from tests.support.router_cluster import Cluster, make_query


def test_the_second_best_prefill_instance_is_named() -> None:
    cluster = Cluster(3, 1)
    cluster.report("p0", waiting_seqs=1, waiting_tokens=3_000)
    cluster.report("p2", waiting_seqs=1, waiting_tokens=2_000)
    decision = cluster.router.route(make_query())
    assert decision.prefill is not None
    assert decision.alternate is not None
    assert (decision.prefill.instance_id, decision.alternate.instance_id) == ("p1", "p2")
    travelled = decision_from_pb(decision_to_pb(decision))
    assert travelled.alternate == decision.alternate


def test_nobody_is_named_who_cannot_do_it() -> None:
    cluster = Cluster(1, 1)
    assert cluster.router.route(make_query()).alternate is None
    cluster.join("p1", Role.PREFILL, connector="other")
    decision = cluster.router.route(make_query())
    assert decision.alternate is None
    excluded = make_query(exclude=frozenset({InstanceId("p1")}))
    assert decision_from_pb(decision_to_pb(cluster.router.route(excluded))).alternate is None


def test_a_prompt_computed_on_decode_has_no_alternate() -> None:
    cluster = Cluster(2, 1, min_remote_tokens=32)
    decision = cluster.router.route(make_query(31))
    assert decision.prefill is None
    assert decision.alternate is None


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded"])
def test_a_policy_that_ranks_no_second_pair_still_has_an_alternate(policy: str) -> None:
    cluster = Cluster(3, 1, policy=policy)
    cluster.report("p0", waiting_seqs=1, waiting_tokens=3_000)
    decision = cluster.router.route(make_query())
    assert decision.prefill is not None
    assert decision.alternate is not None
    assert decision.alternate.instance_id != decision.prefill.instance_id
    busiest = InstanceId("p0")
    assert decision.prefill.instance_id == busiest or decision.alternate.instance_id != busiest
