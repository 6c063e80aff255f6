"""Every KV block of an instance: who is free, who may be reused, and what each one holds.

::

    block 0        the null block: pads block tables, never handed out, never written
    ref_count > 0  owned by that many block tables
    ref_count = 0  on the free list; its content stays findable while it has a hash

The free list is least-recently-freed first and threaded through the blocks themselves, so a prefix
hit takes a block out of its middle in O(1) without allocating. A sequence's blocks are freed last
block first: of one chain, the tail is evicted before the head it depends on.

Two blocks may hold the same content (two sequences computed it side by side). The first one keeps
the hash; the other stays nameless, because block tables are append-only and must not be rewritten.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from isthmus.common.ids import BlockHash, BlockId
from isthmus.common.kv_events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent

NULL_BLOCK = BlockId(0)


class KvBlock:
    """Bookkeeping of one block; ``prev`` and ``next`` are set while it is on the free list."""

    __slots__ = ("block_hash", "block_id", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = BlockId(block_id)
        self.ref_count = 0
        self.block_hash: BlockHash | None = None
        self.prev: KvBlock | None = None
        self.next: KvBlock | None = None


class FreeList:
    """Doubly linked list of blocks around one sentinel."""

    def __init__(self) -> None:
        self._end = KvBlock(-1)
        self._end.prev = self._end.next = self._end
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, block: KvBlock) -> None:
        last = self._end.prev
        assert last is not None
        last.next = self._end.prev = block
        block.prev, block.next = last, self._end
        self._length += 1

    def remove(self, block: KvBlock) -> None:
        before, after = block.prev, block.next
        assert before is not None
        assert after is not None
        before.next, after.prev = after, before
        block.prev = block.next = None
        self._length -= 1

    def pop_first(self) -> KvBlock:
        """The block freed longest ago. The list must not be empty."""
        first = self._end.next
        assert first is not None
        self.remove(first)
        return first

    def block_ids(self) -> list[BlockId]:
        """Next to be reused first."""
        found: list[BlockId] = []
        block = self._end.next
        while block is not None and block is not self._end:
            found.append(block.block_id)
            block = block.next
        return found


class KvEventBuffer:
    """Cache changes since they were last taken; neighbours of one kind become one event."""

    def __init__(self) -> None:
        self._events: list[KvEvent] = []
        self._stored: list[BlockHash] = []
        self._removed: list[BlockHash] = []

    def stored(self, block_hash: BlockHash) -> None:
        self._close_removed()
        self._stored.append(block_hash)

    def removed(self, block_hash: BlockHash) -> None:
        self._close_stored()
        self._removed.append(block_hash)

    def cleared(self) -> None:
        """What happened before no longer matters to anyone."""
        self._stored, self._removed = [], []
        self._events = [CacheCleared()]

    def take(self) -> list[KvEvent]:
        self._close_stored()
        self._close_removed()
        events, self._events = self._events, []
        return events

    def _close_stored(self) -> None:
        if self._stored:
            self._events.append(BlocksStored(tuple(self._stored)))
            self._stored = []

    def _close_removed(self) -> None:
        if self._removed:
            self._events.append(BlocksRemoved(tuple(self._removed)))
            self._removed = []


class BlockPool:
    """Hands out, shares and takes back blocks. Not thread-safe: its owner holds a lock."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 1, "one block is the null block"
        self._blocks = [KvBlock(block_id) for block_id in range(num_blocks)]
        self._free = FreeList()
        for block in self._blocks[1:]:
            self._free.append(block)
        self._by_hash: dict[BlockHash, KvBlock] = {}
        self._num_free_cached = 0
        self._events = KvEventBuffer()

    @property
    def num_blocks(self) -> int:
        """Blocks that can be handed out: all but the null block."""
        return len(self._blocks) - 1

    @property
    def num_free(self) -> int:
        """Unreferenced blocks, cached ones included."""
        return len(self._free)

    @property
    def num_free_cached(self) -> int:
        return self._num_free_cached

    def allocate(self, count: int) -> list[BlockId]:
        """``count`` blocks (at most ``num_free``) with one reference each; evicts their hashes."""
        return [self._take_free() for _ in range(count)]

    def find_prefix(self, hashes: Sequence[BlockHash], limit: int) -> list[BlockId]:
        """Blocks of the longest cached prefix of ``hashes``, at most ``limit``; takes nothing."""
        found: list[BlockId] = []
        for block_hash in hashes[:limit]:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            found.append(block.block_id)
        return found

    def num_unreferenced(self, block_ids: Iterable[BlockId]) -> int:
        return sum(self._blocks[block_id].ref_count == 0 for block_id in block_ids)

    def share(self, block_ids: Iterable[BlockId]) -> None:
        """Adds a reference to each, taking unreferenced ones off the free list."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                assert block.block_hash is not None, f"block {block_id} has no content to share"
                self._free.remove(block)
                self._num_free_cached -= 1
            block.ref_count += 1

    def free(self, block_ids: Sequence[BlockId]) -> None:
        """Drops one reference to each, the last block of the sequence first."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} freed twice"
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free.append(block)
                self._num_free_cached += block.block_hash is not None

    def publish(self, block_id: BlockId, block_hash: BlockHash) -> None:
        """Makes a full, computed block findable, unless another block already has that content."""
        block = self._blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} is not owned"
        if block.block_hash is None and block_hash not in self._by_hash:
            block.block_hash = block_hash
            self._by_hash[block_hash] = block
            self._events.stored(block_hash)

    def clear_cache(self) -> int:
        """Forgets all content, also of blocks in use. Returns how many hashes were forgotten."""
        count = len(self._by_hash)
        for block in self._by_hash.values():
            block.block_hash = None
        self._by_hash.clear()
        self._num_free_cached = 0
        self._events.cleared()
        return count

    def cached_hashes(self) -> list[BlockHash]:
        return list(self._by_hash)

    def take_events(self) -> list[KvEvent]:
        return self._events.take()

    def check_integrity(self, owners: Iterable[Collection[BlockId]]) -> None:
        """Every block is free, or owned exactly as often as it is referenced; never both.

        ``owners`` are the block tables. AssertionError names the first block in the wrong."""
        expected = [0] * len(self._blocks)
        for block_ids in owners:
            for block_id in block_ids:
                expected[block_id] += 1
        free = self._free.block_ids()
        is_free = set(free)
        assert len(free) == len(is_free) == len(self._free), "free list is damaged"
        assert NULL_BLOCK not in is_free, "the null block is free"
        for block in self._blocks:
            name = f"block {block.block_id}"
            count = expected[block.block_id]
            assert block.ref_count == count, f"{name}: {block.ref_count} refs, {count} owners"
            owned_or_null = count > 0 or block.block_id == NULL_BLOCK
            assert owned_or_null != (block.block_id in is_free), (
                f"{name} is free and owned, or lost"
            )
            known = block.block_hash is None or self._by_hash.get(block.block_hash) is block
            assert known, f"{name}: its hash leads elsewhere"
        assert expected[NULL_BLOCK] == 0, "the null block is owned"
        cached = sum(self._blocks[block_id].block_hash is not None for block_id in free)
        assert cached == self._num_free_cached, f"{cached} free cached blocks, not counted right"
        stale = [b.block_id for h, b in self._by_hash.items() if b.block_hash != h]
        assert not stale, f"blocks {stale} are listed under a hash they do not have"

    def _take_free(self) -> BlockId:
        block = self._free.pop_first()
        block.ref_count = 1
        if block.block_hash is not None:
            del self._by_hash[block.block_hash]
            self._events.removed(block.block_hash)
            block.block_hash = None
            self._num_free_cached -= 1
        return block.block_id
