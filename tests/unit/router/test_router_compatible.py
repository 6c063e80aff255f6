"""Which instances are taken for a pair: those whose handshake will succeed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.common.cluster import Role
from isthmus.common.hashing import block_hashes, root_hash
from isthmus.common.ids import InstanceId
from isthmus.common.types import LocalPrefillReason
from isthmus.router.admission import FilterReason
from tests.support.router_cluster import LAYOUT, Cluster, make_info, make_query


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_unlike_block_sizes_are_a_pair(block_size: int) -> None:
    cluster = Cluster(1)
    cluster.join("d0", Role.DECODE, kv_layout=replace(LAYOUT, block_size=block_size))
    decision = cluster.router.route(make_query())
    assert decision.prefill is not None
    assert decision.prefill.instance_id == "p0"


def test_a_prefix_in_blocks_of_another_size_is_not_credited() -> None:
    """Hashes of a chain are of one block size: an instance of another has none of them."""
    cluster = Cluster(1)
    cluster.join("d0", Role.DECODE, kv_layout=replace(LAYOUT, block_size=32))
    query = make_query(320)
    cluster.store("p0", query.hash_chains[0])
    decision = cluster.router.route(query)
    assert decision.prefill is not None
    assert decision.cached_tokens == 304


def test_each_instance_is_credited_in_blocks_of_its_own_size() -> None:
    cluster = Cluster(1)
    cluster.join("d0", Role.DECODE, kv_layout=replace(LAYOUT, block_size=32))
    query = make_query(300)
    longer = tuple(block_hashes(list(range(300)), 32, root_hash("fingerprint")))
    query = replace(query, hash_chains=(*query.hash_chains, longer))
    cluster.store("p0", query.hash_chains[0][:10])
    cluster.store("d0", longer)
    decision = cluster.router.route(query)
    assert decision.local_reason is LocalPrefillReason.PREFIX_CACHED
    assert decision.cached_tokens == 288


@pytest.mark.parametrize(
    ("prefill", "decode", "is_pair"),
    [
        ("nixl,shm", "collective,shm", True),
        ("auto", "shm", True),
        ("nixl", "auto", True),
        ("nixl", "shm", False),
        ("auto", "fake", False),
    ],
)
def test_one_connector_in_common_makes_a_pair(prefill: str, decode: str, is_pair: bool) -> None:
    cluster = Cluster()
    cluster.join("p0", Role.PREFILL, connector=prefill)
    cluster.join("d0", Role.DECODE, connector=decode)
    assert (cluster.router.route(make_query()).prefill is not None) is is_pair
    problems = [instance.problem for instance in cluster.router.snapshot().instances]
    if is_pair:
        assert problems == ["", ""]
    else:
        assert f"connector: {decode} here, {prefill} there" in problems[0]


@pytest.mark.parametrize(
    ("source", "target", "is_pair"),
    [
        ("bfloat16", "int8", True),
        ("float32", "bfloat16", True),
        ("int8", "int8", True),
        ("int8", "bfloat16", False),
        ("bfloat16", "float32", False),
    ],
)
def test_kv_goes_where_it_can_be_kept_or_becomes_smaller(
    source: str, target: str, is_pair: bool
) -> None:
    cluster = Cluster(0, 0)
    cluster.join("p0", Role.PREFILL, kv_layout=replace(LAYOUT, dtype=source))
    cluster.join("d0", Role.DECODE, kv_layout=replace(LAYOUT, dtype=target))
    decision = cluster.router.route(make_query())
    snapshot = cluster.router.snapshot()
    assert snapshot.is_disaggregated is is_pair
    problems = [instance.problem for instance in snapshot.instances]
    if is_pair:
        assert decision.prefill is not None
        assert problems == ["", ""]
        return
    assert decision.local_reason is not LocalPrefillReason.NONE
    record = cluster.router.log.get(decision.decision_id)
    assert record is not None
    assert record.filtered == {"p0": FilterReason.INCOMPATIBLE}
    for problem in problems:
        assert f"KV in {source} cannot be sent to a store in {target}" in problem


def test_an_instance_whose_record_changes_its_role_can_still_leave() -> None:
    """Its role is fixed for an epoch; a record that breaks this must not end the feed."""
    cluster = Cluster(2, 1)
    view = cluster.router.state.cluster
    view.upsert(make_info("p0", Role.DECODE))
    view.remove(InstanceId("p0"), "left", 0)
    view.upsert(make_info("p1", Role.MIXED))
    view.upsert(make_info("p1", Role.PREFILL, epoch=2))
    decision = cluster.router.route(make_query())
    assert decision.decode.instance_id == "d0"
    assert view.views.keys() == {"p1", "d0"}


def test_each_decode_instance_gets_kv_from_those_that_can_feed_it() -> None:
    cluster = Cluster(0, 0)
    cluster.join("wide", Role.PREFILL, kv_layout=replace(LAYOUT, dtype="bfloat16"))
    cluster.join("narrow", Role.PREFILL, kv_layout=replace(LAYOUT, dtype="int8"))
    cluster.join("d0", Role.DECODE, kv_layout=replace(LAYOUT, dtype="bfloat16"))
    for number in range(4):
        decision = cluster.router.route(make_query(name=f"r{number}"))
        assert decision.prefill is not None
        assert decision.prefill.instance_id == "wide"
    cluster.join("d1", Role.DECODE, kv_layout=replace(LAYOUT, dtype="int8"))
    chosen = set()
    for number in range(24):
        decision = cluster.router.route(make_query(name=f"s{number}"))
        assert decision.prefill is not None
        chosen.add((decision.prefill.instance_id, decision.decode.instance_id))
    assert ("narrow", "d0") not in chosen
    assert {"wide", "narrow"} == {prefill for prefill, _ in chosen}
    assert [instance.problem for instance in cluster.router.snapshot().instances] == [""] * 4
