"""Rotary embedding with the KV write, and attention over paged KV."""

from __future__ import annotations

import torch

from isthmus.kernels.reference.quant import quantise_kv


def rope_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    slot_mapping: torch.Tensor,
    *,
    kv_scales: torch.Tensor | None = None,
) -> None:
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # each [T, 1, D/2]
    _rotate(q, cos, sin)
    _rotate(k, cos, sin)
    block_size = kv.shape[4]
    written = slot_mapping >= 0
    blocks = slot_mapping[written] // block_size
    offsets = slot_mapping[written] % block_size
    for side, vectors in enumerate((k[written], v[written])):
        if kv_scales is None:
            kv[blocks, layer, side, :, offsets] = vectors.to(kv.dtype)
        else:
            quantised, scales = quantise_kv(vectors, kv.dtype)
            kv[blocks, layer, side, :, offsets] = quantised
            kv_scales[blocks, layer, side, :, offsets] = scales


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    first, second = x.float().chunk(2, dim=-1)
    x.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


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
    max_query_len: int | None = None,  # noqa: ARG001 - of use to a device only
    max_seq_len: int | None = None,  # noqa: ARG001
) -> torch.Tensor:
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[3], kv.shape[4]
    out = torch.zeros(num_tokens, num_heads, head_dim, dtype=q.dtype, device=q.device)
    starts = query_start.tolist()
    for index, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[index], starts[index + 1])
        num_blocks = -(-seq_len // block_size)
        blocks = block_table[index, :num_blocks].long()
        keys_values = kv[blocks, layer].float()  # [blocks, 2, G, B, D]
        if kv_scales is not None:
            keys_values *= kv_scales[blocks, layer].unsqueeze(-1)
        keys_values = keys_values.permute(1, 2, 0, 3, 4).reshape(2, num_kv_heads, -1, head_dim)
        keys, values = keys_values[:, :, :seq_len].repeat_interleave(
            num_heads // num_kv_heads, dim=1
        )
        visible = _visible(rows.stop - rows.start, seq_len, sliding_window, q.device)
        # A key out of sight may be garbage, and 0 · NaN is NaN: blank it before the product.
        seen = visible.any(dim=0)
        values = values.masked_fill(~seen[None, :, None], 0.0)
        scores = torch.einsum("thd,hkd->htk", q[rows].float(), keys) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        out[rows] = torch.einsum("htk,hkd->thd", weights, values).to(q.dtype)
    return out.view(num_tokens, num_heads * head_dim)


def _visible(
    num_queries: int, seq_len: int, sliding_window: int | None, device: torch.device
) -> torch.Tensor:
    """Which of ``seq_len`` keys the last ``num_queries`` tokens see: bool [queries, keys]."""
    positions = torch.arange(seq_len - num_queries, seq_len, device=device)[:, None]
    distance = positions - torch.arange(seq_len, device=device)[None, :]
    visible = distance >= 0
    return visible if sliding_window is None else visible & (distance < sliding_window)
