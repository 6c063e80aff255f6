"""The same attention by torch, over keys and values that lie side by side.

None of these reads paged blocks, so their keys and values are given to them as they like them.
"""

from __future__ import annotations

import torch

from benchmarks.gpu.timing import Action

Shape = tuple[int, int, int, int]  # sequences, KV heads, keys, head size


def _heads_first(q: torch.Tensor, shape: Shape) -> torch.Tensor:
    """[T, H, D] → [S, H, T / S, D]."""
    sequences = shape[0]
    return q.view(sequences, -1, *q.shape[1:]).transpose(1, 2)


def _keys_values(q: torch.Tensor, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.randn(shape, device=q.device, dtype=q.dtype)
    return keys, torch.randn_like(keys)


def sdpa_decode(q: torch.Tensor, shape: Shape, scale: float) -> Action:
    return _sdpa(q, shape, scale, is_causal=False)


def sdpa_prefill(q: torch.Tensor, shape: Shape, scale: float) -> Action:
    return _sdpa(q, shape, scale, is_causal=True)


def _sdpa(q: torch.Tensor, shape: Shape, scale: float, *, is_causal: bool) -> Action:
    queries = _heads_first(q, shape)
    keys, values = _keys_values(q, shape)
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(queries, keys, values, is_causal=is_causal, scale=scale, enable_gqa=True)


def flex_decode(q: torch.Tensor, shape: Shape, scale: float) -> Action:
    return _flex(q, shape, scale, is_causal=False)


def flex_prefill(q: torch.Tensor, shape: Shape, scale: float) -> Action:
    return _flex(q, shape, scale, is_causal=True)


def _flex(q: torch.Tensor, shape: Shape, scale: float, *, is_causal: bool) -> Action:
    """Compiled, as its authors have it used; tens of seconds for the first call."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if q.device.type == "cpu":
        raise RuntimeError("compiled for a GPU only")
    queries = _heads_first(q, shape)
    keys, values = _keys_values(q, shape)
    mask = None
    if is_causal:

        def causal(
            _batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
        ) -> torch.Tensor:
            return query >= key

        length = shape[2]
        mask = create_block_mask(causal, None, None, length, length, device=str(q.device))
    compiled = torch.compile(flex_attention)
    return lambda: compiled(queries, keys, values, block_mask=mask, scale=scale, enable_gqa=True)
