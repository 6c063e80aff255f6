"""The KV blocks of one simulated instance: counted, with a prefix cache by block hash.

Like the engine's: a block is referenced, or cached and unreferenced (then it counts as free and the
least recently used goes first), or empty. Only full blocks with a hash are cached. Sequences hold
their hashes (``refs``); the rest of their blocks are private and only counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, takewhile

from isthmus.common.ids import BlockHash
from isthmus.common.kv_events import BlocksRemoved, BlocksStored, KvEvent
from isthmus.sim.idle_blocks import IdleBlocks


class KvPool:
    """Keeps the events since they were last taken, for the router's index."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.used = 0  # referenced blocks
        self._here: set[BlockHash] = set()  # whatever is cached, referenced or idle
        self._more: dict[BlockHash, int] = {}  # references beyond the first one
        self._idle = IdleBlocks()
        self._events: list[KvEvent] = []

    @property
    def free(self) -> int:
        return self.num_blocks - self.used

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks whose content is still valid."""
        return len(self._idle.since)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, hashes: Sequence[BlockHash], limit: int) -> int:
        """Leading blocks of ``hashes`` that are here, ``limit`` at most."""
        here = takewhile(self._here.__contains__, islice(hashes, limit))
        return len([*here])

    def try_take(self, hits: Sequence[BlockHash], num_blocks: int, keep_free: int = 0) -> bool:
        """References ``hits`` and takes blocks until there are ``num_blocks``; False = too few."""
        idle = self._idle.since
        fresh = num_blocks - len(hits)
        woken = [block_hash for block_hash in hits if block_hash in idle]
        if fresh + len(woken) + keep_free > self.free:
            return False
        if len(woken) < len(hits):
            more = self._more
            for block_hash in hits:
                if block_hash not in idle:
                    more[block_hash] = more.get(block_hash, 0) + 1
        self._idle.wake(woken)
        self.used += len(woken)
        self.grow(fresh)
        return True

    def grow(self, num_blocks: int) -> None:
        """More private blocks; there must be as many. Cached content makes room."""
        self.used += num_blocks
        assert self.used <= self.num_blocks, "more blocks than there are"
        excess = self.used + len(self._idle.since) - self.num_blocks
        if excess > 0:
            removed = self._idle.take(excess)
            self._here.difference_update(removed)
            self._events.append(BlocksRemoved(tuple(removed)))

    def shrink(self, num_blocks: int) -> None:
        """Private blocks go back."""
        self.used -= num_blocks
        assert self.used >= 0, "more blocks given back than were taken"

    def publish(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Private blocks become shared ones. Returns those that did: of two sequences that compute
        the same block at the same time one keeps its own."""
        here, idle = self._here, self._idle.since
        if here.isdisjoint(hashes):
            new = list(hashes)
        else:
            # What is idle was computed again although it was there: one copy is enough.
            new = [h for h in hashes if h not in here or h in idle]
            self._idle.wake([h for h in new if h in idle])
        if new:
            here.update(new)
            self._events.append(BlocksStored(tuple(new)))
        return new

    def release(self, refs: Sequence[BlockHash], num_private: int) -> None:
        """A sequence ends: its private blocks are empty, the others stay cached. The last of a
        chain is the first to go."""
        self.shrink(num_private)
        more = self._more
        ended = list(refs)
        if more and not more.keys().isdisjoint(refs):
            ended = [block_hash for block_hash in refs if block_hash not in more]
            for block_hash in more.keys() & refs:
                more[block_hash] -= 1
                if not more[block_hash]:
                    del more[block_hash]
        if ended:
            self._idle.add(ended)
            self.used -= len(ended)

    def clear(self) -> None:
        """The instance died, and everything with it."""
        self.used = 0
        self._here.clear()
        self._more.clear()
        self._idle.clear()
        self._events = []

    def take_events(self) -> list[KvEvent]:
        events, self._events = self._events, []
        return events

    def check_integrity(self) -> None:
        """AssertionError when counts and contents disagree."""
        self._idle.check_integrity()
        idle = self._idle.since
        assert idle.keys() <= self._here
        assert self._more.keys() <= self._here - idle.keys()
        assert all(count > 0 for count in self._more.values())
        assert len(self._here) - len(idle) <= self.used <= self.num_blocks
        assert self.used + len(idle) <= self.num_blocks
