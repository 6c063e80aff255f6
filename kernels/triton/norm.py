"""RMS norm, alone and after an addition: one program normalises one row.

Both read a row once and keep it in registers. Rows of a head's norm may lie apart: x may be
[T, H, D] with any stride of T.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from isthmus.kernels.triton.compilation import CompileCase


@triton.jit
def _rms_norm_kernel(
    out,  # [R, E]
    x,  # row r begins at (r // num_inner) · outer_stride + (r % num_inner) · inner_stride
    weight,  # [E]
    num_inner,
    outer_stride,
    inner_stride,
    width,
    eps,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    start = (row // num_inner) * outer_stride + (row % num_inner) * inner_stride
    wide = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    normed = wide * scale * factors
    tl.store(out + row * width + columns, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_rms_norm_kernel(
    out,  # [R, E]
    total,  # [R, E]
    x,  # [R, E]
    residual,  # [R, E]
    weight,  # [E]
    width,
    eps,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    at = row * width + columns
    added = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    added += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    rounded = added.to(total.dtype.element_ty)  # what is normalised is what is kept
    tl.store(total + at, rounded, mask=inside)
    wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    normed = wide * scale * factors
    tl.store(out + at, normed.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, E] or [T, H, E], rows apart by any stride; weight [E] of any float dtype."""
    width = x.shape[-1]
    assert weight.shape == (width,), (x.shape, weight.shape)
    assert x.dim() in {2, 3}, x.shape
    assert x.stride(-1) == 1, x.stride()
    num_inner, inner_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block, num_warps = _launch_shape(width)
    _rms_norm_kernel[(x.shape[0] * num_inner,)](
        *(out, x, weight, num_inner, x.stride(0), inner_stride, width, eps),
        BLOCK=block,
        num_warps=num_warps,
    )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, width = x.shape
    assert residual.shape == x.shape, (x.shape, residual.shape)
    assert residual.dtype == x.dtype, (x.dtype, residual.dtype)
    assert weight.shape == (width,), (x.shape, weight.shape)
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    block, num_warps = _launch_shape(width)
    _add_rms_norm_kernel[(num_rows,)](
        *(out, total, x, residual, weight, width, eps), BLOCK=block, num_warps=num_warps
    )
    return out, total


def _launch_shape(width: int) -> tuple[int, int]:
    """Elements and warps of a program: about eight elements to a thread, at most sixteen warps."""
    block = triton.next_power_of_2(width)
    return block, min(max(block // 256, 1), 16)


def _cases(dtype: str, width: int) -> tuple[CompileCase, CompileCase]:
    block, num_warps = _launch_shape(width)
    pointer = f"*{dtype}"
    return (
        CompileCase(
            label=f"rms_norm-{dtype}-{width}",
            kernel=_rms_norm_kernel,
            types={
                **dict.fromkeys(("out", "x", "weight"), pointer),
                **dict.fromkeys(("outer_stride", "inner_stride", "width"), "i32"),
                "eps": "fp32",
            },
            constants={"BLOCK": block, "num_inner": 1},  # Triton makes an argument of 1 constant
            aligned=frozenset({"outer_stride", "inner_stride", "width"}),
            num_warps=num_warps,
        ),
        CompileCase(
            label=f"add_rms_norm-{dtype}-{width}",
            kernel=_add_rms_norm_kernel,
            types={
                **dict.fromkeys(("out", "total", "x", "residual", "weight"), pointer),
                "width": "i32",
                "eps": "fp32",
            },
            constants={"BLOCK": block},
            aligned=frozenset({"width"}),
            num_warps=num_warps,
        ),
    )


COMPILE_CASES = (*_cases("bf16", 4096), *_cases("fp32", 576))
