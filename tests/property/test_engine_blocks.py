"""Random lives of sequences, reservations and transfers against the rules of block ownership."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from isthmus.common.hashing import block_hashes, root_hash
from isthmus.common.ids import BlockHash
from isthmus.common.kv_events import BlocksRemoved, BlocksStored
from isthmus.engine.block_table import BlockTable, TableState
from isthmus.engine.kv_manager import KvCacheManager

BLOCK_SIZE = 4
NUM_BLOCKS = 17
PROMPTS = st.tuples(st.integers(0, 2), st.integers(1, 40))  # which text, how many tokens of it


class BlockOwnership(RuleBasedStateMachine):
    used = Bundle("used")
    reserved = Bundle("reserved")
    parting = Bundle("parting")  # held or quarantined: only a peer's word frees them

    def __init__(self) -> None:
        super().__init__()
        self.kv = KvCacheManager(NUM_BLOCKS, BLOCK_SIZE, 0.1, enable_prefix_cache=True)
        self.live: set[BlockTable] = set()
        self.hashes: dict[BlockTable, list[BlockHash]] = {}
        self.known: set[BlockHash] = set()  # what a router would believe

    def hashes_of(self, text: int, num_tokens: int) -> list[BlockHash]:
        token_ids = [text * 1000 + i for i in range(num_tokens)]
        return block_hashes(token_ids, BLOCK_SIZE, root_hash("model"))

    def allocate(self, prompt: tuple[int, int], state: TableState) -> BlockTable | None:
        hashes = self.hashes_of(*prompt)
        free_before = self.kv.num_free_blocks
        table = self.kv.try_allocate(prompt[1], hashes, state=state)
        if table is None:
            assert self.kv.num_free_blocks == free_before
            return None
        assert len(table) == self.kv.blocks_for(prompt[1])
        assert table.num_cached_blocks * BLOCK_SIZE < prompt[1]
        self.live.add(table)
        self.hashes[table] = hashes
        return table

    @rule(target=used, prompt=PROMPTS)
    def start(self, prompt: tuple[int, int]) -> object:
        table = self.allocate(prompt, TableState.USED)
        return multiple() if table is None else table

    @rule(target=reserved, prompt=PROMPTS)
    def reserve(self, prompt: tuple[int, int]) -> object:
        table = self.allocate(prompt, TableState.RESERVED)
        return multiple() if table is None else table

    @rule(table=used, share=st.floats(0, 1))
    def compute(self, table: BlockTable, share: float) -> None:
        if table in self.live:
            hashes = self.hashes[table]
            self.kv.publish(table, hashes, int(share * len(hashes)))

    @rule(table=used, num_tokens=st.integers(1, 12))
    def grow(self, table: BlockTable, num_tokens: int) -> None:
        if table in self.live:
            before = list(table.block_ids)
            wanted = len(table) * BLOCK_SIZE + num_tokens
            grown = self.kv.try_grow(table, wanted)
            assert table.block_ids[: len(before)] == before
            assert len(table) == (self.kv.blocks_for(wanted) if grown else len(before))

    @rule(table=consumes(used))
    def finish(self, table: BlockTable) -> None:
        self.kv.free(table)
        self.live.remove(table)

    @rule(target=parting, table=consumes(used))
    def hold(self, table: BlockTable) -> BlockTable:
        self.kv.move(table, TableState.HELD)
        return table

    @rule(target=used, table=consumes(reserved))
    def admit(self, table: BlockTable) -> BlockTable:
        self.kv.move(table, TableState.USED)
        self.kv.publish(table, self.hashes[table], len(self.hashes[table]))
        return table

    @rule(table=consumes(reserved))
    def cancel(self, table: BlockTable) -> None:
        self.kv.free(table)
        self.live.remove(table)

    @rule(target=parting, table=consumes(reserved))
    def quarantine(self, table: BlockTable) -> BlockTable:
        self.kv.quarantine(table)
        return table

    @rule(table=consumes(parting))
    def release(self, table: BlockTable) -> None:
        self.kv.free(table)
        self.live.remove(table)

    @rule()
    def flush(self) -> None:
        self.kv.clear_cache()

    @invariant()
    def blocks_add_up(self) -> None:
        self.kv.check_integrity()
        assert self.kv.live_tables() == self.live
        owned = {block_id for table in self.live for block_id in table.block_ids}
        assert self.kv.num_free_blocks == NUM_BLOCKS - 1 - len(owned)

    @invariant()
    def blocks_that_a_peer_writes_have_one_owner(self) -> None:
        """A write must not change KV that another sequence reads."""
        owners = Counter(block_id for table in self.live for block_id in table.block_ids)
        for table in self.live:
            if table.state in (TableState.RESERVED, TableState.QUARANTINED):
                assert all(owners[i] == 1 for i in table.block_ids[table.num_cached_blocks :])

    @invariant()
    def events_tell_what_is_cached(self) -> None:
        for event in self.kv.take_events():
            match event:
                case BlocksStored(hashes):
                    self.known.update(hashes)
                case BlocksRemoved(hashes):
                    self.known.difference_update(hashes)
                case _:
                    self.known.clear()
        assert self.known == set(self.kv.cached_hashes())


TestBlockOwnership = BlockOwnership.TestCase
TestBlockOwnership.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
