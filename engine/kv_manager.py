"""The rules by which sequences, reservations and transfers get and give back KV blocks.

Owns the block pool and the set of live block tables; a block is free or belongs to tables, and
every table is used, held, reserved or quarantined (see ``block_table``). A refusal changes nothing.

::

    blocks of a prompt   prefix hits (shared) | fresh blocks
                         └ never the last token: one token at least is computed
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.common.ids import BlockHash
from isthmus.common.kv_events import KvEvent
from isthmus.engine.block_pool import BlockPool
from isthmus.engine.block_table import BlockTable, TableState


class KvCacheManager:
    """Not thread-safe: the engine core calls it under its lock."""

    def __init__(
        self, num_blocks: int, block_size: int, watermark: float, enable_prefix_cache: bool
    ) -> None:
        """``num_blocks`` counts the null block; ``watermark`` is a share of the others."""
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache
        self._pool = BlockPool(num_blocks)
        self._watermark_blocks = int(watermark * self._pool.num_blocks)
        self._tables: dict[TableState, set[BlockTable]] = {state: set() for state in TableState}

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_free_cached_blocks(self) -> int:
        return self._pool.num_free_cached

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_blocks_in(self, state: TableState) -> int:
        """Distinct blocks of the tables in ``state``."""
        tables = self._tables[state]
        if len(tables) == 1:
            return len(next(iter(tables)))
        return len({block_id for table in tables for block_id in table.block_ids})

    def try_allocate(
        self,
        num_tokens: int,
        hashes: Sequence[BlockHash],
        *,
        state: TableState = TableState.USED,
        keep_free: int = 0,
    ) -> BlockTable | None:
        """A table for ``num_tokens`` tokens, cached prefix first; ``hashes`` of its full blocks.

        While anything is in use the watermark stays free, so that running sequences can grow;
        ``keep_free`` more blocks stay free in any case. None when there are too few blocks.
        """
        needed = self.blocks_for(num_tokens)
        hits = self._pool.find_prefix(hashes, (num_tokens - 1) // self.block_size)
        taken = needed - len(hits) + self._pool.num_unreferenced(hits)
        if self._tables[TableState.USED]:
            keep_free += self._watermark_blocks
        if taken + keep_free > self._pool.num_free:
            return None
        self._pool.share(hits)  # before allocating: a hit must not be evicted for a fresh block
        table = BlockTable(hits + self._pool.allocate(needed - len(hits)), len(hits), state)
        self._tables[state].add(table)
        return table

    def num_cached_blocks(self, hashes: Sequence[BlockHash]) -> int:
        """How many of these blocks, from the first on, are in the prefix cache."""
        return len(self._pool.find_prefix(hashes, len(hashes)))

    def try_grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Appends blocks until ``num_tokens`` tokens fit. Not bound by the watermark."""
        missing = self.blocks_for(num_tokens) - len(table)
        if missing > self._pool.num_free:
            return False
        if missing > 0:
            table.extend(self._pool.allocate(missing))
        return True

    def publish(self, table: BlockTable, hashes: Sequence[BlockHash], count: int) -> None:
        """Enters the table's first ``count`` blocks, full and computed, into the prefix cache: of a
        table that is not whole none, since a prefix begins with what is missing there."""
        if not (self.enable_prefix_cache and table.is_whole):
            return
        for index in range(table.num_published_blocks, count):
            self._pool.publish(table.block_ids[index], hashes[index])
            table.num_published_blocks = index + 1

    def move(self, table: BlockTable, state: TableState) -> None:
        """USED → HELD, RESERVED → USED."""
        self._tables[table.state].remove(table)
        table.move_to(state)
        self._tables[state].add(table)

    def quarantine(self, table: BlockTable, *, keeps_prefix: bool = False) -> None:
        """Keeps a reservation's fresh blocks out of the pool; its prefix hits are let go.

        A peer never writes into prefix hits, so nothing can land in them; ``keeps_prefix`` where
        they may still be read for one."""
        self.move(table, TableState.QUARANTINED)
        if not keeps_prefix:
            self._pool.free(table.drop_cached_prefix())

    def free(self, table: BlockTable) -> None:
        """Drops the table's references. Its content stays cached until a block is reused."""
        self._tables[table.state].remove(table)
        table.move_to(TableState.FREED)
        self._pool.free(table.block_ids)

    def live_tables(self) -> set[BlockTable]:
        return set().union(*self._tables.values())

    def clear_cache(self) -> int:
        return self._pool.clear_cache()

    def cached_hashes(self) -> list[BlockHash]:
        return self._pool.cached_hashes()

    def take_events(self) -> list[KvEvent]:
        return self._pool.take_events()

    def check_integrity(self) -> None:
        """AssertionError naming the block whose owners and references disagree."""
        for state, tables in self._tables.items():
            assert state is not TableState.FREED or not tables, "a freed table is listed"
            for table in tables:
                assert table.state is state, f"table of blocks {table.block_ids} is misfiled"
                same = table.row[: len(table)].tolist() == table.block_ids
                assert same, f"row of blocks {table.block_ids} differs"
        self._pool.check_integrity(
            table.block_ids for tables in self._tables.values() for table in tables
        )
