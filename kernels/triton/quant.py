"""KV in one byte an element: quantising, and reading it back.

float8_e4m3fn is packed and unpacked with integer arithmetic, so every target writes the same bits
as torch, the ones without an instruction for it (compute capability 8.0) included. Kernels get such
a tensor as uint8: in this package the dtype uint8 of KV means the bits of float8_e4m3fn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from isthmus.kernels.reference.quant import LARGEST
from isthmus.kernels.triton.compilation import CompileCase, JitKernel

_TILE_ELEMENTS = 4096  # 32 a thread: four vectors of 16 bytes and more in flight

# 1.5 · 2²³: adding it to a float32 of magnitude below 2²² leaves no bits for a fraction, so that
# the addition itself rounds to the nearest even integer.
_ROUND = tl.constexpr(12582912.0)
_E4M3_LARGEST = tl.constexpr(LARGEST[torch.float8_e4m3fn])
_TWO_TO_120 = tl.constexpr(2.0**120)
_INT8_LARGEST = tl.constexpr(LARGEST[torch.int8])


@triton.jit
def quantise_rows(x, IS_FP8: tl.constexpr):
    """x [R, D] float32 → ([R, D] int8 or bits of float8_e4m3fn as uint8, scales [R] float32)."""
    if IS_FP8:
        scales = tl.math.div_rn(tl.max(tl.abs(x), axis=1), _E4M3_LARGEST)
    else:
        scales = tl.math.div_rn(tl.max(tl.abs(x), axis=1), _INT8_LARGEST)
    scaled = tl.math.div_rn(x, tl.broadcast_to(tl.where(scales > 0, scales, 1.0)[:, None], x.shape))
    if IS_FP8:
        quantised = pack_e4m3(scaled)
    else:
        quantised = tl.clamp(round_to_even(scaled), -_INT8_LARGEST, _INT8_LARGEST).to(tl.int8)
    return quantised, scales


@triton.jit
def round_to_even(x):
    """float32 below 2²² in magnitude → the nearest integers, as float32."""
    return (x + _ROUND) - _ROUND


@triton.jit
def pack_e4m3(x):
    """float32 → bits of float8_e4m3fn, to nearest even; beyond the range its largest number."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = tl.minimum(tl.abs(x), _E4M3_LARGEST)
    # Normal numbers: keep three of the 23 fraction bits; rounding up may carry into the exponent,
    # as it should. The exponent's bias goes from 127 to 7.
    wide = magnitude.to(tl.uint32, bitcast=True)
    normal = ((wide + 0x7FFFF + ((wide >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2⁻⁶ the numbers are the multiples of 2⁻⁹; eight of them is the first normal number.
    subnormal = round_to_even(magnitude * 512.0).to(tl.uint32)
    packed = tl.where(magnitude < 0.015625, subnormal, normal)
    packed = tl.where(x == x, packed, 0x7F)  # noqa: PLR0124 - only NaN differs from itself
    return (packed | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def unpack(x, DTYPE: tl.constexpr):
    """Elements as KV holds them (uint8: bits of float8_e4m3fn) → the same numbers as ``DTYPE``.

    Exact for float16, bfloat16 and float32, but NaN of float8_e4m3fn becomes ±480.
    """
    if x.dtype == tl.uint8:
        wide = x.to(tl.uint16)
        if DTYPE == tl.bfloat16:  # noqa: SIM300 - as it reads
            # As a bfloat16 the bits mean 2⁻¹²⁰ of the number: its exponent's bias is 127, not 7.
            bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 4)
            return bits.to(tl.bfloat16, bitcast=True) * _TWO_TO_120
        # As a float16 the bits mean 2⁻⁸ of the number: its exponent's bias is 15, not 7.
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return (half.to(tl.float16, bitcast=True) * 256.0).to(DTYPE)
    return x.to(DTYPE)


@triton.jit(do_not_specialize=["num_rows"])
def _quantise_kernel(
    x, quantised, scales, num_rows, D: tl.constexpr, D_TILE: tl.constexpr, ROWS: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, D_TILE)
    offsets = rows.to(tl.int64)[:, None] * D + dims[None, :]
    inside = (rows < num_rows)[:, None] & (dims < D)[None, :]
    values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    result, row_scales = quantise_rows(values, quantised.dtype.element_ty == tl.uint8)
    tl.store(quantised + offsets, result, mask=inside)
    tl.store(scales + rows, row_scales, mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def _dequantise_kernel(
    quantised, scales, out, num_rows, D: tl.constexpr, D_TILE: tl.constexpr, ROWS: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, D_TILE)
    offsets = rows.to(tl.int64)[:, None] * D + dims[None, :]
    inside = (rows < num_rows)[:, None] & (dims < D)[None, :]
    values = unpack(tl.load(quantised + offsets, mask=inside, other=0), tl.float32)
    row_scales = tl.load(scales + rows, mask=rows < num_rows, other=0.0)
    tl.store(out + offsets, (values * row_scales[:, None]).to(out.dtype.element_ty), mask=inside)


def quantise_kv(
    x: torch.Tensor,
    dtype: torch.dtype,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.contiguous()
    quantised = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    _launch(_quantise_kernel, x, as_bytes(quantised), scales)
    if out is None:
        return quantised, scales
    as_bytes(out[0]).copy_(as_bytes(quantised))
    out[1].copy_(scales)
    return out


def dequantise_kv(
    quantised: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    assert quantised.shape[:-1] == scales.shape, (quantised.shape, scales.shape)
    out = torch.empty(quantised.shape, dtype=dtype, device=quantised.device)
    _launch(_dequantise_kernel, as_bytes(quantised.contiguous()), scales.contiguous(), out)
    return out


def as_bytes(kv: torch.Tensor) -> torch.Tensor:
    """A float8_e4m3fn tensor as uint8, the way kernels take it; any other tensor as it is."""
    return kv.view(torch.uint8) if kv.dtype == torch.float8_e4m3fn else kv


def _launch(
    kernel: triton.runtime.JITFunction,
    first: torch.Tensor,
    second: torch.Tensor,
    third: torch.Tensor,
) -> None:
    """Both kernels take three tensors; the first is [..., D]."""
    head_dim = first.shape[-1]
    num_rows = first.numel() // head_dim
    if num_rows == 0:
        return
    d_tile = triton.next_power_of_2(head_dim)
    rows = max(1, _TILE_ELEMENTS // d_tile)
    kernel[(triton.cdiv(num_rows, rows),)](
        first, second, third, num_rows, D=head_dim, D_TILE=d_tile, ROWS=rows, num_warps=4
    )


def _case(kernel: JitKernel, byte_type: str) -> CompileCase:
    wide = "x" if kernel is _quantise_kernel else "out"
    return CompileCase(
        label=f"{kernel.__name__.strip('_')}-{byte_type}",
        kernel=kernel,
        types={
            wide: "*bf16",
            "quantised": f"*{byte_type}",
            "scales": "*fp32",
            "num_rows": "i32",
        },
        constants={"D": 128, "D_TILE": 128, "ROWS": _TILE_ELEMENTS // 128},
    )


COMPILE_CASES = tuple(
    _case(kernel, byte_type)
    for kernel in (_quantise_kernel, _dequantise_kernel)
    for byte_type in ("i8", "u8")
)
