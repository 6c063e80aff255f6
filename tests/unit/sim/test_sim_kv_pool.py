from __future__ import annotations

import random
from collections import OrderedDict

from isthmus.common.ids import BlockHash
from isthmus.common.kv_events import BlocksRemoved, BlocksStored
from isthmus.sim.idle_blocks import MIN_PASSED_OVER, IdleBlocks
from isthmus.sim.kv_pool import KvPool
from tests.support.sim_runs import chain


def test_released_blocks_stay_cached_and_are_found_again() -> None:
    pool = KvPool(10, 16)
    hashes = chain(3)
    assert pool.try_take([], 4)
    assert pool.publish(hashes) == list(hashes)
    pool.release(hashes, 1)
    assert (pool.used, pool.free, pool.num_cached) == (0, 10, 3)
    assert pool.match(hashes, 10) == 3
    assert pool.match(hashes, 2) == 2
    assert pool.match(chain(3, first=7), 3) == 0
    pool.check_integrity()


def test_a_shared_block_is_counted_once() -> None:
    pool = KvPool(10, 16)
    hashes = chain(2)
    pool.try_take([], 3)
    pool.publish(hashes)
    assert pool.try_take(hashes, 3)
    assert pool.used == 4
    pool.release(hashes, 1)
    assert (pool.used, pool.num_cached) == (3, 0)
    pool.release(hashes, 1)
    assert (pool.used, pool.num_cached) == (0, 2)
    pool.check_integrity()


def test_the_same_block_computed_twice_is_published_once() -> None:
    pool = KvPool(10, 16)
    pool.try_take([], 1)
    pool.try_take([], 1)
    assert pool.publish(chain(1)) == list(chain(1))
    assert pool.publish(chain(1)) == []
    pool.release(chain(1), 0)
    pool.release([], 1)
    assert (pool.used, pool.num_cached) == (0, 1)
    pool.check_integrity()


def test_the_least_recently_used_blocks_make_room_and_the_router_is_told() -> None:
    pool = KvPool(4, 16)
    for first in (0, 2):
        pool.try_take([], 2)
        pool.publish(chain(2, first))
        pool.release(chain(2, first), 0)
    stored = pool.take_events()
    assert stored == [BlocksStored(chain(2, 0)), BlocksStored(chain(2, 2))]
    assert pool.try_take([], 1)
    # Of a chain the end goes first, so that what is left can still be found.
    assert pool.take_events() == [BlocksRemoved(chain(1, 1))]
    assert pool.match(chain(2, 0), 2) == 1
    pool.check_integrity()


def test_a_refusal_changes_nothing() -> None:
    pool = KvPool(4, 16)
    pool.try_take([], 2)
    pool.publish(chain(2))
    pool.release(chain(2), 0)
    assert not pool.try_take(chain(2), 4, keep_free=1)
    assert (pool.used, pool.num_cached) == (0, 2)
    assert pool.try_take(chain(2), 4)
    assert pool.free == 0
    pool.check_integrity()


def test_idle_blocks_go_in_the_order_in_which_one_list_of_all_would_let_them_go() -> None:
    draw = random.Random(4)
    idle, plain = IdleBlocks(), OrderedDict[BlockHash, None]()
    num_taken = 0
    for _ in range(1_500):
        blocks = chain(1 + draw.randrange(12), first=draw.randrange(60))
        woken = [block for block in blocks if block in plain]
        idle.wake(woken)
        for block in woken:
            del plain[block]
        idle.add(list(blocks))
        plain.update(dict.fromkeys(reversed(blocks)))
        count = draw.randrange(len(plain)) if draw.random() < 0.02 else draw.randrange(2)
        assert idle.take(count) == [plain.popitem(last=False)[0] for _ in range(count)]
        num_taken += count
        idle.check_integrity()
    assert list(idle.since.keys() ^ plain.keys()) == []
    assert num_taken > 500


def test_lists_of_blocks_that_are_used_again_and_again_stay_short() -> None:
    idle, blocks = IdleBlocks(), chain(64)
    for _ in range(MIN_PASSED_OVER):
        idle.add(list(blocks))
        idle.wake(blocks)
    assert idle.num_listed <= MIN_PASSED_OVER + len(blocks)
    idle.add(list(blocks))
    assert idle.take(2) == [blocks[63], blocks[62]]
