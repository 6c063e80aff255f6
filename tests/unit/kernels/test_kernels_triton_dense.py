"""Triton's norms, activation and rotation against the reference, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from isthmus.kernels import reference
from isthmus.kernels.tolerances import assert_close, tolerance_of
from isthmus.kernels.triton import activation, norm

pytestmark = pytest.mark.interpreted

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=30, deadline=None)
@given(
    num_rows=st.integers(0, 4),
    width=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    eps=st.sampled_from([1e-6, 1e-5, 0.1]),
)
def test_norms_equal_the_reference_for_any_shape(
    num_rows: int, width: int, dtype: torch.dtype, eps: float
) -> None:
    x, residual = randn(num_rows, width, dtype=dtype), randn(num_rows, width, dtype=dtype, seed=1)
    weight = randn(width, dtype=dtype, seed=2)
    bounds = tolerance_of("rms_norm", dtype)
    actual = norm.rms_norm(x, weight, eps)
    assert_close("rms_norm", actual, reference.rms_norm(x, weight, eps), bounds)
    normed, total = norm.add_rms_norm(x, residual, weight, eps)
    expected_normed, expected_total = reference.add_rms_norm(x, residual, weight, eps)
    assert_close("add_rms_norm", total, expected_total, tolerance_of("add_rms_norm", dtype))
    assert_close("add_rms_norm", normed, expected_normed, tolerance_of("add_rms_norm", dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_each_head_takes_rows_that_lie_apart(dtype: torch.dtype) -> None:
    wide, weight = randn(5, 7, 32, dtype=dtype), randn(32, dtype=dtype)
    heads = wide[:, 2:5]
    expected = reference.rms_norm(heads, weight, 1e-6)
    assert_close(
        "rms_norm", norm.rms_norm(heads, weight, 1e-6), expected, tolerance_of("rms_norm", dtype)
    )


@settings(max_examples=20, deadline=None)
@given(
    num_rows=st.integers(0, 3),
    width=st.sampled_from([1, 7, 96, 1024, 1500, 2049]),
    dtype=st.sampled_from(DTYPES),
)
def test_silu_mul_equals_the_reference_for_any_shape(
    num_rows: int, width: int, dtype: torch.dtype
) -> None:
    gate_up = randn(num_rows, 2 * width, dtype=dtype)
    bounds = tolerance_of("silu_mul", dtype)
    assert_close("silu_mul", activation.silu_mul(gate_up), reference.silu_mul(gate_up), bounds)


def test_silu_mul_keeps_its_ends() -> None:
    gate = torch.tensor([-200.0, -88.0, -0.0, 0.0, 88.0, 200.0])
    gate_up = torch.cat((gate, torch.ones(6)))[None]
    assert_close("silu_mul", activation.silu_mul(gate_up), reference.silu_mul(gate_up))
