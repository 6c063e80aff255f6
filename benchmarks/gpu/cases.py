"""The ops at the sizes of an 8B-class model, what each must move and compute, and who else does it.

Bytes count every input once and every result once; attention's keys and values count for each
sequence. Operations count multiplications and additions of the products alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

from benchmarks.gpu.peers import flex_decode, flex_prefill, sdpa_decode, sdpa_prefill
from benchmarks.gpu.timing import Action
from isthmus.kernels import Kernels, reference
from isthmus.kernels.types import SamplingRows

BLOCK_SIZE = 16
DECODE_TARGET = "decode attention, 64 × 4096 tokens"
PREFILL_TARGET = "prefill attention, 1 × 8192 tokens"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model and of the batches that are measured; ``scale`` divides lengths and rows, so that
    the same cases run small."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    hidden_size: int = 4096
    ffn_size: int = 14_336
    vocab_size: int = 128_256
    scale: int = 1

    def scaled(self, count: int) -> int:
        return max(1, count // self.scale)


SMALL = Sizes(4, 2, 16, 64, 96, 300, scale=64)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    num_bytes: float
    flops: float
    ours: Action
    others: dict[str, Callable[[], Action]] = field(default_factory=dict)
    """What makes another library's action, or raises when it does not run here."""


def all_cases(kernels: Kernels, sizes: Sizes, device: str) -> Iterator[Callable[[], Case]]:
    """One after the other, so that only one case's tensors exist at a time."""
    for sequences, length in ((64, 4096), (1, 4096), (8, 32_768)):
        yield partial(decode_attention, kernels, sizes, device, sequences, length)
    yield partial(decode_attention, kernels, sizes, device, 64, 4096, torch.float8_e4m3fn)
    for sequences, queries, length in ((1, 8192, 8192), (4, 2048, 2048), (1, 2048, 16_384)):
        yield partial(prefill_attention, kernels, sizes, device, sequences, queries, length)
    for rows in (64, 8192):
        yield partial(norm, kernels, sizes, device, rows)
        yield partial(activation, kernels, sizes, device, rows)
        yield partial(rotate_and_cache, kernels, sizes, device, rows)
        yield partial(linear, kernels, sizes, device, rows)
    for top_p in (1.0, 0.9):
        yield partial(draw, kernels, sizes, device, top_p)
    yield partial(move_blocks, kernels, sizes, device)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        yield partial(quantise, kernels, sizes, device, dtype)


def random(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=activation_dtype(device))


def activation_dtype(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


def paged(
    sizes: Sizes, device: str, sequences: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A store of one layer [N, 1, 2, G, B, D], and tables of scattered blocks [S, M]."""
    blocks_each = -(-length // BLOCK_SIZE)
    num_blocks = sequences * blocks_each + 1
    shape = (num_blocks, 1, 2, sizes.num_kv_heads, BLOCK_SIZE, sizes.head_dim)
    order = torch.randperm(num_blocks - 1, device=device).int() + 1
    return random(*shape, device=device), order.view(sequences, blocks_each)


def decode_attention(
    kernels: Kernels,
    sizes: Sizes,
    device: str,
    sequences: int,
    length: int,
    kv_dtype: torch.dtype | None = None,
) -> Case:
    few, short = sizes.scaled(sequences), sizes.scaled(length)
    kv, table = paged(sizes, device, few, short)
    q = random(few, sizes.num_heads, sizes.head_dim, device=device)
    scales = None
    if kv_dtype is not None:
        kv, scales = kernels.quantise_kv(kv, kv_dtype)
    scale = sizes.head_dim**-0.5
    starts = torch.arange(few + 1, dtype=torch.int32, device=device)
    lengths = torch.full((few,), short, dtype=torch.int32, device=device)

    def ours() -> torch.Tensor:
        return kernels.paged_attention(
            *(q, kv, 0, starts, lengths, table, scale),
            kv_scales=scales,
            max_query_len=1,
            max_seq_len=short,
        )

    vectors = 2 * few * short * sizes.num_kv_heads
    num_bytes = vectors * sizes.head_dim * kv.element_size()
    num_bytes += 0 if scales is None else 4 * vectors
    num_bytes += 2 * q.numel() * q.element_size()
    name = f"decode attention, {sequences} × {length} tokens"
    flops = 4 * few * short * sizes.num_heads * sizes.head_dim
    if kv_dtype is not None:
        return Case(f"{name}, {_name(kv_dtype)}", num_bytes, flops, ours)
    shape = (few, sizes.num_kv_heads, short, sizes.head_dim)
    others = {
        "SDPA": partial(sdpa_decode, q, shape, scale),
        "FlexAttention": partial(flex_decode, q, shape, scale),
    }
    return Case(name, num_bytes, flops, ours, others)


def prefill_attention(
    kernels: Kernels, sizes: Sizes, device: str, sequences: int, queries: int, length: int
) -> Case:
    few, chunk, short = sequences, sizes.scaled(queries), sizes.scaled(length)
    kv, table = paged(sizes, device, few, short)
    q = random(few * chunk, sizes.num_heads, sizes.head_dim, device=device)
    scale = sizes.head_dim**-0.5
    starts = torch.arange(few + 1, dtype=torch.int32, device=device) * chunk
    lengths = torch.full((few,), short, dtype=torch.int32, device=device)

    def ours() -> torch.Tensor:
        return kernels.paged_attention(
            *(q, kv, 0, starts, lengths, table, scale),
            max_query_len=chunk,
            max_seq_len=short,
        )

    pairs = few * chunk * (short - (chunk - 1) / 2)  # a query sees itself and all before
    num_bytes = (2 * q.numel() + 2 * few * short * sizes.num_kv_heads * sizes.head_dim) * 2
    what = f"{sequences} × {length} tokens"
    if queries < length:
        what = f"{sequences} × {queries} of {length} tokens"
    others: dict[str, Callable[[], Action]] = {}
    if queries == length:  # the others' causal mask starts at the first key
        shape = (few, sizes.num_kv_heads, short, sizes.head_dim)
        others = {
            "SDPA": partial(sdpa_prefill, q, shape, scale),
            "FlexAttention": partial(flex_prefill, q, shape, scale),
        }
    flops = 4 * pairs * sizes.num_heads * sizes.head_dim
    return Case(f"prefill attention, {what}", num_bytes, flops, ours, others)


def norm(kernels: Kernels, sizes: Sizes, device: str, rows: int) -> Case:
    few = sizes.scaled(rows)
    x, residual = (random(few, sizes.hidden_size, device=device) for _ in range(2))
    weight = random(sizes.hidden_size, device=device)

    def torchs() -> Action:
        shape = [sizes.hidden_size]
        return lambda: torch.nn.functional.rms_norm(x + residual, shape, weight, 1e-5)

    num_bytes = 4 * x.numel() * x.element_size()
    return Case(
        f"add_rms_norm, {rows} × {sizes.hidden_size}",
        num_bytes,
        0,
        lambda: kernels.add_rms_norm(x, residual, weight, 1e-5),
        {"torch": torchs},
    )


def activation(kernels: Kernels, sizes: Sizes, device: str, rows: int) -> Case:
    gate_up = random(sizes.scaled(rows), 2 * sizes.ffn_size, device=device)
    num_bytes = 1.5 * gate_up.numel() * gate_up.element_size()
    return Case(
        f"silu_mul, {rows} × {sizes.ffn_size}",
        num_bytes,
        0,
        lambda: kernels.silu_mul(gate_up),
        {"torch": lambda: lambda: reference.silu_mul(gate_up)},
    )


def rotate_and_cache(kernels: Kernels, sizes: Sizes, device: str, rows: int) -> Case:
    few, heads, kv_heads = sizes.scaled(rows), sizes.num_heads, sizes.num_kv_heads
    qkv = random(few, heads + 2 * kv_heads, sizes.head_dim, device=device)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    kv, _ = paged(sizes, device, 1, few)
    positions = torch.arange(few, device=device)
    cos_sin = torch.randn(few, sizes.head_dim, device=device)

    def ours() -> None:
        kernels.rope_and_cache(q, k, v, cos_sin, positions, kv, 0, positions)

    element_bytes = qkv.element_size()
    moved = 2 * (heads + kv_heads) + kv_heads + 2 * kv_heads  # rotated in place; V read; both put
    num_bytes = few * sizes.head_dim * (moved * element_bytes + 4)
    return Case(f"rope_and_cache, {rows} tokens", num_bytes, 0, ours)


def linear(kernels: Kernels, sizes: Sizes, device: str, rows: int) -> Case:
    few = sizes.scaled(rows)
    weight = random(2 * sizes.ffn_size, sizes.hidden_size, device=device)
    x = random(few, sizes.hidden_size, device=device)
    packed = kernels.pack_linear(weight)
    elements = x.numel() + weight.numel() + few * 2 * sizes.ffn_size
    return Case(
        f"linear, {rows} × {sizes.hidden_size} to {2 * sizes.ffn_size}",
        elements * x.element_size(),
        2 * few * weight.numel(),
        lambda: kernels.linear(x, packed),
        {"cuBLAS": lambda: lambda: x @ weight.T},
    )


def draw(kernels: Kernels, sizes: Sizes, device: str, top_p: float) -> Case:
    rows = sizes.scaled(64)
    logits = torch.randn(rows, sizes.vocab_size, device=device) * 3

    def full(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    params = SamplingRows(
        temperature=full(0.8, torch.float32),
        top_k=full(0, torch.int32),
        top_p=full(top_p, torch.float64),
        min_p=full(0.0, torch.float32),
        uniforms=full(0.5, torch.float64),
    )
    return Case(
        f"draw_tokens, 64 × {sizes.vocab_size}, top_p {top_p}",
        logits.numel() * 4,
        0,
        lambda: kernels.draw_tokens(logits, params),
        {"torch": lambda: lambda: reference.draw_tokens(logits, params)},
    )


def move_blocks(kernels: Kernels, sizes: Sizes, device: str) -> Case:
    kv, table = paged(sizes, device, 4, sizes.scaled(65_536))
    block_ids = table.flatten().long()[: len(kv) // 2]
    heads = sizes.num_kv_heads // 2
    num_bytes = 2 * len(block_ids) * heads * kv[0, :, :, 0].numel() * kv.element_size()
    return Case(
        f"gather_blocks, half the heads of {len(block_ids)} blocks",
        num_bytes,
        0,
        lambda: kernels.gather_blocks(kv, block_ids, 0, heads),
        {"torch": lambda: lambda: reference.gather_blocks(kv, block_ids, 0, heads)},
    )


def quantise(kernels: Kernels, sizes: Sizes, device: str, dtype: torch.dtype) -> Case:
    x = random(sizes.scaled(65_536), sizes.num_kv_heads, sizes.head_dim, device=device)
    num_bytes = x.numel() * (x.element_size() + 1) + 4 * x.numel() / sizes.head_dim
    return Case(
        f"quantise_kv to {_name(dtype)}, {x.shape[0]} tokens",
        num_bytes,
        0,
        lambda: kernels.quantise_kv(x, dtype),
        {"torch": lambda: lambda: reference.quantise_kv(x, dtype)},
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
