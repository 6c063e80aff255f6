"""A conversation goes on where its last turn was served, as long as nothing speaks against it."""

from __future__ import annotations

import pytest

from isthmus.common.ids import InstanceId
from isthmus.router.sessions import LastServed, Sessions
from isthmus.router.types import Outcome, RouteQuery
from isthmus.router.verdict import Admitted
from tests.support.router_cluster import Cluster, make_query

POLICIES = ("least_predicted_load", "goodput")
BUSY = 4


def serve(cluster: Cluster, query: RouteQuery) -> tuple[str | None, str]:
    """Where the query went; it ends at once."""
    verdict = cluster.router.submit(query)
    assert isinstance(verdict, Admitted)
    decision = verdict.decision
    cluster.router.report(decision.decision_id, Outcome.finished())
    prefill = decision.prefill
    return prefill.instance_id if prefill is not None else None, decision.decode.instance_id


@pytest.mark.parametrize("policy", POLICIES)
def test_turns_stay_together_and_others_spread(policy: str) -> None:
    cluster = Cluster(4, 4, policy=policy, exploration=0.0)
    where = set()
    for turn in range(12):
        where.add(serve(cluster, make_query(name=f"s{turn}", tenant="t", session="chat")))
        serve(cluster, make_query(name=f"o{turn}"))
    assert len(where) == 1
    others = {serve(cluster, make_query(name=str(number))) for number in range(8)}
    assert len(others) > 1
    cluster.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_sessions_of_two_tenants_have_nothing_in_common(policy: str) -> None:
    cluster = Cluster(2, 2, policy=policy, exploration=0.0)
    first = serve(cluster, make_query(name="a", tenant="a", session="chat"))
    other = serve(cluster, make_query(name="b", tenant="b", session="chat"))
    assert first != other
    assert serve(cluster, make_query(name="a2", tenant="a", session="chat")) == first
    assert serve(cluster, make_query(name="b2", tenant="b", session="chat")) == other


@pytest.mark.parametrize("policy", POLICIES)
def test_a_queue_is_a_reason_to_leave(policy: str) -> None:
    cluster = Cluster(2, 2, policy=policy, exploration=0.0)
    prefill, decode = serve(cluster, make_query(name="a", session="chat"))
    assert prefill is not None
    for name in (prefill, decode):
        load = {"running_seqs": BUSY, "running_context_tokens": 40_000, "waiting_seqs": BUSY}
        cluster.report(name, waiting_tokens=4_000, **load)
    moved = serve(cluster, make_query(name="a2", session="chat"))
    assert moved[1] != decode


@pytest.mark.parametrize("policy", POLICIES)
def test_a_session_outlives_its_instances(policy: str) -> None:
    cluster = Cluster(2, 2, policy=policy, exploration=0.0)
    _, decode = serve(cluster, make_query(name="a", session="chat"))
    cluster.router.state.stream_broken(InstanceId(decode), 1, "test")
    moved = serve(cluster, make_query(name="a2", session="chat"))
    assert moved[1] != decode
    assert serve(cluster, make_query(name="a3", session="chat")) == moved


def test_affinity_of_nothing_spreads_turns() -> None:
    cluster = Cluster(2, 2, session_affinity_ms=0.0)
    where = [serve(cluster, make_query(name=str(turn), session="chat")) for turn in range(4)]
    assert len(set(where)) > 1


def test_the_sessions_served_least_recently_are_forgotten_first() -> None:
    sessions = Sessions(2, worth_ms=5.0)
    queries = [make_query(session=str(number)) for number in range(3)]
    where = InstanceId("p0"), InstanceId("d0")
    for query in (queries[0], queries[1], queries[0], queries[2]):
        sessions.served(query, *where)
    assert len(sessions) == 2
    assert sessions.last(queries[1]) is None
    assert sessions.last(queries[0]) == LastServed(*where, 5.0)
    sessions.served(make_query(), *where)
    assert sessions.last(make_query()) is None
    assert len(sessions) == 2
