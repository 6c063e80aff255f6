"""Triton's norms, activation and rotation against the reference, run by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from isthmus.kernels import reference
from isthmus.kernels.tolerances import assert_close, tolerance_of
from isthmus.kernels.triton import activation, norm, rope

pytestmark = pytest.mark.interpreted

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=15, deadline=None)
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


@settings(max_examples=12, deadline=None)
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


@dataclass(frozen=True)
class RopeCase:
    """A call of ``rope_and_cache`` over random content, which the op changes in place."""

    qkv: torch.Tensor  # [T, H + 2G, D]
    kv: torch.Tensor
    kv_scales: torch.Tensor | None
    slots: torch.Tensor

    def after(self, op: Callable[..., None]) -> RopeCase:
        """A copy of the case, changed by ``op``."""
        scales = None if self.kv_scales is None else self.kv_scales.clone()
        done = replace(self, qkv=self.qkv.clone(), kv=self.kv.clone(), kv_scales=scales)
        num_tokens, num_rows, head_dim = self.qkv.shape
        num_kv_heads = self.kv.shape[3]
        heads = [num_rows - 2 * num_kv_heads, num_kv_heads, num_kv_heads]
        q, k, v = done.qkv.split(heads, dim=1)
        cos_sin, positions = randn(50, head_dim), torch.arange(num_tokens) * 3 % 50
        op(q, k, v, cos_sin, positions, done.kv, 1, self.slots, kv_scales=scales)
        return done

    @property
    def codes(self) -> torch.Tensor:
        """What quantised KV holds, as integers that order as their numbers do."""
        return self.kv.view(torch.int8).int()


def rope_case(
    num_tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> RopeCase:
    """Tokens in slots out of order, one of them in none."""
    num_heads, num_kv_heads = heads
    qkv = randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, seed=3)
    num_blocks = num_tokens // block_size + 2
    store = 20 * randn(num_blocks, 2, 2, num_kv_heads, block_size, head_dim, seed=4)
    is_quantised = kv_dtype in {torch.int8, torch.float8_e4m3fn}
    scales = randn(*store.shape[:-1], seed=5) if is_quantised else None
    slots = torch.arange(num_tokens).flip(0) + 1
    slots[num_tokens // 2 : num_tokens // 2 + 1] = -1
    return RopeCase(qkv, store.to(kv_dtype), scales, slots)


@settings(max_examples=15, deadline=None)
@given(
    num_tokens=st.integers(0, 5),
    heads=st.sampled_from([(1, 1), (9, 3), (8, 1), (12, 12)]),
    head_dim=st.sampled_from([2, 6, 64, 80]),
    block_size=st.sampled_from([1, 4, 16]),
    dtype=st.sampled_from(DTYPES),
    kv_dtype=st.sampled_from([None, torch.int8, torch.float8_e4m3fn]),
)
def test_rope_and_cache_equals_the_reference_for_any_shape(
    num_tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
) -> None:
    case = rope_case(num_tokens, heads, head_dim, block_size, dtype, kv_dtype or dtype)
    actual, expected = case.after(rope.rope_and_cache), case.after(reference.rope_and_cache)
    bounds = tolerance_of("rope_and_cache", dtype)
    assert_close("rope_and_cache", actual.qkv, expected.qkv, bounds)
    if actual.kv_scales is None or expected.kv_scales is None:
        assert_close("rope_and_cache", actual.kv, expected.kv, bounds)
    else:
        assert_close("rope_and_cache", actual.kv_scales, expected.kv_scales, bounds)
        assert (actual.codes - expected.codes).abs().max() <= 1
    was_written = torch.zeros(case.kv.shape[0], block_size, dtype=torch.bool)
    was_written.view(-1)[case.slots[case.slots >= 0]] = True
    was_written = was_written[:, None, None, None, :, None].expand_as(case.kv).clone()
    was_written[:, 0] = False
    kept, before = actual.kv.float()[~was_written], case.kv.float()[~was_written]
    assert torch.equal(kept, before)
