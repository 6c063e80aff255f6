"""The gated activation of a feed-forward layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from isthmus.kernels.triton.compilation import CompileCase

_BLOCK = 1024
_NUM_WARPS = 4


@triton.jit
def _silu_mul_kernel(
    out,  # [T, F]
    gate_up,  # [T, 2F]
    width,  # F
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    start = gate_up + row * 2 * width
    gate = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + width + columns, mask=inside, other=0.0).to(tl.float32)
    activated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + columns, activated.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    num_rows, both = gate_up.shape
    assert both % 2 == 0, gate_up.shape
    width = both // 2
    gate_up = gate_up.contiguous()
    out = gate_up.new_empty(num_rows, width)
    _silu_mul_kernel[(num_rows, triton.cdiv(width, _BLOCK))](
        *(out, gate_up, width), BLOCK=_BLOCK, num_warps=_NUM_WARPS
    )
    return out


def _case(dtype: str) -> CompileCase:
    return CompileCase(
        label=f"silu_mul-{dtype}",
        kernel=_silu_mul_kernel,
        types={"out": f"*{dtype}", "gate_up": f"*{dtype}", "width": "i32"},
        constants={"BLOCK": _BLOCK},
        aligned=frozenset({"width"}),
        num_warps=_NUM_WARPS,
    )


COMPILE_CASES = (_case("bf16"), _case("fp32"))
