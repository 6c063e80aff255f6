"""Which bytes go where: pure functions from layouts and block ids to copies.

::

    source blocks   7  8  9  3        offsets in the two stores, block_bytes apart
    target blocks   0  1  2  5
    copies         [7 8 9 → 0 1 2] [3 → 5]      neighbours on both sides become one copy

A plan belongs to one pair of ranks and depends on nothing but its arguments. What the two layouts
may differ in is decided here alone: callers pass both and never compare them themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.common.errors import LayoutMismatchError
from isthmus.common.ids import BlockId
from isthmus.common.kv_layout import KvLayout
from isthmus.kvtransfer.interface import CopyOp


def check_plannable(here: KvLayout, there: KvLayout) -> None:
    """Raises LayoutMismatchError, naming every differing field, when no plan joins the two."""
    differing = [here.difference(there)] if here.difference(there) else []
    differing += [
        f"{name}: {ours} here, {theirs} there"
        for name, ours, theirs in (
            ("tp_size", here.tp_size, there.tp_size),
            ("tp_rank", here.tp_rank, there.tp_rank),
        )
        if ours != theirs
    ]
    if differing:
        raise LayoutMismatchError(
            f"KV layouts do not match: {', '.join(differing)}", stage="handshake"
        )


def plan_copies(
    source: KvLayout,
    target: KvLayout,
    source_block_ids: Sequence[BlockId],
    target_block_ids: Sequence[BlockId],
) -> tuple[CopyOp, ...]:
    """Copies that bring ``source_block_ids[i]`` to ``target_block_ids[i]``, all layers.

    Order is kept; neighbouring pairs are joined. Raises LayoutMismatchError as check_plannable does
    and ValueError when the two lists differ in length.
    """
    check_plannable(source, target)
    block_bytes = source.block_bytes
    copies: list[CopyOp] = []
    for first, length in _runs(source_block_ids, target_block_ids):
        copies.append(
            CopyOp(
                source_offset=source_block_ids[first] * block_bytes,
                target_offset=target_block_ids[first] * block_bytes,
                num_bytes=length * block_bytes,
            )
        )
    return tuple(copies)


def _runs(source: Sequence[BlockId], target: Sequence[BlockId]) -> list[tuple[int, int]]:
    """(first index, length) of the longest stretches that are consecutive on both sides."""
    runs: list[tuple[int, int]] = []
    start = 0
    for index, pair in enumerate(zip(source, target, strict=True)):
        joins = index > start and pair == (source[index - 1] + 1, target[index - 1] + 1)
        if not joins and index > start:
            runs.append((start, index - start))
            start = index
    if source:
        runs.append((start, len(source) - start))
    return runs
