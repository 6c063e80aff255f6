"""KV that changes its dtype on the way: what is to be converted, as data, and the copies of it.

::

    source blocks ──quantise──▶ staged blocks (target's dtype, block size; source's heads) ──▶ peer
    of its own dtype            in memory behind the source's blocks: see ``staging``

What arrives is to the bit what the target's engine would have written from the same vectors: one
rule (``quantise_kv``) makes both. A staged block is planned, written and checked like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from isthmus.common.errors import LayoutMismatchError
from isthmus.common.ids import BlockId
from isthmus.common.kv_layout import KvLayout
from isthmus.kvtransfer.copies import Copies
from isthmus.kvtransfer.plan import Side, Tokens, blocks_of, plan_copies
from isthmus.kvtransfer.routes import Route


@dataclass(frozen=True, slots=True)
class Conversion:
    """Of some layers and heads of some tokens of one rank, for one write."""

    source: Side
    staged: KvLayout
    tokens: range  # from the start of a target block on
    heads: range  # of the model: those that are sent
    layers: range
    first_needed: int  # no layer of earlier tokens is sent

    @property
    def num_blocks(self) -> int:
        return len(blocks_of(self.tokens, self.staged.block_size))

    @property
    def block_bytes(self) -> int:
        """Of a staged block, which has only these layers."""
        return len(self.layers) * self.staged.layer_bytes

    @property
    def num_bytes(self) -> int:
        """That are staged."""
        return self.num_blocks * self.block_bytes

    @property
    def side(self) -> Side:
        """The staged blocks, which are counted from 0."""
        size = self.staged.block_size
        ids = tuple(BlockId(index) for index in range(self.num_blocks))
        return Side(self.staged, ids, self.tokens.start // size * size)


def conversion_of(
    source: Side, route: Route, tokens: range, layers: range, needed: Tokens | None
) -> Conversion:
    """``needed`` as the planner has it."""
    first_needed = 0 if needed is None else int(needed[layers.start : layers.stop].min())
    staged = staged_layout(route.source, route.target)
    return Conversion(source, staged, tokens, route.heads, layers, first_needed)


def staged_copies(conversion: Conversion, target: Side, needed: Tokens | None) -> Copies:
    """From staged blocks that begin at 0 to the target's."""
    layout, layers = conversion.staged, conversion.layers
    copies = plan_copies(conversion.side, target, conversion.tokens, needed, layers)
    if len(layers) == layout.num_layers:
        return copies
    # The plan is of blocks with all layers. No copy goes beyond its block: between two blocks lie
    # layers that are not asked for.
    rows = copies.rows.copy()
    blocks, offsets = np.divmod(rows[:, 0], layout.block_bytes)
    rows[:, 0] = blocks * conversion.block_bytes + offsets - layers.start * layout.layer_bytes
    return Copies(rows)


def check_staging(num_bytes: int, source: KvLayout, target: KvLayout) -> None:
    """Raises LayoutMismatchError when not even one block can be staged."""
    needed = staged_layout(source, target).block_bytes
    if needed > num_bytes:
        raise LayoutMismatchError(
            f"KV in {source.dtype} becomes {target.dtype} in {num_bytes} bytes of staging memory, "
            f"where one block takes {needed}: raise transfer.staging_mib",
            stage="handshake",
        )


def check_dtypes(source: KvLayout, target: KvLayout) -> None:
    """Raises LayoutMismatchError when one dtype cannot become the other."""
    if problem := source.cannot_feed(target):
        raise LayoutMismatchError(f"KV layouts do not match: {problem}", stage="handshake")


def check_feeds(sources: Sequence[KvLayout], staging_bytes: int, target: KvLayout) -> None:
    """Raises LayoutMismatchError when KV of an instance, of which ``sources`` are the ranks, cannot
    go to such a store. ``staging_bytes``: of the rank that has least."""
    check_dtypes(sources[0], target)
    if target.dtype != sources[0].dtype:
        for source in sources:
            check_staging(staging_bytes, source, target)


@lru_cache(maxsize=256)
def staged_layout(source: KvLayout, target: KvLayout) -> KvLayout:
    """How staged blocks lie: the source's heads, in the target's dtype and block size."""
    return replace(source, dtype=target.dtype, block_size=target.block_size)
