"""Which bytes go where: pure functions from layouts, block ids and token ranges to copies.

::

    tokens of the sequence      0        16        32        48        64
    source, blocks of 16        │   7    │    8    │    9    │    3    │
    target, blocks of 32        │        0         │         5         │
    one piece each              [7 → 0…] [8 → …0]  [9 → 5…]  [3 → …5]

A piece is a run of tokens that lie in one block on either side; one copy moves the widest part of
a block in which it is contiguous on both sides: the whole block where blocks and heads are alike,
the K or V of the shared heads of one layer where only the heads differ, one head's tokens where the
blocks differ. Neighbours on both sides become one copy.

A plan belongs to one pair of ranks and depends on nothing but its arguments. What the two layouts
may differ in is decided here alone: callers pass both and never compare them themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from isthmus.common.errors import LayoutMismatchError
from isthmus.common.ids import BlockId
from isthmus.common.kv_layout import KvLayout, head_ranges
from isthmus.kvtransfer.copies import Copies, Rows, joined

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Side:
    """Blocks of one rank. ``first_token`` is the position of the first token of ``block_ids[0]``, a
    multiple of the block size; the blocks hold consecutive tokens."""

    layout: KvLayout
    block_ids: Sequence[BlockId]
    first_token: int = 0


class _Grain(Enum):
    """What one copy takes of a block, before neighbours are joined."""

    BLOCK = "block"
    LAYER = "layer"
    PLANE = "plane"  # the K, or the V, or the latents of one layer, or the scales of one of these
    HEAD = "head"


def check_plannable(here: KvLayout, there: KvLayout) -> None:
    """Raises LayoutMismatchError, naming both values of what differs, when no plan joins them.

    That one dtype becomes the other is not a matter of plans: see ``conversion``."""
    if difference := here.difference(there):
        raise LayoutMismatchError(f"KV layouts do not match: {difference}", stage="handshake")
    for where, layout in (("here", here), ("there", there)):
        if problem := layout.problem:
            raise LayoutMismatchError(f"KV layout {where}: {problem}", stage="handshake")


def blocks_of(tokens: range, block_size: int) -> range:
    """Indices of the blocks that hold ``tokens``."""
    return range(tokens.start // block_size, -(-tokens.stop // block_size))


def shared_heads(source: KvLayout, target: KvLayout) -> range:
    """The model's KV heads that ``source``'s rank sends to ``target``'s: every head of a target
    rank comes from exactly one source rank. Ranks with copies of one head take turns at those
    target ranks that want it."""
    ours, theirs = source.heads, target.heads
    shared = range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
    copies = source.tp_size // source.model_kv_heads
    if copies < 2 or not shared:
        return shared
    earlier = head_ranges(target.model_kv_heads, target.tp_size)[: target.tp_rank]
    turn = sum(shared.start in heads for heads in earlier)
    return shared if source.tp_rank % copies == turn % copies else range(0)


def first_needed(layout: KvLayout, num_tokens: int) -> Tokens:
    """[L]: the first token of a prompt of ``num_tokens`` that a layer still looks at from the
    next position on: the first of all without a window."""
    return np.array(layout.first_needed(num_tokens), dtype=np.int64)


def needed_from(
    layout: KvLayout, num_tokens: int, first_token: int, target_block_size: int
) -> Tokens | None:
    """``first_needed``, or None where that leaves out no whole target block from ``first_token``
    on."""
    needed = layout.first_needed(num_tokens)
    is_partial = max(needed, default=0) // target_block_size * target_block_size > first_token
    return np.array(needed, dtype=np.int64) if is_partial else None


def plan_copies(
    source: Side,
    target: Side,
    tokens: range,
    needed_from: Tokens | None = None,
    layers: range | None = None,
) -> Copies:
    """Copies that bring the KV of ``tokens`` in ``layers`` (None = all) from ``source`` to
    ``target``, in token order.

    Tokens of the target before ``tokens`` are not touched; what the slots behind them in the last
    block hold afterwards is undefined. ``needed_from`` [L] (see ``first_needed``): for a layer of
    which a target block holds only earlier tokens the block is not moved.

    Raises LayoutMismatchError as check_plannable does, and ValueError when a side's blocks do not
    hold the tokens or a layer is not there.
    """
    layers = _checked_layers(target.layout, layers)
    heads = _planned_heads(source.layout, target.layout)
    _check_holds(source, tokens)
    _check_holds(target, tokens)
    if not tokens or not heads:
        return joined(*np.empty((3, 0), dtype=np.int64))
    size = target.layout.block_size
    is_alike = source.layout.block_size == size and tokens.start % size == 0
    grain = _grain(source.layout, target.layout, heads, is_alike, needed_from is not None)
    if grain is _Grain.BLOCK:
        return _whole_blocks(source, target, blocks_of(tokens, size), layers)
    starts, lengths = _block_starts(tokens, size) if is_alike else pieces(source, target, tokens)
    columns = [_offsets(side, starts, heads, grain, layers) for side in (source, target)]
    # Both [P, L, K]; the third is broadcast to that.
    columns.append(np.broadcast_to(_sizes(target, lengths, heads, grain), columns[0].shape))
    if needed_from is not None:
        block_ends = (starts // size + 1) * size
        moves = block_ends[:, None] > needed_from[layers.start : layers.stop]  # [P, L]
        columns = [column[moves] for column in columns]
    return joined(*(column.ravel() for column in columns))


@lru_cache(maxsize=256)  # layouts of a pair do not change from chunk to chunk
def _planned_heads(source: KvLayout, target: KvLayout) -> range:
    check_plannable(source, target)
    if source.dtype != target.dtype:
        raise LayoutMismatchError(
            f"copies convert nothing: KV in {source.dtype} here, in {target.dtype} there",
            stage="transfer",
        )
    return shared_heads(source, target)


def _check_holds(side: Side, tokens: range) -> None:
    size = side.layout.block_size
    end = side.first_token + len(side.block_ids) * size
    if side.first_token % size or tokens.start < side.first_token or tokens.stop > end:
        raise ValueError(
            f"blocks of tokens [{side.first_token}, {end}) do not hold "
            f"[{tokens.start}, {tokens.stop})"
        )


def _checked_layers(layout: KvLayout, layers: range | None) -> range:
    if layers is None:
        return range(layout.num_layers)
    if layers.step != 1 or not 0 <= layers.start < layers.stop <= layout.num_layers:
        raise ValueError(f"{layers} of {layout.num_layers} layers")
    return layers


def _whole_blocks(source: Side, target: Side, blocks: range, layers: range) -> Copies:
    """Both sides' blocks are alike: pieces and parts need not be looked at. Neighbouring layers of
    a block lie side by side."""
    block_bytes, layer_bytes = source.layout.block_bytes, source.layout.layer_bytes
    first = layers.start * layer_bytes
    sizes = np.full(len(blocks), len(layers) * layer_bytes, dtype=np.int64)
    source_ids, target_ids = _ids_of(source, blocks), _ids_of(target, blocks)
    return joined(source_ids * block_bytes + first, target_ids * block_bytes + first, sizes)


def _ids_of(side: Side, blocks: range) -> Rows:
    """``blocks`` are indices in the sequence."""
    first = side.first_token // side.layout.block_size
    return np.array(side.block_ids[blocks.start - first : blocks.stop - first], dtype=np.int64)


def _block_starts(tokens: range, size: int) -> tuple[Tokens, Tokens]:
    starts = np.arange(tokens.start, tokens.stop, size, dtype=np.int64)
    return starts, np.full_like(starts, size)


def pieces(source: Side, target: Side, tokens: range) -> tuple[Tokens, Tokens]:
    """(first token, tokens) of the runs that lie in one block on either side."""
    borders = [np.array([tokens.start], dtype=np.int64)]
    for size in {source.layout.block_size, target.layout.block_size}:
        first = (tokens.start // size + 1) * size
        borders.append(np.arange(first, tokens.stop, size, dtype=np.int64))
    starts = np.unique(np.concatenate(borders))
    return starts, np.diff(starts, append=tokens.stop)


def _grain(
    source: KvLayout, target: KvLayout, heads: range, is_alike: bool, is_by_layer: bool
) -> _Grain:
    if not is_alike:
        return _Grain.HEAD
    if not len(heads) == source.num_kv_heads == target.num_kv_heads:
        return _Grain.PLANE
    return _Grain.LAYER if is_by_layer else _Grain.BLOCK


def _offsets(side: Side, starts: Tokens, heads: range, grain: _Grain, layers: range) -> Rows:
    """[P, L, K]: where each copy of each piece begins in the side's store; K is 1 where one copy
    takes all of a layer."""
    layout, size = side.layout, side.layout.block_size
    blocks = np.asarray(side.block_ids, dtype=np.int64)[(starts - side.first_token) // size]
    parts = _parts(layout, heads, grain, layers)
    begins = blocks[:, None, None] * layout.block_bytes + parts
    if grain is not _Grain.HEAD:  # only a head's tokens may begin within a block
        return begins
    return begins + (starts % size)[:, None, None] * _vector_bytes(layout, heads, grain)


def _parts(layout: KvLayout, heads: range, grain: _Grain, layers: range) -> Rows:
    """[L, K]: offsets within a block, for grains below BLOCK; L are the layers asked for."""
    firsts = np.array(layers, dtype=np.int64)[:, None] * layout.layer_bytes
    if grain is _Grain.LAYER:
        return firsts
    own = np.arange(heads.start, heads.stop if grain is _Grain.HEAD else heads.start + 1)
    slots = (own - layout.heads.start) * layout.block_size
    in_layer = [plane.offset + slots * plane.vector_bytes for plane in layout.planes]
    return firsts + np.concatenate(in_layer)


def _sizes(target: Side, lengths: Tokens, heads: range, grain: _Grain) -> Rows:
    """[P, 1, K]: bytes of each copy of each piece."""
    layout = target.layout
    if grain is _Grain.LAYER:
        return np.full((len(lengths), 1, 1), layout.layer_bytes, dtype=np.int64)
    vector_bytes = _vector_bytes(layout, heads, grain)
    if grain is _Grain.HEAD:
        return lengths[:, None, None] * vector_bytes
    return np.broadcast_to(
        len(heads) * layout.block_size * vector_bytes, (len(lengths), 1, len(vector_bytes))
    )


def _vector_bytes(layout: KvLayout, heads: range, grain: _Grain) -> Rows:
    """[K]: of the plane of each part of a layer."""
    per_plane = len(heads) if grain is _Grain.HEAD else 1
    sizes = np.array([plane.vector_bytes for plane in layout.planes], dtype=np.int64)
    return np.repeat(sizes, per_plane)
