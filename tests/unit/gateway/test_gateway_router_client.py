"""What the gateway tells the router of a prompt."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import cast

import pytest

from isthmus.common.cluster import Role
from isthmus.common.errors import InternalError, NoInstanceError
from isthmus.common.hashing import block_hashes, root_hash
from isthmus.common.ids import DecisionId, InstanceId, RequestId
from isthmus.common.timeline import Event, Timeline
from isthmus.common.types import RouteAction, RouteDecision
from isthmus.gateway.decider import Decider, EmbeddedDecider
from isthmus.gateway.router_client import MAX_BEHIND, RouterClient
from isthmus.router.driver import RouterDriver
from isthmus.router.types import Outcome, OutcomeKind
from tests.support.poll import poll_until
from tests.support.router_cluster import LAYOUT, Cluster


def client_of(cluster: Cluster) -> RouterClient:
    decider = EmbeddedDecider(cluster.router, RouterDriver(cluster.router, cluster.clock))
    return RouterClient(cluster.router, cluster.clock, decider)


def test_a_prompt_is_hashed_once_for_each_size_of_block() -> None:
    cluster = Cluster(2, 1)
    cluster.join("d1", Role.DECODE, kv_layout=replace(LAYOUT, block_size=32))
    tokens = list(range(70))
    chains = client_of(cluster).hash_prompt(tokens, "salt")
    root = root_hash("fingerprint", "salt")
    assert set(chains) == {tuple(block_hashes(tokens, size, root)) for size in (16, 32)}


def test_a_prompt_has_no_hashes_while_no_instance_is_known() -> None:
    cluster = Cluster()
    assert client_of(cluster).hash_prompt([1, 2, 3], "") == ()


def test_what_is_known_of_the_instances_follows_them() -> None:
    cluster = Cluster()
    client = client_of(cluster)
    assert (client.model(), client.max_model_len()) == (None, None)
    with pytest.raises(NoInstanceError):
        client.require_decode()
    prefill = cluster.join("p0", Role.PREFILL, max_model_len=600)
    assert (client.model(), client.max_model_len()) == (prefill.model, 600)
    with pytest.raises(NoInstanceError):
        client.require_decode()
    cluster.join("d0", Role.DECODE, max_model_len=500)
    client.require_decode()
    assert client.max_model_len() == 500
    cluster.join("d1", Role.DECODE, max_model_len=400)  # alike, but for that
    assert client.max_model_len() == 400
    cluster.join("d1", Role.DECODE, max_model_len=450)  # as the record says now
    assert client.max_model_len() == 450
    state = cluster.router.state
    state.registry_connected(is_connected=True)
    state.deregistered(InstanceId("d0"))
    state.stream_broken(InstanceId("d0"), 1, "it is gone")
    assert client.max_model_len() == 450
    state.deregistered(InstanceId("d1"))
    state.stream_broken(InstanceId("d1"), 1, "it is gone")
    assert client.max_model_len() == 600
    with pytest.raises(NoInstanceError):
        client.require_decode()


def test_one_more_of_a_kind_that_is_there_is_news() -> None:
    cluster = Cluster(1, 1)
    client = client_of(cluster)
    before = client.max_model_len()
    cluster.join("d1", Role.DECODE, max_model_len=300, kv_layout=replace(LAYOUT, block_size=32))
    assert client.max_model_len() == 300
    assert len(client.hash_prompt(list(range(70)), "")) == 2
    state = cluster.router.state
    state.registry_connected(is_connected=True)
    state.deregistered(InstanceId("d1"))
    state.stream_broken(InstanceId("d1"), 1, "it is gone")
    assert client.max_model_len() == before


class ToldDecider:
    """Keeps what it is told; refuses to hear of decisions that are called ``bad``."""

    def __init__(self) -> None:
        self.told: list[tuple[str, OutcomeKind]] = []
        self.outcomes: list[Outcome] = []

    def withdraw(self, request_id: RequestId) -> None:
        self.told.append((request_id, OutcomeKind.CANCELLED))

    def report(self, decision_id: DecisionId, outcome: Outcome) -> None:
        if decision_id == "bad":
            raise RuntimeError("not heard")
        self.told.append((decision_id, outcome.kind))
        self.outcomes.append(outcome)


def told_client() -> tuple[RouterClient, ToldDecider]:
    cluster, decider = Cluster(1, 1), ToldDecider()
    return RouterClient(cluster.router, cluster.clock, cast("Decider", decider)), decider


def decided(name: str) -> RouteDecision:
    return RouteDecision(DecisionId(name), RequestId(f"of-{name}"), RouteAction.ADMIT, None, None)


@pytest.mark.asyncio
async def test_news_of_tokens_let_the_bytes_for_clients_go_first() -> None:
    client, decider = told_client()
    order: list[str] = []
    flushed = asyncio.get_running_loop().create_future()
    flushed.add_done_callback(lambda _: order.append(f"written, {len(decider.told)} told"))
    client.report_first_token(decided("a"))
    own = Timeline({Event.ROUTED: 2, Event.LAST_TOKEN: 3})
    parts = [Timeline({Event.ARRIVED: 1}), own]
    client.report_finished(decided("a"), 7.0, parts, 3)
    flushed.set_result(None)  # as the choice tells who waits for its tokens
    await poll_until(lambda: len(decider.told) == 2)
    assert order == ["written, 0 told"]
    assert decider.told == [("a", OutcomeKind.FIRST_TOKEN), ("a", OutcomeKind.FINISHED)]
    timeline = decider.outcomes[1].timeline
    assert timeline is not None
    # Its last bytes are not out yet: when they were nobody knows.
    assert timeline.items() == [(Event.ARRIVED, 1), (Event.ROUTED, 2), (Event.LAST_TOKEN, 3)]


@pytest.mark.asyncio
async def test_the_router_is_told_all_in_order() -> None:
    client, decider = told_client()
    client.report_first_token(decided("a"))
    client.report_failed(decided("a"), InternalError("broke", stage="engine"), InstanceId("d0"))
    client.report_first_token(decided("b"))
    client.withdraw(RequestId("c"))
    assert [name for name, _ in decider.told] == ["a", "a", "b", "c"]
    assert [kind for _, kind in decider.told][:2] == [OutcomeKind.FIRST_TOKEN, OutcomeKind.FAILED]


@pytest.mark.asyncio
async def test_under_load_the_router_is_told_at_once() -> None:
    client, decider = told_client()
    for number in range(MAX_BEHIND + 1):
        client.report_first_token(decided(str(number)))
    assert len(decider.told) == MAX_BEHIND + 1


@pytest.mark.asyncio
async def test_an_outcome_that_cannot_be_reported_keeps_no_other_back() -> None:
    client, decider = told_client()
    for name in ("a", "bad", "b"):
        client.report_first_token(decided(name))
    await poll_until(lambda: len(decider.told) == 2)
    assert [name for name, _ in decider.told] == ["a", "b"]
