"""Which instance holds which blocks, as far as their KV events have told.

Owns nothing but a belief: a wrong entry costs a recomputation, never a wrong answer. Invariants:

- an entry is credited to an instance only at the epoch it was stored in;
- events apply in the order of their sequence numbers; after a gap the index asks once for a resync
  and takes nothing more until the missing events, or a snapshot, arrive;
- at most ``max_blocks`` distinct hashes, least recently used dropped first, parents last.

Holders of a block are a mask with one bit per instance, so that a lookup of a whole
prompt is one dictionary access and one AND per block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice, repeat

from isthmus.common.ids import BlockHash, InstanceId
from isthmus.common.kv_events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvEvent,
    KvEventBatch,
)

TOUCH_EVERY = 8
"""Lookups of which one counts as use: to move every block of every prompt costs as much as to find
them, and what is used often is found often enough."""
MAX_SHARED = 4_096
EVICTED_SHARE = 256


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
    bit: int
    next_seq: int = 0
    is_awaiting: bool = False
    hashes: set[BlockHash] = field(default_factory=set)


class KvIndex:
    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        # Least recently used first: a block that is used again is entered anew. (An OrderedDict
        # moves it in place, for 60 bytes a block and twice the time that it takes to enter one.)
        self._masks: dict[BlockHash, int] = {}
        self._holders: dict[InstanceId, _Holder] = {}
        self._instance_by_bit: dict[int, InstanceId] = {}
        self._all_mask = 0
        self._shared: dict[int, int] = {}
        self._num_matches = 0
        self.num_resyncs = 0
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._masks)

    def match(self, hashes: Sequence[BlockHash]) -> dict[InstanceId, int]:
        """Leading blocks of ``hashes`` that each instance holds; instances with none are absent."""
        names = self._instance_by_bit
        return {names[bit]: depth for mask, depth in self.holders(hashes) for bit in bits_of(mask)}

    def bit(self, instance_id: InstanceId) -> int:
        """Its own in every mask, until it is forgotten or begins a new epoch; 0 = not known."""
        holder = self._holders.get(instance_id)
        return holder.bit if holder is not None else 0

    def holders(self, hashes: Sequence[BlockHash]) -> list[tuple[int, int]]:
        """As ``match``: masks of instances that hold equally many of them, and how many."""
        masks = self._masks
        alive = self._all_mask
        ended: list[tuple[int, int]] = []  # (bits of those that hold no more, depth)
        if not alive:
            return ended
        depth = 0
        # Most blocks have the holders of the one before them: nothing to be done but to go on.
        for depth, mask in enumerate(map(masks.get, hashes)):
            if mask != alive:
                still = alive & mask if mask is not None else 0
                if still != alive:
                    ended.append((alive ^ still, depth))
                    alive = still
                    if not alive:
                        break
        else:
            depth = len(hashes)
            ended.append((alive, depth))
        self._num_matches += 1
        if not self._num_matches % TOUCH_EVERY:
            for index in range(depth - 1, -1, -1):
                masks[hashes[index]] = masks.pop(hashes[index])
        return ended[1:] if ended and not ended[0][1] else ended

    def next_seq(self, instance_id: InstanceId, epoch: int) -> int:
        """The first event that is missing: where a stream must begin."""
        holder = self._holders.get(instance_id)
        return holder.next_seq if holder is not None and holder.epoch == epoch else 0

    def num_blocks(self, instance_id: InstanceId) -> int:
        holder = self._holders.get(instance_id)
        return len(holder.hashes) if holder is not None else 0

    def reset(self, instance_id: InstanceId, epoch: int) -> None:
        """Begins a new epoch with nothing cached; the same or an older epoch changes nothing."""
        holder = self._holders.get(instance_id)
        if holder is not None and holder.epoch >= epoch:
            return
        self.forget(instance_id)
        bit = ~self._all_mask & (self._all_mask + 1)  # the lowest that is free
        self._holders[instance_id] = _Holder(epoch, bit)
        self._instance_by_bit[bit] = instance_id
        self._all_mask |= bit

    def forget(self, instance_id: InstanceId) -> None:
        holder = self._holders.pop(instance_id, None)
        if holder is None:
            return
        self._clear(holder)
        self._all_mask &= ~holder.bit
        del self._instance_by_bit[holder.bit]

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
            self._clear(holder)
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
        """AssertionError when masks, holders and bits disagree."""
        union: dict[BlockHash, int] = {}
        for holder in self._holders.values():
            assert holder.bit & self._all_mask
            for block_hash in holder.hashes:
                union[block_hash] = union.get(block_hash, 0) | holder.bit
        assert union == dict(self._masks)
        assert len(self._masks) <= self._max_blocks
        assert self._instance_by_bit == {h.bit: name for name, h in self._holders.items()}

    def _apply_events(self, holder: _Holder, events: Iterable[KvEvent]) -> None:
        for event in events:
            match event:
                case BlocksStored(hashes):
                    self._store(holder, hashes)
                case BlocksRemoved(hashes):
                    self._remove(holder, hashes)
                case CacheCleared():
                    self._clear(holder)

    def _store(self, holder: _Holder, hashes: Sequence[BlockHash]) -> None:
        masks, bit = self._masks, holder.bit
        holder.hashes.update(hashes)
        # Parents come first, and should be dropped last.
        if masks.keys().isdisjoint(hashes):
            masks.update(dict.fromkeys(reversed(hashes), self._shared_mask(bit)))
            return
        # Few sets of holders, many blocks: what a set becomes is found out once.
        backwards = hashes[::-1]
        found = dict(zip(backwards, map(masks.get, backwards), strict=True))
        becomes = {mask: self._with(mask, bit) for mask in set(found.values())}
        deque(map(masks.pop, found, repeat(None)), maxlen=0)
        masks.update(zip(found, map(becomes.__getitem__, found.values()), strict=True))

    def _with(self, mask: int | None, bit: int) -> int:
        if mask is None:
            return self._shared_mask(bit)
        return mask if mask & bit else self._shared_mask(mask | bit)

    def _remove(self, holder: _Holder, hashes: Iterable[BlockHash]) -> None:
        masks, bit, held = self._masks, holder.bit, holder.hashes
        known = held.intersection(hashes)
        held -= known
        for block_hash in known:
            mask = masks[block_hash]
            if mask == bit:
                del masks[block_hash]
            else:
                masks[block_hash] = self._shared_mask(mask ^ bit)

    def _shared_mask(self, mask: int) -> int:
        """Its equal that others have too: there are millions of blocks and few sets of holders."""
        shared = self._shared
        if len(shared) > MAX_SHARED:
            shared.clear()
        return shared.setdefault(mask, mask)

    def _clear(self, holder: _Holder) -> None:
        self._remove(holder, holder.hashes.copy())

    def _evict(self) -> None:
        """A few more than it must: whoever looks for the oldest goes over the places of all that
        were dropped since the dictionary was last made anew."""
        masks = self._masks
        excess = len(masks) - self._max_blocks
        if excess <= 0:
            return
        for block_hash in [*islice(masks, excess + self._max_blocks // EVICTED_SHARE)]:
            mask = masks.pop(block_hash)
            self.num_evicted += 1
            for bit in bits_of(mask):
                self._holders[self._instance_by_bit[bit]].hashes.discard(block_hash)


def bits_of(mask: int) -> Iterator[int]:
    """Each as a mask of its own."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
