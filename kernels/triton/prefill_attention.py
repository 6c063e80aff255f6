"""Attention of chunks of many query rows over a paged prefix and the chunk itself.

A program takes a tile of the queries of one sequence, with all query heads of one KV head, and all
keys that they see. How many tiles each sequence has is known to the device alone: there are as many
programs as any division of T rows among S sequences can need, and each finds its sequence by
bisection. Those with the most keys start first, so that the short ones fill the gaps at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from isthmus.kernels.triton.attention_call import (
    ALIGNED,
    UNSPECIALISED,
    AttentionCall,
    CallForm,
    d_tile_of,
)
from isthmus.kernels.triton.attention_tile import attend, key_ranges
from isthmus.kernels.triton.compilation import SM_90, TARGETS, CompileCase


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The shape of a tile and how it is run."""

    rows: int  # a power of two, at least the heads that share a KV head
    tile_tokens: int
    num_warps: int
    num_stages: int


def plan_prefill(call: AttentionCall) -> PrefillPlan:
    return _plan_of(call.d_tile, call.group_size, call.q.element_size())


def _plan_of(d_tile: int, group_size: int, element_bytes: int) -> PrefillPlan:
    """128 rows: each byte of keys and values serves 128 operations, so 400 TFLOP/s ask 3.1 TB/s of
    the L2 cache, which gives some 5.5 (H200).

    A row's sums and scores are spread over the registers of its warps: eight warps hold 128 rows of
    128 + 64 numbers in 96 registers a thread. Wider heads get fewer rows and shorter tiles, and so
    does float32, which the matrix units do not multiply.
    """
    if d_tile <= 128 and element_bytes <= 2:
        return PrefillPlan(max(128, triton.next_power_of_2(group_size)), 64, 8, num_stages=3)
    return PrefillPlan(max(64, triton.next_power_of_2(group_size)), 32, 8, num_stages=2)


@triton.jit
def _find_sequence(query_start, num_sequences, tile, QUERIES: tl.constexpr):
    """The sequence of a tile, when tiles of sequence s start at query_start[s] // QUERIES + s.

    Between two of these starts there is room for all tiles of a sequence, whatever its length.
    """
    low, high = 0, num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=[*UNSPECIALISED, "num_sequences"])
def _prefill_kernel(
    q,
    kv,
    kv_scales,
    query_start,
    seq_lens,
    block_table,
    out,
    num_tokens,
    num_sequences,
    q_stride,
    block_stride,
    scale_block_stride,
    table_stride,
    score_scale,
    inner_scale,
    window,
    GROUP: tl.constexpr,
    G: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    D_TILE: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFT_CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    QUERIES: tl.constexpr = M // GROUP
    kv_head = tl.program_id(1)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence = _find_sequence(query_start, num_sequences, tile, QUERIES)
    chunk_start = tl.load(query_start + sequence)
    chunk_stop = tl.load(query_start + sequence + 1)
    first_token = chunk_start + (tile - chunk_start // QUERIES - sequence) * QUERIES
    rows = tl.arange(0, M)
    dims = tl.arange(0, D_TILE)
    heads = kv_head * GROUP + rows % GROUP
    tokens = first_token + rows // GROUP
    inside = (tokens < chunk_stop) & (rows < QUERIES * GROUP)
    # The tiles of the last sequence reach over the rows of no sequence, which become zero.
    limit = chunk_stop
    if sequence == num_sequences - 1:
        limit = num_tokens
    results = (tokens.to(tl.int64) * (G * GROUP) + heads)[:, None] * D + dims[None, :]
    stored = ((tokens < limit) & (rows < QUERIES * GROUP))[:, None] & (dims < D)[None, :]
    if first_token >= chunk_stop:
        zeros = tl.zeros((M, D_TILE), dtype=out.dtype.element_ty)
        tl.store(out + results, zeros, mask=stored)
        return

    seq_len = tl.load(seq_lens + sequence)
    first_position = seq_len - (chunk_stop - first_token)
    last_position = tl.minimum(first_position + QUERIES, seq_len) - 1
    q_pointers = q + tokens.to(tl.int64) * q_stride + heads * D
    q_tile = tl.load(
        q_pointers[:, None] + dims[None, :], mask=inside[:, None] & (dims < D)[None, :], other=0.0
    )
    start, seen_start, seen_stop, stop = key_ranges(
        first_position, last_position, window, TILE, WINDOWED
    )
    attended, _ = attend(
        q_tile.to(tl.float32) if UPCAST else q_tile,
        tl.minimum(first_position + rows // GROUP, last_position),
        tl.maximum(first_position + 1 - window, 0),
        start,
        seen_start,
        seen_stop,
        stop,
        kv + kv_head * (B * D),
        kv_scales + kv_head * B if kv_scales is not None else None,
        block_table + sequence.to(tl.int64) * table_stride,
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
    )
    attended = tl.where(inside[:, None], attended, 0.0).to(out.dtype.element_ty)
    tl.store(out + results, attended, mask=stored)


def prefill_attention(call: AttentionCall, plan: PrefillPlan | None = None) -> None:
    """Writes ``call.out``."""
    plan = plan or plan_prefill(call)
    num_tiles = call.num_tokens // (plan.rows // call.group_size) + call.num_sequences
    _prefill_kernel[(num_tiles, call.num_kv_heads)](
        **call.launch_arguments(),
        num_sequences=call.num_sequences,
        M=plan.rows,
        TILE=plan.tile_tokens,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )


def _prefill_case(form: CallForm, targets: tuple[int, ...]) -> CompileCase:
    plan = _plan_of(d_tile_of(form.head_dim), form.group_size, 2)
    return CompileCase(
        label=f"prefill-{form.label}",
        kernel=_prefill_kernel,
        types=form.types() | {"num_sequences": "i32"},
        constants={**form.constants(), "M": plan.rows, "TILE": plan.tile_tokens},
        aligned=ALIGNED,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        targets=targets,
    )


COMPILE_CASES = (
    _prefill_case(CallForm(128), TARGETS),
    _prefill_case(CallForm(64, group_size=3), (SM_90,)),
    _prefill_case(CallForm(80, group_size=1, is_windowed=True, has_soft_cap=True), (SM_90,)),
    _prefill_case(CallForm(256), (SM_90,)),
    _prefill_case(CallForm(128, "i8"), (SM_90,)),
)
