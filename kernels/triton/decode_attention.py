"""Attention of few query rows per sequence over long paged KV (a decode step): split-KV.

Keys of a sequence are cut into splits that run at the same time, each folding its keys into
(weighted values, log₂ of the weights' sum) of every row; a second kernel merges these, always in
the order of the splits, so equal calls give equal bits (Flash-Decoding; Dao, Haziza, Massa and
Sizov 2023). The grid depends on shapes and on the lengths the host knows, never on what the device
holds, so a captured step may be replayed for other lengths up to those.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
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

# More splits than this never pay: a merge reads one partial result of each.
MAX_SPLITS = 128
# A split's fixed costs (its queries, its first loads, its partial result) are those of reading
# some dozens of keys.
MIN_SPLIT_TOKENS = 256
# Enough programs to fill every multiprocessor with as many as fit (three), and enough beyond that
# for long sequences to even out against short ones.
PROGRAMS_PER_SM = 8
_MERGED_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How one call is cut up."""

    num_splits: int  # a power of two
    min_split_tokens: int  # a multiple of tile_tokens
    tile_tokens: int
    num_warps: int
    num_stages: int


def plan_decode(call: AttentionCall) -> DecodePlan:
    splits = num_splits(call.num_sequences, call.num_kv_heads, call.max_seq_len, call.num_sms)
    return _plan_of(splits, call.d_tile, call.kv.element_size())


def _plan_of(splits: int, d_tile: int, element_bytes: int) -> DecodePlan:
    """By Little's law a multiprocessor needs some 40 KiB on their way to it (36 bytes a nanosecond
    on an H200, about a microsecond under load). Each program has stages − 1 tiles of keys and
    values on their way: 64 KiB, so that three programs fit; of elements of one byte 32 KiB, as
    to unpack those takes registers and time, hence twice the warps and two programs.
    """
    if element_bytes == 1:
        tile_tokens = max(32, min(64, 8192 // d_tile))
        return DecodePlan(splits, MIN_SPLIT_TOKENS, tile_tokens, num_warps=8, num_stages=3)
    tile_tokens = max(16, min(128, 16384 // (d_tile * element_bytes)))
    return DecodePlan(splits, MIN_SPLIT_TOKENS, tile_tokens, num_warps=4, num_stages=3)


def num_splits(num_sequences: int, num_kv_heads: int, max_seq_len: int, num_sms: int) -> int:
    """Into how many splits each sequence's keys are cut at most: a power of two.

    The smallest one with PROGRAMS_PER_SM programs on each multiprocessor, or that cuts the longest
    sequence into splits of MIN_SPLIT_TOKENS; shorter sequences are cut into fewer of that size.
    """
    wanted = triton.cdiv(PROGRAMS_PER_SM * num_sms, max(1, num_sequences * num_kv_heads))
    useful = max(1, max_seq_len // MIN_SPLIT_TOKENS)
    return min(int(triton.next_power_of_2(min(wanted, useful))), MAX_SPLITS)


@triton.jit(do_not_specialize=UNSPECIALISED)
def _decode_kernel(
    q,
    kv,
    kv_scales,
    query_start,
    seq_lens,
    block_table,
    out,
    partial_out,  # [T, H, splits, D] float32
    partial_weight,  # [T, H, splits] float32: log₂
    num_tokens,
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
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFT_CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    kv_head, split, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_token = tl.load(query_start + sequence)
    num_queries = tl.load(query_start + sequence + 1) - first_token
    seq_len = tl.load(seq_lens + sequence)
    rows = tl.arange(0, M)
    dims = tl.arange(0, D_TILE)
    heads = kv_head * GROUP + rows % GROUP
    results = (first_token + rows // GROUP).to(tl.int64) * (G * GROUP) + heads
    inside = rows // GROUP < num_queries
    if SPLITS == 1:
        # Rows of no sequence become zero: they are dealt out to the programs of the sequences.
        tail = tl.load(query_start + tl.num_programs(2)) + sequence
        for token in range(tail, num_tokens, tl.num_programs(2)):
            offsets = (tl.cast(token, tl.int64) * (G * GROUP) + heads)[:, None] * D + dims[None, :]
            zeros = tl.zeros((M, D_TILE), dtype=out.dtype.element_ty)
            tl.store(out + offsets, zeros, mask=(rows < GROUP)[:, None] & (dims < D)[None, :])

    first_position = seq_len - num_queries
    start, seen_start, seen_stop, stop = key_ranges(
        first_position, seq_len - 1, window, TILE, WINDOWED
    )
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(stop - start, SPLITS), TILE) * TILE
        share = tl.maximum(share, MIN_SPLIT)
        start += split * share
        stop = tl.minimum(stop, start + share)
        if start >= stop:
            nothing = tl.full((M,), float("-inf"), dtype=tl.float32)
            tl.store(partial_weight + results * SPLITS + split, nothing, mask=inside)
            return
    if num_queries == 0:
        return

    q_pointers = q + (first_token + rows // GROUP).to(tl.int64) * q_stride + heads * D
    q_tile = tl.load(
        q_pointers[:, None] + dims[None, :], mask=inside[:, None] & (dims < D)[None, :], other=0.0
    )
    attended, weights = attend(
        q_tile.to(tl.float32) if UPCAST else q_tile,
        first_position + tl.minimum(rows // GROUP, num_queries - 1),
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
    stored = inside[:, None] & (dims < D)[None, :]
    if SPLITS > 1:
        parts = results * SPLITS + split
        tl.store(partial_weight + parts, weights, mask=inside)
        tl.store(partial_out + parts[:, None] * D + dims[None, :], attended, mask=stored)
    else:
        attended = attended.to(out.dtype.element_ty)
        tl.store(out + results[:, None] * D + dims[None, :], attended, mask=stored)


@triton.jit(do_not_specialize=["num_sequences"])
def _merge_kernel(
    partial_out,
    partial_weight,
    query_start,
    out,
    num_sequences,
    D: tl.constexpr,
    D_TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    head, token = tl.program_id(0), tl.program_id(1)
    result = token.to(tl.int64) * tl.num_programs(0) + head
    dims = tl.arange(0, D_TILE)
    if token >= tl.load(query_start + num_sequences):  # a row of no sequence
        zeros = tl.zeros((D_TILE,), dtype=out.dtype.element_ty)
        tl.store(out + result * D + dims, zeros, mask=dims < D)
        return
    splits = tl.arange(0, SPLITS)
    weights = tl.load(partial_weight + result * SPLITS + splits)
    top = tl.max(weights, axis=0)
    total = tl.sum(tl.exp2(weights - top), axis=0)
    num_used = tl.max(tl.where(weights > float("-inf"), splits + 1, 0), axis=0)
    acc = tl.zeros((D_TILE,), dtype=tl.float32)
    for first in range(0, num_used, AT_ONCE):
        parts = result * SPLITS + first + tl.arange(0, AT_ONCE)
        shares = tl.exp2(tl.load(partial_weight + parts) - top)
        # What a split that found no keys left behind is not to be read.
        values = tl.load(
            partial_out + parts[:, None] * D + dims[None, :],
            mask=(shares > 0)[:, None] & (dims < D)[None, :],
            other=0.0,
        )
        acc += tl.sum(shares[:, None] * values, axis=0)
    tl.store(out + result * D + dims, (acc / total).to(out.dtype.element_ty), mask=dims < D)


def decode_attention(call: AttentionCall, plan: DecodePlan | None = None) -> None:
    """Writes ``call.out``; any number of query rows a sequence is right, few are fast."""
    plan = plan or plan_decode(call)
    splits, num_heads = plan.num_splits, call.q.shape[1]
    partial_out = partial_weight = None
    if splits > 1:
        shape = (call.num_tokens, num_heads, splits)
        partial_out = call.q.new_empty((*shape, call.head_dim), dtype=torch.float32)
        partial_weight = call.q.new_empty(shape, dtype=torch.float32)
    _decode_kernel[(call.num_kv_heads, splits, call.num_sequences)](
        **call.launch_arguments(),
        partial_out=partial_out,
        partial_weight=partial_weight,
        M=max(16, triton.next_power_of_2(call.max_query_len * call.group_size)),
        TILE=plan.tile_tokens,
        SPLITS=splits,
        MIN_SPLIT=plan.min_split_tokens,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    if splits > 1:
        _merge_kernel[(num_heads, call.num_tokens)](
            partial_out,
            partial_weight,
            call.query_start,
            call.out,
            call.num_sequences,
            D=call.head_dim,
            D_TILE=call.d_tile,
            SPLITS=splits,
            AT_ONCE=min(splits, _MERGED_AT_ONCE),
            num_warps=4,
        )


def _decode_case(form: CallForm, splits: int, targets: tuple[int, ...]) -> CompileCase:
    plan = _plan_of(splits, d_tile_of(form.head_dim), form.kv_bytes)
    partial = ("partial_out", "partial_weight")
    return CompileCase(
        label=f"decode-{form.label}-{splits}",
        kernel=_decode_kernel,
        types=form.types() | (dict.fromkeys(partial, "*fp32") if splits > 1 else {}),
        constants={
            **form.constants(),
            **({} if splits > 1 else dict.fromkeys(partial)),
            "M": 16,
            "TILE": plan.tile_tokens,
            "SPLITS": splits,
            "MIN_SPLIT": plan.min_split_tokens,
        },
        aligned=ALIGNED,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        targets=targets,
    )


def _merge_case(head_dim: int, splits: int) -> CompileCase:
    return CompileCase(
        label=f"merge-{head_dim}-{splits}",
        kernel=_merge_kernel,
        types={
            **dict.fromkeys(("partial_out", "partial_weight"), "*fp32"),
            "query_start": "*i32",
            "out": "*bf16",
            "num_sequences": "i32",
        },
        constants={
            "D": head_dim,
            "D_TILE": d_tile_of(head_dim),
            "SPLITS": splits,
            "AT_ONCE": min(splits, _MERGED_AT_ONCE),
        },
        num_warps=4,
    )


COMPILE_CASES = (
    _decode_case(CallForm(128), 8, TARGETS),
    _decode_case(CallForm(64, group_size=3), 1, (SM_90,)),
    _decode_case(CallForm(80, group_size=1, is_windowed=True, has_soft_cap=True), 8, (SM_90,)),
    _decode_case(CallForm(256), 8, (SM_90,)),
    _decode_case(CallForm(128, "i8"), 8, (SM_90,)),
    _decode_case(CallForm(128, "u8"), 8, TARGETS),
    _merge_case(128, 128),
)
