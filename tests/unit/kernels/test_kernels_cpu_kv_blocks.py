"""Moving KV blocks on the CPU against the reference."""

from __future__ import annotations

import pytest
import torch

from isthmus.kernels import reference, select

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]


def store(dtype: torch.dtype) -> torch.Tensor:
    """Blocks that lie apart, as those of one of several stores in one allocation do."""
    numbers = torch.randint(0, 256, (6, 2, 2, 2, 4, 4, 8)) - 128
    return numbers.to(dtype)[:, 1]


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(0, 4), (1, 2), (3, 1)])
@pytest.mark.parametrize("blocks", [[], [3], [5, 0, 2]])
@pytest.mark.parametrize("of_scales", [False, True])
def test_heads_of_blocks_are_gathered_and_scattered(
    dtype: torch.dtype, heads: tuple[int, int], blocks: list[int], of_scales: bool
) -> None:
    kv, ids = store(dtype), torch.tensor(blocks, dtype=torch.int64)
    if of_scales:
        kv = kv.float()[..., 0]
    cpu = select("cpu", 1, "cpu")
    staged = cpu.gather_blocks(kv, ids, *heads)
    assert staged.is_contiguous()
    assert torch.equal(as_bytes(staged), as_bytes(reference.gather_blocks(kv, ids, *heads)))
    actual, expected = torch.zeros_like(kv), torch.zeros_like(kv)
    cpu.scatter_blocks(staged, actual, ids, heads[0])
    reference.scatter_blocks(staged, expected, ids, heads[0])
    assert torch.equal(as_bytes(actual), as_bytes(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_copied_within_a_store(dtype: torch.dtype) -> None:
    kv = store(dtype)
    expected = kv.clone()
    source, target = torch.tensor([0, 0, 5]), torch.tensor([3, 1, 2])
    reference.copy_blocks(expected, source, target)
    select("cpu", 1, "cpu").copy_blocks(kv, source, target)
    assert torch.equal(as_bytes(kv), as_bytes(expected))


def test_the_compiled_kernels_bring_their_own_moves() -> None:
    assert select("cpu", 1, "cpu").copy_blocks is not reference.copy_blocks
