from __future__ import annotations

import asyncio

import pytest

from isthmus.common.ids import BlockHash, InstanceId
from isthmus.common.kv_events import BlocksRemoved, BlocksStored, CacheCleared, KvEventBatch
from isthmus.worker.kv_event_log import KvEventLog
from tests.support.engine_driver import Driver, make_prompt, make_request
from tests.support.tiny_model import make_tiny_core


def run_prompt(driver: Driver, name: str, length: int, salt: int = 0) -> None:
    driver.core.add(make_request(name, make_prompt(length, salt), max_tokens=1))
    driver.run()


def apply(known: set[BlockHash], batch: KvEventBatch) -> set[BlockHash]:
    """What a router does with a batch."""
    known = set() if batch.is_snapshot else known
    for event in batch.events:
        match event:
            case BlocksStored(hashes):
                known |= set(hashes)
            case BlocksRemoved(hashes):
                known -= set(hashes)
            case CacheCleared():
                known = set()
    return known


def make_log(max_hashes: int = 1000, **engine: object) -> tuple[Driver, KvEventLog]:
    core = make_tiny_core(**engine)
    return Driver(core), KvEventLog(core, InstanceId("d"), 3, max_hashes)


def test_a_reader_that_follows_knows_exactly_the_cache() -> None:
    driver, log = make_log(num_blocks=17)
    known: set[BlockHash] = set()
    next_seq = 0
    for salt in range(6):
        run_prompt(driver, f"r{salt}", 24 + 4 * salt, salt)
        batch = log.since(next_seq)
        known, next_seq = apply(known, batch), batch.next_seq
        assert known == set(driver.core.cached_hashes())
    driver.core.flush_cache()
    assert apply(known, log.since(next_seq)) == set()


def test_zero_means_that_the_reader_knows_nothing() -> None:
    driver, log = make_log()
    first = log.since(0)
    assert first.is_snapshot
    assert (first.first_seq, first.next_seq) == (0, 1)
    run_prompt(driver, "r", 20)
    batch = log.since(0)
    assert batch.is_snapshot
    assert apply(set(), batch) == set(driver.core.cached_hashes())
    assert batch.next_seq == log.next_seq


def test_a_gap_is_filled_by_replay_while_the_ring_has_it() -> None:
    driver, log = make_log()
    run_prompt(driver, "a", 20)
    log.collect()
    middle = log.next_seq
    run_prompt(driver, "b", 20, salt=1)
    batch = log.since(middle)
    assert not batch.is_snapshot
    assert batch.first_seq == middle
    assert batch.events


def test_what_the_ring_has_forgotten_comes_as_a_snapshot() -> None:
    driver, log = make_log(max_hashes=4)
    for salt in range(4):
        run_prompt(driver, f"r{salt}", 20, salt)
        log.collect()
    assert log.next_seq > 2
    batch = log.since(1)
    assert batch.is_snapshot
    assert apply(set(), batch) == set(driver.core.cached_hashes())


def test_a_number_of_the_future_comes_from_another_epoch() -> None:
    _, log = make_log()
    assert log.since(99).is_snapshot


@pytest.mark.asyncio
async def test_followers_are_woken_by_changes_and_get_each_event_once() -> None:
    driver, log = make_log()
    seen: list[KvEventBatch] = []

    async def follow(epoch: int, from_seq: int) -> None:
        async for batch in log.follow(epoch, from_seq):
            seen.append(batch)  # noqa: PERF401 (it never ends)

    reader = asyncio.create_task(follow(2, 40))  # of an earlier epoch
    await asyncio.sleep(0)
    assert [batch.is_snapshot for batch in seen] == [True]
    run_prompt(driver, "a", 20)
    log.collect()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(seen) == 2
    assert not seen[1].is_snapshot
    assert seen[1].first_seq == seen[0].next_seq
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
