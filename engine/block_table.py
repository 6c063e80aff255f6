"""Ownership of KV blocks: a block belongs to tables, and a table is in one state.

::

    RESERVED ──▶ USED ──▶ HELD ──▶ FREED          RESERVED  a peer is writing into it
        │          └────────────────▲ ▲           USED      a sequence computes or decodes with it
        ├──▶ QUARANTINED ───────────┘ │           HELD      a peer may be reading from it
        └─────────────────────────────┘           QUARANTINED  a write might still land in it
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from isthmus.common.ids import BlockId
from isthmus.common.state_machine import Transitions


class TableState(Enum):
    USED = "used"
    HELD = "held"
    RESERVED = "reserved"
    QUARANTINED = "quarantined"
    FREED = "freed"


TABLE_TRANSITIONS: Transitions[TableState] = Transitions(
    {
        TableState.RESERVED: frozenset({TableState.USED, TableState.QUARANTINED, TableState.FREED}),
        TableState.USED: frozenset({TableState.HELD, TableState.FREED}),
        TableState.HELD: frozenset({TableState.FREED}),
        TableState.QUARANTINED: frozenset({TableState.FREED}),
        TableState.FREED: frozenset(),
    }
)


class BlockTable:
    """One owner's blocks in sequence order, append-only until it is freed.

    ``row`` repeats the ids as int32 so that a step's block-table tensor is filled by slices. A
    table is *whole* unless a peer left out KV that its sequence will not look at: others might.
    """

    __slots__ = (
        *("block_ids", "is_whole", "num_cached_blocks", "num_published_blocks", "row", "state"),
    )

    def __init__(
        self, block_ids: Sequence[BlockId], num_cached_blocks: int, state: TableState
    ) -> None:
        self.state = state
        self.is_whole = True
        self.block_ids: list[BlockId] = []
        self.row: NDArray[np.int32] = np.zeros(len(block_ids) + 16, dtype=np.int32)
        self.num_cached_blocks = num_cached_blocks
        self.num_published_blocks = num_cached_blocks
        self.extend(block_ids)

    def __len__(self) -> int:
        return len(self.block_ids)

    def extend(self, block_ids: Sequence[BlockId]) -> None:
        start = len(self.block_ids)
        end = start + len(block_ids)
        if end > len(self.row):
            self.row = np.concatenate((self.row, np.zeros(end, dtype=np.int32)))
        self.row[start:end] = block_ids
        self.block_ids.extend(block_ids)

    def move_to(self, state: TableState) -> None:
        self.state = TABLE_TRANSITIONS.check(self.state, state)

    def drop_cached_prefix(self) -> list[BlockId]:
        """Gives up the prefix hits, keeping only blocks that a peer may write to; returns them."""
        assert self.state is TableState.QUARANTINED
        hits = self.block_ids[: self.num_cached_blocks]
        del self.block_ids[: self.num_cached_blocks]
        self.row[: len(self.block_ids)] = self.block_ids
        self.num_cached_blocks = self.num_published_blocks = 0
        return hits
