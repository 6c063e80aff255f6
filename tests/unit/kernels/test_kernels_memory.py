from __future__ import annotations

import gc

import pytest
import torch

from isthmus.kernels.memory import HugePageArena, zeros_in_huge_pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5), (4, 1 << 20), (0, 7)])
def test_a_store_is_zero_writable_and_outlives_its_maker(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    store = zeros_in_huge_pages(shape, dtype)
    gc.collect()
    assert torch.equal(store, torch.zeros(shape, dtype=dtype))
    store[1:2] = 2.0
    assert store.float().sum().item() == 2.0 * store[1:2].numel()
    assert store.is_contiguous()


def test_an_arena_gives_copies_that_do_not_overlap_and_outlive_it() -> None:
    arena = HugePageArena()
    tensors = [torch.randn(3, 5), torch.randn(1, 7).bfloat16(), torch.arange(9)]
    large = torch.arange(17 << 20, dtype=torch.int32)  # more than a mapping holds
    copies = [arena.copy(tensor) for tensor in (*tensors, large, *tensors)]
    del arena
    gc.collect()
    for tensor, copy in zip((*tensors, large, *tensors), copies, strict=True):
        assert torch.equal(copy, tensor)
        assert copy.data_ptr() % 64 == 0


def test_an_arena_makes_a_transposed_tensor_contiguous() -> None:
    tensor = torch.randn(6, 4).T
    copied = HugePageArena().copy(tensor)
    assert copied.is_contiguous()
    assert torch.equal(copied, tensor)
