"""The prefix index under lost, doubled, reordered and stale events, against a plain model."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.common.ids import BlockHash, InstanceId
from isthmus.common.kv_events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvEvent,
    KvEventBatch,
)
from isthmus.router.blocks import Blocks, PlainBlocks
from isthmus.router.kv_index import EVICTED_SHARE, TOUCH_EVERY, ApplyResult, KvIndex
from isthmus.router.native import CompiledBlocks

HASHES = [BlockHash(bytes([index]) * 16) for index in range(12)]
hash_lists = st.lists(st.sampled_from(HASHES), max_size=6).map(tuple)
events = st.one_of(
    hash_lists.map(BlocksStored), hash_lists.map(BlocksRemoved), st.just(CacheCleared())
)

needs_compiler = pytest.mark.skipif(CompiledBlocks.create() is None, reason="needs a C++ compiler")
ways = pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=needs_compiler)])


@dataclass
class Worker:
    """The truth: events numbered from 1, and what they leave cached."""

    name: InstanceId
    epoch: int = 1
    log: list[KvEvent] = field(default_factory=list)

    def cached(self, upto: int) -> set[BlockHash]:
        held: set[BlockHash] = set()
        for event in self.log[:upto]:
            match event:
                case BlocksStored(hashes):
                    held |= set(hashes)
                case BlocksRemoved(hashes):
                    held -= set(hashes)
                case CacheCleared():
                    held = set()
        return held

    def batch(self, first: int, last: int) -> KvEventBatch:
        return KvEventBatch(self.name, self.epoch, first, tuple(self.log[first - 1 : last]))

    def answer(self, from_seq: int) -> KvEventBatch | None:
        """What a stream opened at ``from_seq`` begins with."""
        if from_seq == 0:
            held = (BlocksStored(tuple(self.cached(len(self.log)))),)
            return KvEventBatch(self.name, self.epoch, len(self.log), held, is_snapshot=True)
        return self.batch(from_seq, len(self.log)) if from_seq <= len(self.log) else None


def depth(held: set[BlockHash], chain: tuple[BlockHash, ...]) -> int:
    for reached, block_hash in enumerate(chain):
        if block_hash not in held:
            return reached
    return len(chain)


class Follower:
    """Does what the feed does with a result: a gap opens the stream again."""

    def __init__(self, index: KvIndex, worker: Worker) -> None:
        self.index = index
        self.worker = worker
        self.open()

    def open(self) -> None:
        answer = self.worker.answer(self.index.next_seq(self.worker.name, self.worker.epoch))
        if answer is not None:
            assert self.index.apply(answer) in (ApplyResult.APPLIED, ApplyResult.DUPLICATE)

    def deliver(self, batch: KvEventBatch) -> None:
        if self.index.apply(batch) is ApplyResult.GAP:
            self.open()


@ways
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_index_equals_the_truth_once_the_last_event_is_heard(
    is_compiled: bool, data: st.DataObject
) -> None:
    index = KvIndex(max_blocks=100, is_compiled=is_compiled)
    workers = [Worker(InstanceId(name)) for name in "abc"]
    followers = [Follower(index, worker) for worker in workers]
    in_flight: list[tuple[Follower, KvEventBatch]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        follower = data.draw(st.sampled_from(followers))
        worker = follower.worker
        match data.draw(st.sampled_from(["event", "event", "lose", "deliver", "again", "restart"])):
            case "event":
                worker.log.append(data.draw(events))
                in_flight.append((follower, worker.batch(len(worker.log), len(worker.log))))
            case "lose":
                worker.log.append(data.draw(events))
            case "deliver" if in_flight:
                place = data.draw(st.integers(0, len(in_flight) - 1))
                late_follower, batch = in_flight.pop(place)
                late_follower.deliver(batch)
            case "again" if worker.log:
                first = data.draw(st.integers(1, len(worker.log)))
                last = data.draw(st.integers(first, len(worker.log)))
                follower.deliver(worker.batch(first, last))
            case "restart":
                worker.epoch += 1
                worker.log = []
                index.reset(worker.name, worker.epoch)
                assert index.num_blocks(worker.name) == 0
                follower.open()
        index.check_integrity()
    for follower, batch in in_flight:
        follower.deliver(batch)
    for follower in followers:
        follower.worker.log.append(BlocksStored(()))
        follower.deliver(follower.worker.batch(len(follower.worker.log), len(follower.worker.log)))
    index.check_integrity()
    chain = tuple(data.draw(st.permutations(HASHES)))
    expected = {
        worker.name: reached
        for worker in workers
        if (reached := depth(worker.cached(len(worker.log)), chain))
    }
    assert index.match((chain,)) == expected


@ways
@settings(max_examples=60, deadline=None)
@given(
    stream=st.lists(st.tuples(st.sampled_from("abc"), events), max_size=40),
    max_blocks=st.integers(1, 8),
)
def test_index_never_exceeds_its_bound_nor_claims_what_was_not_stored(
    is_compiled: bool, stream: list[tuple[str, KvEvent]], max_blocks: int
) -> None:
    index = KvIndex(max_blocks, is_compiled=is_compiled)
    workers = {name: Worker(InstanceId(name)) for name in "abc"}
    for name, event in stream:
        worker = workers[name]
        worker.log.append(event)
        if len(worker.log) == 1:
            index.apply(worker.answer(0) or worker.batch(1, 1))
        else:
            index.apply(worker.batch(len(worker.log), len(worker.log)))
        index.check_integrity()
    for block_hash in HASHES:
        for name in index.match(((block_hash,),)):
            assert block_hash in workers[name].cached(len(workers[name].log))


@ways
def test_what_was_used_least_recently_is_dropped_first_and_parents_last(
    is_compiled: bool,
) -> None:
    first, second = (
        tuple(BlockHash(bytes([prefix, place]) * 8) for place in range(200)) for prefix in (1, 2)
    )
    index = KvIndex(max_blocks=400, is_compiled=is_compiled)
    a, b = InstanceId("a"), InstanceId("b")
    index.apply(KvEventBatch(a, 1, 0, (BlocksStored(first),)))
    index.apply(KvEventBatch(a, 1, 1, (BlocksStored(second),)))
    for _ in range(TOUCH_EVERY):
        assert index.match((first,)) == {a: 200}
    more = tuple(BlockHash(bytes([3, place]) * 8) for place in range(100))
    index.apply(KvEventBatch(b, 1, 0, (BlocksStored(more),)))
    index.check_integrity()
    assert index.num_evicted == 100 + 400 // EVICTED_SHARE
    assert index.match((first,)) == {a: 200}
    assert index.match((more,)) == {b: 100}
    assert index.match((second,)) == {a: 200 - index.num_evicted}


MANY = [BlockHash(number.to_bytes(16, "little")) for number in range(900)]
few = st.lists(st.sampled_from(HASHES), max_size=8).map(tuple)
runs = st.tuples(st.integers(0, 899), st.integers(0, 900)).map(
    lambda at: tuple(MANY[at[0] : at[1]])
)
slots = st.sampled_from([0, 1, 2, 63, 64, 200])
steps = st.one_of(
    st.tuples(st.just("store"), slots, st.one_of(few, runs)),
    st.tuples(st.just("remove"), slots, st.one_of(few, runs)),
    st.tuples(st.just("depths"), st.booleans(), st.one_of(few, runs)),
    st.tuples(st.just("clear"), slots, st.just(())),
    st.tuples(st.just("evict"), st.integers(0, 30), st.just(())),
)


def do(blocks: Blocks, step: tuple[str, int, tuple[BlockHash, ...]]) -> list[float]:
    """Returns depths, of nobody where none were asked for."""
    kind, number, hashes = step
    depths = array("d", bytes(8 * 202))
    match kind:
        case "store":
            blocks.store(number, hashes)
        case "remove":
            blocks.remove(number, hashes)
        case "depths":
            blocks.depths(hashes, depths, is_use=bool(number))
        case "clear":
            blocks.clear(number)
        case "evict":
            blocks.evict(number)
    return depths.tolist()


@needs_compiler
@settings(max_examples=150, deadline=None)
@given(st.lists(steps, max_size=25))
def test_compiled_blocks_are_the_plain_ones_in_the_same_order(
    taken: list[tuple[str, int, tuple[BlockHash, ...]]],
) -> None:
    compiled, plain = CompiledBlocks.create(), PlainBlocks()
    assert compiled is not None
    for step in taken:
        assert do(compiled, step) == do(plain, step)
        assert compiled.items() == plain.items()
        for slot in (0, 1, 2, 63, 64, 200):
            assert compiled.held_by(slot) == plain.held_by(slot)


@needs_compiler
def test_a_compiled_block_takes_a_bounded_share_of_memory() -> None:
    """Also when all of them have been replaced by others, many times."""
    compiled = CompiledBlocks.create()
    assert compiled is not None
    for number in range(40):
        stored = [BlockHash(bytes([number, slot]) + place.to_bytes(14, "little"))
                  for slot in range(2) for place in range(5_000)]  # fmt: skip
        compiled.store(number, tuple(stored))
        compiled.store(number + 100, tuple(stored[::3]))
        compiled.evict(len(compiled) - 20_000)
        assert compiled.num_bytes < 60 * 30_000
    assert len(compiled) == 20_000
