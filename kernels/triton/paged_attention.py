"""Attention over paged KV: chooses the kernel that splits keys or the one that tiles queries."""

from __future__ import annotations

import torch

from isthmus.kernels.triton.attention_call import AttentionCall
from isthmus.kernels.triton.decode_attention import decode_attention
from isthmus.kernels.triton.prefill_attention import prefill_attention

# Rows (queries × heads of one KV head) up to which splitting the keys beats tiling the queries.
MAX_DECODE_ROWS = 64


def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
    *,
    soft_cap: float | None = None,
    kv_scales: torch.Tensor | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
) -> torch.Tensor:
    num_tokens, num_heads, head_dim = q.shape
    if num_tokens == 0 or seq_lens.shape[0] == 0:
        return q.new_zeros(num_tokens, num_heads * head_dim)
    if max_query_len is None:
        max_query_len = int(query_start.diff().max())
    if max_seq_len is None:
        max_seq_len = int(seq_lens.max())
    call = AttentionCall(
        q=q,
        kv=kv,
        layer=layer,
        query_start=query_start,
        seq_lens=seq_lens,
        block_table=block_table,
        out=q.new_empty(num_tokens, num_heads * head_dim),
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        kv_scales=kv_scales,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
    )
    if max_query_len == 1 or max_query_len * call.group_size <= MAX_DECODE_ROWS:
        decode_attention(call)
    else:
        prefill_attention(call)
    return call.out
