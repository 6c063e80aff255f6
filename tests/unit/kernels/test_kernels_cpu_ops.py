"""The compiled CPU kernels against the reference, over shapes that do not fit their blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.kernels import Kernels, reference, select
from isthmus.kernels.tolerances import CACHE_TOLERANCES, Tolerance, assert_close
from tests.support.paged_kv import paged_case

DTYPES = [torch.float32, torch.bfloat16]
# Each row is rounded to 14 bits: an error of up to 2^-14 of its largest element in every term.
INT8_TOLERANCE = Tolerance(rtol=1e-4, atol=1e-3)


@pytest.fixture(scope="module", params=[1, 2], ids=["one-thread", "two-threads"])
def cpu(request: pytest.FixtureRequest) -> Kernels:
    return select("cpu", request.param, "cpu")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 24, 25, 97, 200])
@pytest.mark.parametrize(("depth", "width"), [(64, 16), (33, 5), (576, 100), (1, 31), (1500, 48)])
def test_linear_equals_the_reference(
    cpu: Kernels, dtype: torch.dtype, num_rows: int, depth: int, width: int
) -> None:
    x, weight = randn(num_rows, depth), randn(width, depth, seed=1).to(dtype)
    bias = randn(width, seed=2)
    actual = cpu.linear(x, cpu.pack_linear(weight, bias))
    assert_close("linear", actual, reference.linear(x, reference.pack_linear(weight, bias)))


@pytest.mark.parametrize("num_rows", [0, 1, 7, 25, 97])
@pytest.mark.parametrize(("depth", "width"), [(64, 16), (33, 5), (1, 31), (576, 100), (4099, 48)])
def test_linear_of_int8_weights_equals_the_reference(
    cpu: Kernels, num_rows: int, depth: int, width: int
) -> None:
    x, weight, bias = randn(num_rows, depth), randn(width, depth, seed=1), randn(width, seed=2)
    packed = cpu.pack_linear(weight * depth**-0.5, bias, "int8")
    assert packed.num_bytes < (depth + 1) * (width + 15)
    expected = reference.linear(x, reference.pack_linear(weight * depth**-0.5, bias, "int8"))
    assert_close("linear", cpu.linear(x, packed), expected, INT8_TOLERANCE)


def test_int8_products_stay_exact_at_the_largest_magnitudes(cpu: Kernels) -> None:
    depth = 2048  # as many as one sum of 32 bits takes
    packed = cpu.pack_linear(torch.full((16, depth), 0.5), None, "int8")
    x = torch.full((2, depth), 3.0)
    x[1] = -3.0
    expected = torch.tensor([1.5, -1.5])[:, None].expand(2, 16) * depth
    assert_close("linear", cpu.linear(x, packed), expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("column", [0, 19])
def test_a_row_that_is_not_finite_has_no_int8_products(
    cpu: Kernels, value: float, column: int
) -> None:
    x = randn(3, 20)
    x[1, column] = value
    out = cpu.linear(x, cpu.pack_linear(randn(5, 20), None, "int8"))
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


def test_linear_without_bias_adds_nothing(cpu: Kernels) -> None:
    weight = randn(20, 12)
    packed = cpu.pack_linear(weight)
    assert torch.equal(cpu.linear(torch.zeros(3, 12), packed), torch.zeros(3, 20))


def test_linear_takes_rows_that_are_not_contiguous(cpu: Kernels) -> None:
    wide, weight = randn(5, 40), randn(7, 20)
    packed = cpu.pack_linear(weight)
    assert torch.equal(cpu.linear(wide[:, :20], packed), cpu.linear(wide[:, :20].clone(), packed))


@pytest.mark.parametrize("width", [1, 7, 32, 100, 576])
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_norms_equal_the_reference(cpu: Kernels, num_rows: int, width: int) -> None:
    x, residual, weight = randn(num_rows, width), randn(num_rows, width, seed=1), randn(width)
    expected = reference.rms_norm(x, weight, 1e-5)
    assert_close("rms_norm", cpu.rms_norm(x, weight, 1e-5), expected)
    normed, total = cpu.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert_close("add_rms_norm", normed, reference.rms_norm(x + residual, weight, 1e-5))


def test_norm_of_each_head_takes_three_dimensions(cpu: Kernels) -> None:
    x, weight = randn(4, 3, 32), randn(32)
    assert_close("rms_norm", cpu.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("width", [1, 9, 16, 77])
def test_silu_mul_equals_the_reference_over_the_whole_range(cpu: Kernels, width: int) -> None:
    gate = torch.cat((torch.linspace(-120, 120, 999), torch.tensor([0.0])))[:, None]
    gate_up = torch.cat((gate.expand(-1, width), randn(1000, width)), dim=1)
    assert_close("silu_mul", cpu.silu_mul(gate_up), reference.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (6, 32), (128, 64)])
def test_rope_and_cache_equals_the_reference(
    cpu: Kernels, dtype: torch.dtype, head_dim: int, block_size: int
) -> None:
    num_tokens, num_heads, num_kv_heads = 9, 4, 2
    cos_sin = randn(50, head_dim)
    positions = torch.arange(num_tokens) * 3 + 1
    slots = torch.randperm(3 * block_size)[:num_tokens]
    slots[4] = -1

    def run(kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor]:
        qkv = randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, seed=3)
        heads = qkv.view(num_tokens, -1, head_dim)
        q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        kv = torch.full((3, 2, 2, num_kv_heads, block_size, head_dim), 7.0, dtype=dtype)
        kernels.rope_and_cache(q, k, v, cos_sin, positions, kv, 1, slots)
        return qkv, kv

    qkv, kv = run(cpu)
    expected_qkv, expected_kv = run(reference)
    assert_close("rope_and_cache", qkv, expected_qkv)
    assert_close("rope_and_cache", kv.float(), expected_kv.float(), CACHE_TOLERANCES[dtype])
    assert torch.equal(kv == 7.0, expected_kv == 7.0)


def test_cache_write_rounds_as_torch_does(cpu: Kernels) -> None:
    values = torch.tensor([1.00390625, 1.01171875, -0.0, 1e-40, 3.4e38, torch.inf, torch.nan, 0.1])
    v = values.view(1, 1, 8).clone()
    kv = torch.zeros(1, 1, 2, 1, 4, 8, dtype=torch.bfloat16)
    at_zero = torch.zeros(1, dtype=torch.int64)
    cos_sin = torch.tensor([[1.0] * 4 + [0.0] * 4])
    cpu.rope_and_cache(v.clone(), torch.zeros(1, 1, 8), v, cos_sin, at_zero, kv, 0, at_zero + 2)
    written, expected = kv[0, 0, 1, 0, 2], values.bfloat16()
    assert torch.equal(written.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(written[numbers].view(torch.int16), expected[numbers].view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("window", [None, 1, 40])
def test_attention_equals_the_reference_for_mixed_batches(
    cpu: Kernels, dtype: torch.dtype, block_size: int, window: int | None
) -> None:
    case = paged_case([1, 70, 1, 33], [1, 70, 190, 161], block_size=block_size, dtype=dtype)
    actual = cpu.paged_attention(*case.args(), window)
    assert_close("paged_attention", actual, reference.paged_attention(*case.args(), window))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 80), st.integers(0, 150)), min_size=0, max_size=3),
    heads=st.sampled_from([(1, 1), (9, 3), (8, 1), (6, 6)]),
    head_dim=st.sampled_from([4, 8, 24, 64, 80]),
    block_size=st.sampled_from([1, 4, 16, 64]),
    dtype=st.sampled_from(DTYPES),
    window=st.one_of(st.none(), st.integers(1, 200)),
)
def test_attention_equals_the_reference_for_any_shape(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
) -> None:
    case = paged_case(
        [query for query, _ in lengths],
        [query + before for query, before in lengths],
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )
    actual = select("cpu", 1, "cpu").paged_attention(*case.args(), window)
    assert_close("paged_attention", actual, reference.paged_attention(*case.args(), window))


def test_attention_never_reads_blocks_behind_the_window(cpu: Kernels) -> None:
    case = paged_case([2], [100], block_size=16)
    expected = cpu.paged_attention(*case.args(), 20)
    freed = case.block_table[0, :4]  # positions 0 … 63; the first query sees from 79 on
    case.kv[freed.long()] = torch.nan
    case.block_table[0, :4] = 0
    assert torch.equal(cpu.paged_attention(*case.args(), 20), expected)


def test_attention_of_padding_rows_is_zero(cpu: Kernels) -> None:
    case = paged_case([3], [3])
    padded = torch.cat((case.q, torch.full((2, 9, 64), 5.0)))
    actual = cpu.paged_attention(padded, *case.args()[1:])
    assert torch.equal(actual[3:], torch.zeros(2, 9 * 64))
    assert torch.equal(actual[:3], cpu.paged_attention(*case.args()))


def test_attention_survives_scores_far_apart(cpu: Kernels) -> None:
    case = paged_case([70], [70])
    case.q.mul_(200.0)  # and with them grow the rounding errors that the exponential magnifies
    actual, expected = cpu.paged_attention(*case.args()), reference.paged_attention(*case.args())
    assert_close("paged_attention", actual, expected, Tolerance(rtol=2e-3, atol=1e-3))
