"""Fills the library's structures from tensors, which must outlive them."""

from __future__ import annotations

import torch

from isthmus.kernels.cpu.binding import AttentionParts, LinearParts, RopeParts
from isthmus.kernels.types import PackedLinear

_WEIGHT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}  # WeightType of linear.h


def linear_parts(packed: PackedLinear) -> LinearParts:
    assert packed.bias is not None
    return LinearParts(
        panels=packed.data.data_ptr(),
        bias=packed.bias.data_ptr(),
        scales=None if packed.scales is None else packed.scales.data_ptr(),
        depth=packed.in_features,
        width=packed.out_features,
        weight_type=_WEIGHT_TYPES[packed.data.dtype],
    )


def rope_parts(
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_heads: int,
    kv: torch.Tensor,
) -> RopeParts:
    for tensor in (positions, slot_mapping):
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
    assert cos_sin.dtype == torch.float32
    assert cos_sin.is_contiguous()
    return RopeParts(
        cos_sin=cos_sin.data_ptr(),
        positions=positions.data_ptr(),
        slot_mapping=slot_mapping.data_ptr(),
        num_heads=num_heads,
        num_kv_heads=kv.shape[3],
        head_dim=kv.shape[5],
        block_size=kv.shape[4],
        block_stride=kv.stride(0),
        is_bf16=kv.dtype == torch.bfloat16,
    )


def attention_parts(
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    num_heads: int,
    scale: float,
    kv: torch.Tensor,
) -> AttentionParts:
    num_kv_heads = kv.shape[3]
    assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
    for tensor in (query_start, seq_lens, block_table):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
    return AttentionParts(
        query_start=query_start.data_ptr(),
        seq_lens=seq_lens.data_ptr(),
        block_table=block_table.data_ptr(),
        num_sequences=seq_lens.shape[0],
        max_blocks=block_table.shape[1],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=kv.shape[5],
        block_size=kv.shape[4],
        block_stride=kv.stride(0),
        scale=scale,
        is_bf16=kv.dtype == torch.bfloat16,
    )


def layer_address(kv: torch.Tensor, layer: int) -> int:
    assert kv[:1].is_contiguous()  # blocks may be any distance apart
    assert kv.dtype in {torch.float32, torch.bfloat16}, kv.dtype
    return kv.data_ptr() + layer * kv.stride(1) * kv.element_size()
