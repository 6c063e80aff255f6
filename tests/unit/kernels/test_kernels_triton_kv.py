"""Triton's quantising and moving of KV blocks against the reference, run by its interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from isthmus.kernels import reference
from isthmus.kernels.triton import kv_blocks, quant

pytestmark = pytest.mark.interpreted

BYTES = [torch.int8, torch.float8_e4m3fn]
KV_DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return actual.dtype == expected.dtype and torch.equal(
        actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize("of", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5, 64), (1, 80), (0, 16), (70, 128), (4, 3)])
def test_quantising_gives_the_bits_of_the_reference(
    dtype: torch.dtype, of: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = (randn(*shape) * torch.logspace(-6, 4, shape[-1])).to(of)
    if shape[0] > 1:
        x[1] = 0
    actual, scales = quant.quantise_kv(x, dtype)
    expected, expected_scales = reference.quantise_kv(x, dtype)
    assert same_bits(scales, expected_scales)
    assert same_bits(actual, expected)


def test_every_number_of_float8_is_packed_and_unpacked() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = codes[~codes.float().isnan()]
    ones = torch.ones(len(finite))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        read = quant.dequantise_kv(finite.unsqueeze(1), ones, dtype)
        assert torch.equal(read.float(), finite.float().unsqueeze(1))
    # A row whose largest number is 448 has scale 1: what is packed is the row itself.
    row = torch.cat((finite.float(), torch.tensor([448.0])))
    packed, scale = quant.quantise_kv(row.unsqueeze(0), torch.float8_e4m3fn)
    assert scale.item() == 1.0
    assert same_bits(packed[0, :-1], finite)


def test_numbers_between_two_of_float8_go_to_the_nearest_even() -> None:
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    below, above = middles.nextafter(torch.tensor(0.0)), middles.nextafter(torch.tensor(1e9))
    row = torch.cat((middles, below, above, -middles, torch.tensor([448.0])))
    packed, _ = quant.quantise_kv(row.unsqueeze(0), torch.float8_e4m3fn)
    assert same_bits(packed[0], row.to(torch.float8_e4m3fn))


@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize("to", [torch.float32, torch.float16])
def test_dequantising_equals_the_reference(dtype: torch.dtype, to: torch.dtype) -> None:
    quantised, scales = reference.quantise_kv(randn(5, 2, 48), dtype)
    actual = quant.dequantise_kv(quantised, scales, to)
    assert torch.equal(actual, reference.dequantise_kv(quantised, scales, to))


def store(dtype: torch.dtype, head_dim: int, num_heads: int = 4) -> torch.Tensor:
    shape = (6, 2, 2, num_heads, 4, head_dim)
    numbers = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1))
    return (numbers - 128).to(dtype)


@settings(max_examples=30, deadline=None)
@given(
    dtype=st.sampled_from(KV_DTYPES),
    head_dim=st.sampled_from([6, 8, 40]),
    heads=st.sampled_from([(0, 4), (0, 1), (1, 2), (3, 1)]),
    blocks=st.lists(st.integers(0, 5), max_size=4, unique=True),
    of_scales=st.booleans(),
)
def test_heads_of_blocks_are_gathered_and_scattered(
    dtype: torch.dtype,
    head_dim: int,
    heads: tuple[int, int],
    blocks: list[int],
    of_scales: bool,
) -> None:
    kv = store(dtype, head_dim)
    if of_scales:
        kv = kv.float()[..., 0].contiguous()
    ids = torch.tensor(blocks, dtype=torch.int64)
    staged = kv_blocks.gather_blocks(kv, ids, *heads)
    assert same_bits(staged, reference.gather_blocks(kv, ids, *heads))
    assert staged.is_contiguous()
    actual, expected = torch.zeros_like(kv), torch.zeros_like(kv)
    kv_blocks.scatter_blocks(staged, actual, ids, heads[0])
    reference.scatter_blocks(staged, expected, ids, heads[0])
    assert same_bits(actual, expected)


def test_heads_arrive_at_a_store_that_has_fewer() -> None:
    """What a rank that holds all heads sends to one of two that hold half of them each."""
    whole, half = store(torch.bfloat16, 8), torch.zeros(6, 2, 2, 2, 4, 8, dtype=torch.bfloat16)
    source, target = torch.tensor([4, 1]), torch.tensor([0, 5])
    staged = kv_blocks.gather_blocks(whole, source, 2, 2)
    kv_blocks.scatter_blocks(staged, half, target, 0)
    assert torch.equal(half[target], whole[source][:, :, :, 2:])
    assert half[1:5].count_nonzero() == 0


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_blocks_are_copied_within_a_store(dtype: torch.dtype) -> None:
    kv = store(dtype, 8)
    expected = kv.clone()
    source, target = torch.tensor([0, 0, 5]), torch.tensor([3, 1, 2])
    reference.copy_blocks(expected, source, target)
    kv_blocks.copy_blocks(kv, source, target)
    assert same_bits(kv, expected)
    assert same_bits(kv[3], kv[0])


def test_blocks_may_lie_apart() -> None:
    wide = torch.zeros(6, 3, 2, 2, 4, 4, 8)
    wide[:, 1] = store(torch.float32, 8)
    kv = wide[:, 1]
    ids = torch.tensor([2, 0])
    assert torch.equal(kv_blocks.gather_blocks(kv, ids, 0, 4), kv[ids])
    kv_blocks.copy_blocks(kv, ids, torch.tensor([1, 5]))
    assert torch.equal(kv[1], kv[2])
    assert torch.equal(kv[5], kv[0])
    assert wide[:, [0, 2]].count_nonzero() == 0
