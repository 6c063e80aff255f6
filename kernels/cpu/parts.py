"""Fills the library's structures from tensors, which must outlive them."""

from __future__ import annotations

from ctypes import c_int64

import torch

from isthmus.kernels.cpu.binding import AttentionParts, LinearParts, QuantiseParts, RopeParts
from isthmus.kernels.types import PackedLinear

KV_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}  # KvType of vec.h
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
    kv_scales: torch.Tensor | None,
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
        scale_block_stride=0 if kv_scales is None else kv_scales.stride(0),
        kv_type=KV_TYPES[kv.dtype],
    )


def attention_parts(
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    num_heads: int,
    scale: float,
    kv: torch.Tensor,
    kv_scales: torch.Tensor | None,
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
        scale_block_stride=0 if kv_scales is None else kv_scales.stride(0),
        scale=scale,
        kv_type=KV_TYPES[kv.dtype],
    )


def layer_address(kv: torch.Tensor, layer: int) -> int:
    assert kv[:1, :1].is_contiguous()  # blocks and layers may be any distance apart
    assert kv.dtype in KV_TYPES, kv.dtype
    return kv.data_ptr() + layer * kv.stride(1) * kv.element_size()


def scales_address(kv: torch.Tensor, kv_scales: torch.Tensor | None, layer: int) -> int | None:
    """None for a store without scales."""
    if kv_scales is None:
        assert kv.dtype != torch.int8, "int8 without scales"
        return None
    assert kv.dtype == torch.int8, kv.dtype
    assert kv_scales.dtype == torch.float32
    assert kv_scales.shape == kv.shape[:-1], (kv_scales.shape, kv.shape)
    assert kv_scales[:1, :1].is_contiguous()
    return kv_scales.data_ptr() + layer * kv_scales.stride(1) * kv_scales.element_size()


def quantise_parts(x: torch.Tensor, quantised: torch.Tensor, scales: torch.Tensor) -> QuantiseParts:
    """x [A, B, C, E, D] float32 or bfloat16 → quantised int8, scales float32 [A, B, C, E]."""
    assert quantised.shape == x.shape, (quantised.shape, x.shape)
    assert scales.shape == x.shape[:-1], (scales.shape, x.shape)
    assert x.stride(-1) == quantised.stride(-1) == 1 or x.shape[-1] == 1
    counts = c_int64 * 4
    return QuantiseParts(
        source=x.data_ptr(),
        to=quantised.data_ptr(),
        scales=scales.data_ptr(),
        counts=counts(*x.shape[:-1]),
        from_strides=counts(*x.stride()[:-1]),
        to_strides=counts(*quantised.stride()[:-1]),
        scale_strides=counts(*scales.stride()),
        dim=x.shape[-1],
        from_type=KV_TYPES[x.dtype],
    )
