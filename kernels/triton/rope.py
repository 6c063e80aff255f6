"""Rotation of queries and keys, fused with the write of keys and values to their blocks.

::

    grid    one program for each token and part of its heads
    parts   q0 … q7 | q8 … | …               rotated in place
            the last: all k and v            k rotated in place, both written to the store
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from isthmus.kernels.triton.compilation import CompileCase
from isthmus.kernels.triton.quant import as_bytes, quantise_rows

_QUERY_HEADS = 8  # of one part: with a head size of 128, eight elements to a thread
_NUM_WARPS = 4


@triton.jit
def rotate_heads(x, heads, num_heads, dims, cos, sin, D: tl.constexpr):
    """Rotates heads [R] of the token at x in place → [R, D] float32, rounded to x's dtype.

    Element i is turned with element i ± D/2, by signed sines that are negative for the first half.
    """
    inside = (heads < num_heads)[:, None] & (dims < D)[None, :]
    start = x + heads[:, None] * D
    partners = tl.where(dims < D // 2, dims + D // 2, dims - D // 2)
    own = tl.load(start + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(start + partners[None, :], mask=inside, other=0.0).to(tl.float32)
    turned = (own * cos[None, :] + other * sin[None, :]).to(x.dtype.element_ty)
    tl.debug_barrier()  # each element is read by two threads, before either writes
    tl.store(start + dims[None, :], turned, mask=inside)
    return turned.to(tl.float32)


@triton.jit
def write_vectors(vectors, target, scales, heads, dims, G: tl.constexpr, B: tl.constexpr,
                  D: tl.constexpr):  # fmt: skip
    """Writes [R, D] float32 of one token to its slot, quantised where there are scales."""
    inside = (heads < G)[:, None] & (dims < D)[None, :]
    at = target + heads[:, None] * (B * D) + dims[None, :]
    if scales is None:
        tl.store(at, vectors.to(target.dtype.element_ty), mask=inside)
    else:
        quantised, vector_scales = quantise_rows(vectors, target.dtype.element_ty == tl.uint8)
        tl.store(at, quantised, mask=inside)
        tl.store(scales + heads * B, vector_scales, mask=heads < G)


@triton.jit
def _rope_and_cache_kernel(
    q,  # [T, H, D], rows q_stride apart
    k,  # [T, G, D], rows k_stride apart
    v,  # [T, G, D], rows v_stride apart
    cos_sin,  # [P, D] float32
    positions,  # [T] int64
    slot_mapping,  # [T] int64
    kv,  # [N, 2, G, B, D] of one layer, blocks block_stride apart
    kv_scales,  # [N, 2, G, B], blocks scale_block_stride apart, or None
    q_stride,
    k_stride,
    v_stride,
    block_stride,
    scale_block_stride,
    H: tl.constexpr,
    G: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    D_TILE: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,  # G, as a power of two
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    dims = tl.arange(0, D_TILE)
    is_first_half = dims < D // 2
    pairs = tl.where(is_first_half, dims, dims - D // 2)
    angles = cos_sin + tl.load(positions + token) * D
    cos = tl.load(angles + pairs, mask=dims < D, other=0.0)
    sin = tl.load(angles + D // 2 + pairs, mask=dims < D, other=0.0)
    sin = tl.where(is_first_half, -sin, sin)
    if part < tl.cdiv(H, QUERY_HEADS):
        query_heads = part * QUERY_HEADS + tl.arange(0, QUERY_HEADS)
        rotate_heads(q + token * q_stride, query_heads, H, dims, cos, sin, D)
    else:
        heads = tl.arange(0, KV_HEADS)  # not the name above: it would be of another shape
        keys = rotate_heads(k + token * k_stride, heads, G, dims, cos, sin, D)
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            inside = (heads < G)[:, None] & (dims < D)[None, :]
            at = v + token * v_stride + heads[:, None] * D + dims[None, :]
            values = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            target = kv + (slot // B) * block_stride + (slot % B) * D
            scales = kv_scales
            value_scales = kv_scales
            if kv_scales is not None:
                scales = kv_scales + (slot // B) * scale_block_stride + slot % B
                value_scales = scales + G * B
            write_vectors(keys, target, scales, heads, dims, G, B, D)
            write_vectors(values, target + G * B * D, value_scales, heads, dims, G, B, D)


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
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[3], kv.shape[4]
    assert k.shape == v.shape == (num_tokens, num_kv_heads, head_dim), (k.shape, v.shape)
    assert all(x.stride(2) == 1 and x.stride(1) == head_dim for x in (q, k, v))
    assert positions.dtype == slot_mapping.dtype == torch.int64
    assert cos_sin.dtype == torch.float32
    assert cos_sin.is_contiguous()
    assert kv.shape[5] == head_dim
    assert kv[:1, :1].is_contiguous()
    scales = None if kv_scales is None else kv_scales[:, layer]
    parts = triton.cdiv(num_heads, _QUERY_HEADS) + 1
    _rope_and_cache_kernel[(num_tokens, parts)](
        *(q, k, v, cos_sin, positions, slot_mapping, as_bytes(kv[:, layer]), scales),
        *(q.stride(0), k.stride(0), v.stride(0), kv.stride(0)),
        0 if scales is None else scales.stride(0),
        H=num_heads,
        G=num_kv_heads,
        B=block_size,
        D=head_dim,
        D_TILE=triton.next_power_of_2(head_dim),
        QUERY_HEADS=_QUERY_HEADS,
        KV_HEADS=triton.next_power_of_2(num_kv_heads),
        num_warps=_NUM_WARPS,
    )


def _case(
    dtype: str, kv_dtype: str, num_heads: int, num_kv_heads: int, head_dim: int
) -> CompileCase:
    is_quantised = kv_dtype != dtype
    strides = ("q_stride", "k_stride", "v_stride", "block_stride", "scale_block_stride")
    return CompileCase(
        label=f"rope_and_cache-{dtype}-{kv_dtype}-{num_heads}x{num_kv_heads}x{head_dim}",
        kernel=_rope_and_cache_kernel,
        types={
            **dict.fromkeys(("q", "k", "v"), f"*{dtype}"),
            "cos_sin": "*fp32",
            **dict.fromkeys(("positions", "slot_mapping"), "*i64"),
            "kv": f"*{kv_dtype}",
            **({"kv_scales": "*fp32"} if is_quantised else {}),
            **dict.fromkeys(strides, "i32"),
        },
        constants={
            **({} if is_quantised else {"kv_scales": None}),
            "H": num_heads,
            "G": num_kv_heads,
            "B": 16,
            "D": head_dim,
            "D_TILE": triton.next_power_of_2(head_dim),
            "QUERY_HEADS": _QUERY_HEADS,
            "KV_HEADS": triton.next_power_of_2(num_kv_heads),
        },
        aligned=frozenset(strides),
        num_warps=_NUM_WARPS,
    )


COMPILE_CASES = (
    _case("bf16", "bf16", 32, 8, 128),
    _case("fp16", "fp16", 14, 2, 64),
    _case("fp32", "fp32", 9, 3, 80),
    _case("bf16", "i8", 32, 8, 128),
    _case("bf16", "u8", 32, 8, 128),
)
