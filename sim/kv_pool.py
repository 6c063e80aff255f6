"""The KV blocks of one simulated instance: counted, with a prefix cache by block hash.

Like the engine's: a block is referenced, or cached and unreferenced (then it counts as free and the
least recently used goes first), or empty. Only full blocks with a hash are cached. Sequences hold
their hashes (``refs``); the rest of their blocks are private and only counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from isthmus.common.ids import BlockHash
from isthmus.common.kv_events import BlocksRemoved, BlocksStored, KvEvent


class KvPool:
    """Keeps the events since they were last taken, for the router's index."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.used = 0  # referenced blocks
        self._refs: dict[BlockHash, int] = {}
        self._idle: OrderedDict[BlockHash, None] = OrderedDict()  # least recently used first
        self._events: list[KvEvent] = []

    @property
    def free(self) -> int:
        return self.num_blocks - self.used

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks whose content is still valid."""
        return len(self._idle)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, hashes: Sequence[BlockHash], limit: int) -> int:
        """Leading blocks of ``hashes`` that are here, ``limit`` at most."""
        refs, idle = self._refs, self._idle
        depth = 0
        for block_hash in islice(hashes, limit):
            if block_hash not in refs and block_hash not in idle:
                break
            depth += 1
        return depth

    def try_take(self, hits: Sequence[BlockHash], num_blocks: int, keep_free: int = 0) -> bool:
        """References ``hits`` and takes blocks until there are ``num_blocks``; False = too few."""
        idle = self._idle
        fresh = num_blocks - len(hits)
        woken = sum(block_hash in idle for block_hash in hits)
        if fresh + woken + keep_free > self.free:
            return False
        refs = self._refs
        for block_hash in hits:
            if block_hash in idle:
                del idle[block_hash]
                refs[block_hash] = 1
            else:
                refs[block_hash] += 1
        self.used += woken
        self.grow(fresh)
        return True

    def grow(self, num_blocks: int) -> None:
        """More private blocks; there must be as many. Cached content makes room."""
        self.used += num_blocks
        assert self.used <= self.num_blocks, "more blocks than there are"
        removed = []
        while self.used + len(self._idle) > self.num_blocks:
            removed.append(self._idle.popitem(last=False)[0])
        if removed:
            self._events.append(BlocksRemoved(tuple(removed)))

    def shrink(self, num_blocks: int) -> None:
        """Private blocks go back."""
        self.used -= num_blocks
        assert self.used >= 0, "more blocks given back than were taken"

    def publish(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Private blocks become shared ones. Returns those that did: of two sequences that compute
        the same block at the same time one keeps its own."""
        new = [h for h in hashes if h not in self._refs]
        if not new:
            return new
        for block_hash in new:
            if block_hash in self._idle:  # computed again although it was there: one copy is enough
                del self._idle[block_hash]
            self._refs[block_hash] = 1
        self._events.append(BlocksStored(tuple(new)))
        return new

    def release(self, refs: Sequence[BlockHash], num_private: int) -> None:
        """A sequence ends: its private blocks are empty, the others stay cached. The last of a
        chain is the first to go."""
        self.shrink(num_private)
        counts, idle = self._refs, self._idle
        for block_hash in reversed(refs):
            left = counts[block_hash] - 1
            if left:
                counts[block_hash] = left
            else:
                del counts[block_hash]
                idle[block_hash] = None
                self.used -= 1

    def clear(self) -> None:
        """The instance died, and everything with it."""
        self.used = 0
        self._refs.clear()
        self._idle.clear()
        self._events = []

    def take_events(self) -> list[KvEvent]:
        events, self._events = self._events, []
        return events

    def check_integrity(self) -> None:
        """AssertionError when counts and contents disagree."""
        assert len(self._refs) <= self.used <= self.num_blocks
        assert self.used + len(self._idle) <= self.num_blocks
        assert not self._refs.keys() & self._idle.keys()
        assert all(count > 0 for count in self._refs.values())
