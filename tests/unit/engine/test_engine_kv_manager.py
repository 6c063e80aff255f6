from __future__ import annotations

import pytest

from isthmus.common.hashing import block_hashes, root_hash
from isthmus.common.ids import BlockHash
from isthmus.common.state_machine import IllegalTransitionError
from isthmus.engine.block_table import BlockTable, TableState
from isthmus.engine.kv_manager import KvCacheManager

BLOCK_SIZE = 4


def make_kv(num_blocks: int = 11, watermark: float = 0.0) -> KvCacheManager:
    return KvCacheManager(num_blocks, BLOCK_SIZE, watermark, enable_prefix_cache=True)


def hashes_of(num_tokens: int) -> list[BlockHash]:
    return block_hashes(list(range(num_tokens)), BLOCK_SIZE, root_hash("model"))


def allocate(kv: KvCacheManager, num_tokens: int, **options: object) -> BlockTable:
    table = kv.try_allocate(num_tokens, hashes_of(num_tokens), **options)  # type: ignore[arg-type]
    assert table is not None
    return table


def cache_prompt(kv: KvCacheManager, num_tokens: int) -> list[int]:
    """Leaves the full blocks of the prompt in the cache, owned by nobody."""
    table = allocate(kv, num_tokens)
    kv.publish(table, hashes_of(num_tokens), num_tokens // BLOCK_SIZE)
    kv.free(table)
    return list(table.block_ids)


@pytest.mark.parametrize(
    ("num_tokens", "num_hits"), [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2)]
)
def test_prefix_hits_never_cover_the_last_token(num_tokens: int, num_hits: int) -> None:
    kv = make_kv()
    cached = cache_prompt(kv, 12)
    table = allocate(kv, num_tokens)
    assert table.num_cached_blocks == num_hits
    assert table.block_ids[:num_hits] == cached[:num_hits]
    kv.check_integrity()


def test_refused_allocation_changes_nothing() -> None:
    kv = make_kv()
    cache_prompt(kv, 12)
    blocker = allocate(kv, 4 * 6, state=TableState.RESERVED)
    free_before, events_before = kv.num_free_blocks, kv.take_events()
    assert events_before
    assert kv.try_allocate(BLOCK_SIZE * 11, hashes_of(BLOCK_SIZE * 11)) is None
    assert (kv.num_free_blocks, kv.take_events()) == (free_before, [])
    kv.check_integrity()
    kv.free(blocker)


def test_own_hits_are_not_evicted_to_make_the_rest_of_the_table() -> None:
    kv = make_kv(num_blocks=5)
    cached = cache_prompt(kv, 8)
    table = allocate(kv, 16)
    assert table.block_ids[:2] == cached
    assert len(set(table.block_ids)) == 4
    kv.check_integrity()


def test_watermark_stays_free_only_while_something_is_in_use() -> None:
    kv = make_kv(num_blocks=11, watermark=0.2)
    whole = allocate(kv, 40)
    kv.free(whole)
    first = allocate(kv, 4)
    assert kv.try_allocate(32, []) is None
    second = kv.try_allocate(28, [])
    assert second is not None
    assert kv.try_grow(first, 8)
    kv.check_integrity()


def test_growing_appends_and_keeps_the_row_in_step() -> None:
    kv = make_kv(num_blocks=101)
    table = allocate(kv, 4)
    first = table.block_ids[0]
    for num_tokens in range(5, 400):
        assert kv.try_grow(table, num_tokens)
    assert len(table) == 100
    assert table.block_ids[0] == first
    kv.check_integrity()
    assert not kv.try_grow(table, 401)


def test_quarantine_keeps_only_blocks_that_a_peer_writes() -> None:
    kv = make_kv()
    cache_prompt(kv, 8)
    table = allocate(kv, 16, state=TableState.RESERVED)
    hits, fresh = table.block_ids[:2], table.block_ids[2:]
    kv.quarantine(table)
    assert table.block_ids == fresh
    assert kv.num_blocks_in(TableState.QUARANTINED) == 2
    assert kv.num_free_blocks == 8
    kv.check_integrity()
    everything_else = allocate(kv, 4 * 8)
    assert set(hits) <= set(everything_else.block_ids)
    assert not set(fresh) & set(everything_else.block_ids)
    kv.free(table)
    kv.check_integrity()


def test_blocks_shared_by_two_holds_count_once() -> None:
    kv = make_kv()
    cache_prompt(kv, 12)
    for _ in range(2):
        kv.move(allocate(kv, 12), TableState.HELD)
    assert kv.num_blocks_in(TableState.HELD) == 4
    kv.check_integrity()


def test_disabled_prefix_cache_publishes_nothing() -> None:
    kv = KvCacheManager(11, BLOCK_SIZE, 0.0, enable_prefix_cache=False)
    cache_prompt(kv, 12)
    assert kv.cached_hashes() == []
    assert kv.take_events() == []
    assert allocate(kv, 12).num_cached_blocks == 0


def test_freed_table_cannot_be_freed_again() -> None:
    kv = make_kv()
    table = allocate(kv, 4)
    kv.free(table)
    with pytest.raises((IllegalTransitionError, KeyError)):
        kv.free(table)
