"""What decode and prefill attention share: a tile of query rows folded over a range of keys.

Rows of a tile are (query, head) pairs of one KV head, head fastest, so that keys and values are
read once for all query heads that share them. Keys are read ``TILE`` at a time from as many blocks
as that takes. Scores live in units of log₂, where the exponential is one instruction.

The keys that a tile of rows sees fall into three ranges, whose bounds are multiples of TILE except
the last: those that the sliding window hides from some rows, those that every row sees, and those
that causality hides from some rows. Only the outer two need masks, so the long middle has none.
The algorithm is the online softmax of FlashAttention-2 (Dao 2023, arXiv 2307.08691, section 3.1).
"""

from __future__ import annotations

import triton
import triton.language as tl

from isthmus.kernels.triton.quant import unpack

LOG2_E = tl.constexpr(1.4426950408889634)
# Finite, so that a row that sees nothing of a range computes no NaN: what it gathers there has this
# weight, which is 0 beside any real score.
MASKED_SCORE = tl.constexpr(-1.0e30)


@triton.jit
def key_ranges(first_position, last_position, window, TILE: tl.constexpr, WINDOWED: tl.constexpr):
    """Bounds (start, seen_start, seen_stop, stop) of the ranges for rows at these positions."""
    stop = last_position + 1
    seen_stop = (first_position + 1) // TILE * TILE
    if WINDOWED:
        start = tl.maximum(first_position + 1 - window, 0) // TILE * TILE
        seen_start = tl.cdiv(tl.maximum(last_position + 1 - window, 0), TILE) * TILE
        seen_start = tl.minimum(seen_start, seen_stop)
    else:
        start = 0
        seen_start = 0
    return start, seen_start, seen_stop, stop


@triton.jit
def attend(
    q,
    positions,
    first_seen,
    start,
    seen_start,
    seen_stop,
    stop,
    kv,
    kv_scales,
    table,
    block_stride,
    scale_block_stride,
    score_scale,
    inner_scale,
    window,
    G: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    D_TILE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFT_CAPPED: tl.constexpr,
):
    """Attention over keys start … stop − 1, which may be any part of the three ranges.

    Arguments as of ``fold_keys``. Returns (attended [M, D_TILE] float32, log₂ of the sum of the
    keys' weights [M] float32).
    """
    acc = tl.zeros(q.shape, dtype=tl.float32)
    row_max = tl.full((q.shape[0],), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((q.shape[0],), dtype=tl.float32)
    for part in tl.static_range(3):
        if WINDOWED or part > 0:
            part_start, part_stop = start, stop
            if part == 0:
                part_stop = tl.minimum(stop, seen_start)
            elif part == 1:
                part_start = tl.maximum(start, seen_start)
                part_stop = tl.minimum(stop, seen_stop)
            else:
                part_start = tl.maximum(start, seen_stop)
            acc, row_max, row_sum = fold_keys(
                q,
                acc,
                row_max,
                row_sum,
                positions,
                first_seen,
                part_start,
                part_stop,
                kv,
                kv_scales,
                table,
                block_stride,
                scale_block_stride,
                score_scale,
                inner_scale,
                window,
                G,
                B,
                D,
                D_TILE,
                TILE,
                WINDOWED,
                SOFT_CAPPED,
                part != 1,
            )
    return acc / row_sum[:, None], row_max + tl.log2(row_sum)


@triton.jit
def fold_keys(
    q,  # [M, D_TILE], of the dtype to compute products in
    acc,  # [M, D_TILE] float32
    row_max,  # [M] float32
    row_sum,  # [M] float32
    positions,  # [M] int32: what each row sees ends here
    first_seen,  # of any row, with a window
    start,
    stop,
    kv,  # at the layer's keys of the KV head
    kv_scales,  # likewise
    table,  # at the sequence's first block
    block_stride,
    scale_block_stride,
    score_scale,  # of the products; with a soft cap of what tanh makes of them
    inner_scale,  # of the products where there is a soft cap
    window,
    G: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    D_TILE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFT_CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Folds keys start … stop − 1 into the running softmax; ``start`` is a multiple of TILE."""
    dims = tl.arange(0, D_TILE)
    # Block ids are loaded a tile ahead and as plain numbers. So they are there when the loads that
    # need them are issued, and the compiler does not take them into its pipeline, where they would
    # cost the keys and values every other stage.
    next_blocks = load_blocks(table, start, stop, first_seen, B, TILE, WINDOWED)
    for tile_start in range(start, stop, TILE):
        tokens = tile_start + tl.arange(0, TILE)
        live = tokens < stop
        if WINDOWED:
            live = live & (tokens >= first_seen)
        blocks = block_of_each(next_blocks, tile_start, B, TILE)
        next_blocks = load_blocks(table, tile_start + TILE, stop, first_seen, B, TILE, WINDOWED)
        # Keys that no row sees may be anything, NaN included: their scores are replaced. Their
        # values must be blanked, since 0 · NaN is NaN.
        rows = blocks * block_stride + (tokens % B) * D
        keys = load_tile(kv + rows[None, :] + dims[:, None], (dims < D)[:, None], D != D_TILE)
        scores = tl.dot(q, unpack(keys, q.dtype), input_precision="ieee")
        if kv_scales is not None:
            scale_pointers = kv_scales + blocks * scale_block_stride + tokens % B
            scores *= load_tile(scale_pointers, live, MASKED)[None, :]
        if SOFT_CAPPED:
            # tanh(x) is 1 − 2 / (e²ˣ + 1), which holds for an infinite e²ˣ too.
            scores = 1.0 - 2.0 / (tl.exp2(scores * inner_scale) + 1.0)
        if MASKED:
            visible = (tokens[None, :] <= positions[:, None]) & live[None, :]
            if WINDOWED:
                visible = visible & (positions[:, None] - tokens[None, :] < window)
            scores = tl.where(visible, scores, MASKED_SCORE)
        new_max = tl.maximum(row_max, tl.max(scores, axis=1) * score_scale)
        weights = tl.exp2(scores * score_scale - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, axis=1)
        row_max = new_max
        if kv_scales is not None:
            weights *= load_tile(scale_pointers + G * B, live, MASKED)[None, :]
        value_pointers = kv + G * B * D + rows[:, None] + dims[None, :]
        if MASKED:
            values = tl.load(value_pointers, mask=live[:, None] & (dims < D)[None, :], other=0)
        else:
            values = load_tile(value_pointers, (dims < D)[None, :], D != D_TILE)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(q.dtype), unpack(values, q.dtype), acc, input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit
def load_blocks(
    table,
    tile_start,
    stop,
    first_seen,
    B: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Ids of the blocks that a tile of tokens touches, each a number of its own; 0 if not seen."""
    NUM_BLOCKS: tl.constexpr = (TILE + B - 1) // B + (TILE % B != 0 and B % TILE != 0)
    blocks = ()
    for index in tl.static_range(NUM_BLOCKS):
        block = tile_start // B + index
        live = block * B < stop
        if WINDOWED:
            live = live & ((block + 1) * B > first_seen)
        block_id = tl.load(table + block, mask=live, other=0)
        blocks = blocks + (block_id,)  # type: ignore[assignment]  # noqa: RUF005 - all Triton knows
    return blocks


@triton.jit
def block_of_each(blocks, tile_start, B: tl.constexpr, TILE: tl.constexpr):
    """The block of each token of a tile, of those that ``load_blocks`` has loaded: int64 [TILE]."""
    NUM_BLOCKS: tl.constexpr = (TILE + B - 1) // B + (TILE % B != 0 and B % TILE != 0)
    offsets = tl.arange(0, TILE)
    if TILE % B != 0:
        offsets += tile_start % B
    each = tl.full((TILE,), 0, dtype=tl.int32) + blocks[0]
    for index in tl.static_range(1, NUM_BLOCKS):
        each = tl.where(offsets >= index * B, blocks[index], each)
    return each.to(tl.int64)


@triton.jit
def load_tile(pointers, inside, CHECKED: tl.constexpr):
    """What lies there; zeros outside, where there is an outside at all."""
    if CHECKED:
        return tl.load(pointers, mask=inside, other=0)
    return tl.load(pointers)
