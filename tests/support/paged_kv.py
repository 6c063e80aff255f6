"""Builds paged KV stores and attention calls of random content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PagedCase:
    """Sequences whose last ``query_lens`` tokens are to be attended, over one shared KV store.

    Slots that belong to no sequence hold NaN, so that reading one shows.
    """

    q: torch.Tensor  # [T, H, D] float32
    kv: torch.Tensor  # [N, L, 2, G, B, D]
    layer: int
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    scale: float

    def args(self) -> tuple[object, ...]:
        return (
            *(self.q, self.kv, self.layer, self.query_start, self.seq_lens, self.block_table),
            self.scale,
        )


def paged_case(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    num_heads: int = 9,
    num_kv_heads: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    num_layers: int = 2,
    seed: int = 0,
) -> PagedCase:
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(needed) + 1
    order = torch.randperm(num_blocks - 1, generator=generator) + 1
    kv = torch.full((num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim), torch.nan)
    block_table = torch.zeros(len(seq_lens), max(needed, default=0), dtype=torch.int32)
    layer = num_layers - 1
    used = 0
    for index, length in enumerate(seq_lens):
        blocks = order[used : used + needed[index]]
        used += needed[index]
        block_table[index, : len(blocks)] = blocks.int()
        slots = torch.arange(length)
        kv[blocks[slots // block_size], layer, :, :, slots % block_size] = torch.randn(
            length, 2, num_kv_heads, head_dim, generator=generator
        )
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    q = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    return PagedCase(q, kv.to(dtype), layer, starts, lengths, block_table, head_dim**-0.5)
