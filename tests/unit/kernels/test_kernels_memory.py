from __future__ import annotations

import gc

import pytest
import torch

from isthmus.kernels.memory import zeros_in_huge_pages


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
