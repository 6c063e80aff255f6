"""What the gateway tells the router of a prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.common.cluster import Role
from isthmus.common.errors import NoInstanceError
from isthmus.common.hashing import block_hashes, root_hash
from isthmus.common.ids import InstanceId
from isthmus.gateway.decider import EmbeddedDecider
from isthmus.gateway.router_client import RouterClient
from isthmus.router.driver import RouterDriver
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
