"""Whole KV blocks, and the heads of them that another tensor-parallel rank holds, moved about.

Each function takes a store [N, L, 2, G, B, D] or its scales [N, L, 2, G, B], of any dtype.
"""

from __future__ import annotations

import torch


def copy_blocks(kv: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    kv[target] = kv[source]


def gather_blocks(
    kv: torch.Tensor, block_ids: torch.Tensor, first_head: int, num_heads: int
) -> torch.Tensor:
    return kv.narrow(3, first_head, num_heads)[block_ids]


def scatter_blocks(
    staged: torch.Tensor, kv: torch.Tensor, block_ids: torch.Tensor, first_head: int
) -> None:
    kv.narrow(3, first_head, staged.shape[3])[block_ids] = staged
