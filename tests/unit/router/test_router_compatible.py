"""Which instances are taken for a pair: those whose handshake will succeed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.common.cluster import Role
from isthmus.common.hashing import block_hashes, root_hash
from isthmus.common.types import LocalPrefillReason
from tests.support.router_cluster import LAYOUT, Cluster, make_query


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
