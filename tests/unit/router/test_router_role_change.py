"""An instance that comes back with another role: a role lasts for an epoch, and nothing of the old
one burdens, blames or feeds the new one."""

from __future__ import annotations

import pytest

from isthmus.common.cluster import Role
from isthmus.common.errors import NoInstanceError
from isthmus.common.ids import DecisionId, InstanceId
from isthmus.common.types import RouteDecision
from isthmus.router import Outcome
from tests.support.router_cluster import Cluster, hashes_of, make_query

X, D0, P0 = InstanceId("x"), InstanceId("d0"), InstanceId("p0")
POLICIES = ["least_predicted_load", "goodput"]


def serve(cluster: Cluster, count: int) -> list[RouteDecision]:
    return [cluster.router.route(make_query(name=f"r{number}")) for number in range(count)]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_decode_instance_that_comes_back_as_a_prefill_instance(policy: str) -> None:
    cluster = Cluster(1, 0, policy=policy)
    cluster.join("x", Role.DECODE)
    cluster.store("x", hashes_of(list(range(320))))
    decisions = serve(cluster, 3)
    assert {decision.decode.instance_id for decision in decisions} == {X}
    ledger = cluster.router.state.ledger
    assert ledger.pending(X).decode_seqs == 3

    cluster.join("x", Role.PREFILL, epoch=2)
    assert ledger.pending(X).decode_seqs == ledger.pending(X).decode_blocks == 0
    assert cluster.router.state.index.next_seq(X, 1) == 0
    with pytest.raises(NoInstanceError):
        cluster.router.route(make_query(name="nobody decodes"))
    cluster.join("d0", Role.DECODE)
    chosen = serve(cluster, 4)
    assert {decision.decode.instance_id for decision in chosen} == {D0}
    assert {d.prefill.instance_id for d in chosen if d.prefill is not None} == {X, P0}
    prompts = ledger.unreported(X)

    # Gateways tell what became of the old role's requests: the new one is not to blame.
    for decision in decisions:
        cluster.router.report(decision.decision_id, Outcome.failed(X))
    assert ledger.unreported(X) == prompts
    instances = {info.instance_id: info for info in cluster.router.snapshot().instances}
    assert instances[X].breaker == "closed"
    assert instances[X].problem == ""
    for decision in chosen:
        cluster.router.report(decision.decision_id, Outcome.finished())
    assert len(ledger) == 0
    cluster.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prefill_instance_that_comes_back_as_a_decode_instance(policy: str) -> None:
    cluster = Cluster(0, 1, policy=policy, min_remote_tokens=0)
    cluster.join("x", Role.PREFILL)
    decisions = serve(cluster, 2)
    assert {d.prefill.instance_id for d in decisions if d.prefill is not None} == {X}
    ledger = cluster.router.state.ledger

    cluster.join("x", Role.DECODE, epoch=2)
    assert ledger.unreported(X) == []
    assert ledger.pending(D0).decode_seqs == 2  # they compute their prompts themselves
    (decision,) = serve(cluster, 1)
    assert decision.prefill is None
    assert decision.decode.instance_id == X
    for made in [*decisions, decision]:
        cluster.router.report(made.decision_id, Outcome.first_token())
        cluster.router.report(made.decision_id, Outcome.finished())
    assert len(ledger) == 0
    cluster.check()


def test_what_an_older_epoch_still_says_changes_nothing() -> None:
    cluster = Cluster(1, 1)
    cluster.join("x", Role.DECODE)
    cluster.join("x", Role.PREFILL, epoch=2)
    cluster.join("x", Role.DECODE, epoch=1)
    cluster.store("x", hashes_of(list(range(320))), epoch=1)
    view = cluster.router.state.cluster.get(X)
    assert view is not None
    assert (view.info.role, view.info.epoch) == (Role.PREFILL, 2)
    cluster.router.report(DecisionId("of nobody"), Outcome.failed(X))
    for number in range(4):
        assert cluster.router.route(make_query(name=str(number))).decode.instance_id == D0
    cluster.check()
