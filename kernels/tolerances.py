"""How far an implementation may be from the reference, as data.

Both accumulate in float32, in different orders: a sum of n terms differs by about √n roundings of
the largest partial sum, so the absolute part stands for inputs of unit variance. bfloat16 figures
hold where the two implementations round the *same* float32 result; they may land one step apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tolerance:
    rtol: float
    atol: float


TOLERANCES: dict[str, Tolerance] = {
    "linear": Tolerance(rtol=1e-5, atol=2e-4),
    "rms_norm": Tolerance(rtol=5e-6, atol=1e-6),
    "add_rms_norm": Tolerance(rtol=5e-6, atol=1e-6),
    "silu_mul": Tolerance(rtol=2e-6, atol=1e-7),
    "rope_and_cache": Tolerance(rtol=1e-6, atol=1e-6),
    "paged_attention": Tolerance(rtol=1e-5, atol=5e-6),
    "describe_tokens": Tolerance(rtol=2e-6, atol=2e-6),
}

# One step of the dtype, where both sides round one float32 result once.
CACHE_TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float32: Tolerance(rtol=1e-6, atol=1e-6),
    torch.float16: Tolerance(rtol=2**-10, atol=1e-6),
    torch.bfloat16: Tolerance(rtol=2**-7, atol=1e-6),
}

# Attention whose weights are rounded to the dtype, as the matrix units take them: an error of half
# a step of each weight, which the sum of the weights, 1, averages over values of unit variance.
PRODUCT_TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float16: Tolerance(rtol=2**-9, atol=2**-9),
    torch.bfloat16: Tolerance(rtol=2**-6, atol=2**-6),
}

# Where a rounded intermediate goes on: its step and the result's own.
_ROUNDED_TWICE = frozenset({"add_rms_norm"})


def tolerance_of(op: str, dtype: torch.dtype) -> Tolerance:
    """For results in ``dtype``: the op's own where it is float32, else the dtype's steps too."""
    bounds = TOLERANCES[op]
    if dtype == torch.float32:
        return bounds
    steps = 2 if op in _ROUNDED_TWICE else 1
    step = CACHE_TOLERANCES[dtype]
    return Tolerance(max(bounds.rtol, steps * step.rtol), max(bounds.atol, steps * step.atol))


def assert_close(
    op: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance | None = None
) -> None:
    """Raises AssertionError when ``actual`` is out of the op's tolerance; NaN equals NaN."""
    bounds = tolerance or TOLERANCES[op]
    torch.testing.assert_close(
        actual,
        expected,
        rtol=bounds.rtol,
        atol=bounds.atol,
        equal_nan=True,
        msg=lambda m: f"{op}: {m}",
    )
