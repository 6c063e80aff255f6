"""Which instance holds which blocks, as far as their KV events have told.

Owns nothing but a belief: a wrong entry costs a recomputation, never a wrong answer. Invariants:

- an entry is credited to an instance only at the epoch it was stored in;
- events apply in the order of their sequence numbers; after a gap the index asks once for a resync
  and takes nothing more until the missing events, or a snapshot, arrive;
- at most ``max_blocks`` distinct hashes, least recently used dropped first, parents last.

The blocks themselves are kept by ``blocks``, compiled where that is possible.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from isthmus.common.ids import HashChain, InstanceId
from isthmus.common.kv_events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvEvent,
    KvEventBatch,
)
from isthmus.router.blocks import Blocks, Holders, PlainBlocks
from isthmus.router.native import CompiledBlocks

TOUCH_EVERY = 8
"""Lookups of which one counts as use: to move every block of every prompt costs as much as to find
them, and what is used often is found often enough."""
EVICTED_SHARE = 256
NOBODY = 1 << 40  # a slot that is not there


class ApplyResult(Enum):
    APPLIED = "applied"
    DUPLICATE = "duplicate"  # all of it was known
    STALE = "stale"  # of an earlier epoch
    GAP = "gap"  # events are missing: open the stream again at ``next_seq``
    AWAITING = "awaiting"  # a gap is already being healed


@dataclass(slots=True)
class _Holder:
    """What is known of one instance at one epoch."""

    epoch: int
    slot: int
    next_seq: int = 0
    is_awaiting: bool = False


class KvIndex:
    """``is_compiled``: where there is a compiler."""

    def __init__(self, max_blocks: int, *, is_compiled: bool = True) -> None:
        self._max_blocks = max_blocks
        compiled = CompiledBlocks.create() if is_compiled else None
        self._blocks: Blocks = compiled if compiled is not None else PlainBlocks()
        self._holders: dict[InstanceId, _Holder] = {}
        self._instances: list[InstanceId | None] = []  # by slot
        self._nobody = array("d", [0.0])
        self._num_matches = 0
        self.num_resyncs = 0
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def slot(self, instance_id: InstanceId) -> int:
        """Its own among ``holders``, until it is forgotten or begins a new epoch."""
        holder = self._holders.get(instance_id)
        return holder.slot if holder is not None else NOBODY

    def holders(self, chains: Iterable[HashChain]) -> Holders:
        """Leading blocks that each instance holds. Chains of unlike blocks share no hash, so an
        instance is found by those of its own kind."""
        depths = self._nobody[:]
        if self._holders:
            for hashes in chains:
                self._num_matches += 1
                is_use = not self._num_matches % TOUCH_EVERY
                self._blocks.depths(hashes, depths, is_use=is_use)
        return depths

    def match(self, chains: Iterable[HashChain]) -> dict[InstanceId, int]:
        """As ``holders``, by instance; those with none are absent."""
        depths = zip(self._instances, self.holders(chains), strict=False)
        return {name: int(depth) for name, depth in depths if depth and name is not None}

    def next_seq(self, instance_id: InstanceId, epoch: int) -> int:
        """The first event that is missing: where a stream must begin."""
        holder = self._holders.get(instance_id)
        return holder.next_seq if holder is not None and holder.epoch == epoch else 0

    def num_blocks(self, instance_id: InstanceId) -> int:
        holder = self._holders.get(instance_id)
        return self._blocks.held_by(holder.slot) if holder is not None else 0

    def reset(self, instance_id: InstanceId, epoch: int) -> None:
        """Begins a new epoch with nothing cached; the same or an older epoch changes nothing."""
        holder = self._holders.get(instance_id)
        if holder is not None and holder.epoch >= epoch:
            return
        self.forget(instance_id)
        slot = self._free_slot()
        self._holders[instance_id] = _Holder(epoch, slot)
        self._instances[slot] = instance_id

    def forget(self, instance_id: InstanceId) -> None:
        holder = self._holders.pop(instance_id, None)
        if holder is not None:
            self._blocks.clear(holder.slot)
            self._instances[holder.slot] = None

    def apply(self, batch: KvEventBatch) -> ApplyResult:
        self.reset(batch.instance_id, batch.epoch)
        holder = self._holders[batch.instance_id]
        if batch.epoch < holder.epoch:
            return ApplyResult.STALE
        if batch.next_seq < holder.next_seq or (
            batch.next_seq == holder.next_seq and not batch.is_snapshot
        ):
            return ApplyResult.DUPLICATE
        if batch.is_snapshot:
            self._blocks.clear(holder.slot)
            self._apply_events(holder, batch.events)
        elif batch.first_seq > holder.next_seq:
            if holder.is_awaiting:
                return ApplyResult.AWAITING
            holder.is_awaiting = True
            self.num_resyncs += 1
            return ApplyResult.GAP
        else:
            self._apply_events(holder, batch.events[holder.next_seq - batch.first_seq :])
        holder.next_seq = batch.next_seq
        holder.is_awaiting = False
        self._evict()
        return ApplyResult.APPLIED

    def check_integrity(self) -> None:
        """AssertionError when blocks, holders and slots disagree."""
        counts = Counter(slot for _, slots in self._blocks.items() for slot in slots)
        slots = {name: holder.slot for name, holder in self._holders.items()}
        assert slots == {name: slot for slot, name in enumerate(self._instances) if name}
        assert counts.keys() <= set(slots.values())
        for slot in slots.values():
            assert counts[slot] == self._blocks.held_by(slot)
        assert len(self._blocks.items()) == len(self) <= self._max_blocks
        assert all(slots for _, slots in self._blocks.items())

    def _free_slot(self) -> int:
        """The lowest."""
        for slot, name in enumerate(self._instances):
            if name is None:
                return slot
        self._instances.append(None)
        self._nobody.append(0.0)
        return len(self._instances) - 1

    def _apply_events(self, holder: _Holder, events: Iterable[KvEvent]) -> None:
        for event in events:
            match event:
                case BlocksStored(hashes):
                    self._blocks.store(holder.slot, hashes)
                case BlocksRemoved(hashes):
                    self._blocks.remove(holder.slot, hashes)
                case CacheCleared():
                    self._blocks.clear(holder.slot)

    def _evict(self) -> None:
        """A few more than it must, so that it need not each time."""
        excess = len(self._blocks) - self._max_blocks
        if excess > 0:
            before = len(self._blocks)
            self._blocks.evict(excess + self._max_blocks // EVICTED_SHARE)
            self.num_evicted += before - len(self._blocks)
