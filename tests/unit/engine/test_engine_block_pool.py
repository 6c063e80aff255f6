from __future__ import annotations

import pytest

from isthmus.common.ids import BlockHash, BlockId
from isthmus.common.kv_events import BlocksRemoved, BlocksStored, CacheCleared
from isthmus.engine.block_pool import NULL_BLOCK, BlockPool


def named(index: int) -> BlockHash:
    return BlockHash(index.to_bytes(16, "little"))


def cached_chain(pool: BlockPool, length: int, first: int = 0) -> list[BlockId]:
    """Blocks that were computed, published and freed."""
    block_ids = pool.allocate(length)
    for index, block_id in enumerate(block_ids):
        pool.publish(block_id, named(first + index))
    pool.free(block_ids)
    return block_ids


def test_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    block_ids = pool.allocate(pool.num_free)
    assert sorted(block_ids) == [1, 2, 3, 4]
    assert NULL_BLOCK not in block_ids
    pool.check_integrity([block_ids])


def test_tail_of_a_freed_chain_is_evicted_before_its_head() -> None:
    pool = BlockPool(5)
    chain = cached_chain(pool, 4)
    assert pool.allocate(2) == [chain[3], chain[2]]
    assert pool.find_prefix([named(i) for i in range(4)], limit=4) == chain[:2]


def test_least_recently_freed_content_is_evicted_first() -> None:
    pool = BlockPool(5)
    old = cached_chain(pool, 2, first=0)
    young = cached_chain(pool, 2, first=10)
    taken = pool.allocate(2)
    assert sorted(taken) == sorted(old)
    assert pool.find_prefix([named(10), named(11)], limit=2) == young
    pool.check_integrity([taken])


def test_hit_takes_a_block_out_of_the_middle_of_the_free_list() -> None:
    pool = BlockPool(6)
    chain = cached_chain(pool, 3)
    hit = pool.find_prefix([named(0), named(1)], limit=2)
    assert hit == chain[:2]
    pool.share(hit)
    assert pool.num_free == 3
    pool.check_integrity([hit])
    others = pool.allocate(3)
    assert not set(others) & set(hit)
    pool.check_integrity([hit, others])


def test_shared_block_is_free_only_after_its_last_owner() -> None:
    pool = BlockPool(4)
    block_ids = pool.allocate(1)
    pool.publish(block_ids[0], named(0))
    pool.share(block_ids)
    pool.free(block_ids)
    assert pool.num_free == 2
    pool.check_integrity([block_ids])
    pool.free(block_ids)
    assert pool.num_free == 3
    assert pool.num_free_cached == 1
    pool.check_integrity([])


def test_second_block_with_the_same_content_stays_nameless() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.publish(first, named(7))
    pool.publish(second, named(7))
    assert pool.find_prefix([named(7)], limit=1) == [first]
    pool.free([first, second])
    assert pool.num_free_cached == 1
    pool.check_integrity([])


def test_events_follow_the_cache_and_merge_neighbours() -> None:
    pool = BlockPool(4)
    cached_chain(pool, 3)
    pool.allocate(2)
    assert pool.take_events() == [
        BlocksStored((named(0), named(1), named(2))),
        BlocksRemoved((named(2), named(1))),
    ]
    assert pool.take_events() == []


def test_clearing_forgets_content_of_blocks_in_use_too() -> None:
    pool = BlockPool(6)
    cached_chain(pool, 2)
    used = pool.allocate(1)
    pool.publish(used[0], named(9))
    assert pool.clear_cache() == 3
    assert pool.cached_hashes() == []
    assert pool.num_free_cached == 0
    assert pool.take_events() == [CacheCleared()]
    pool.check_integrity([used])


def test_double_free_is_an_error_that_names_the_block() -> None:
    pool = BlockPool(3)
    block_ids = pool.allocate(1)
    pool.free(block_ids)
    with pytest.raises(AssertionError, match=f"block {block_ids[0]} freed twice"):
        pool.free(block_ids)


@pytest.mark.parametrize("owners", [[], [[BlockId(1)], [BlockId(1)]]])
def test_integrity_names_a_block_whose_owners_do_not_add_up(owners: list[list[BlockId]]) -> None:
    pool = BlockPool(3)
    assert pool.allocate(1) == [1]
    with pytest.raises(AssertionError, match="block 1"):
        pool.check_integrity(owners)
