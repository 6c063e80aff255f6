"""Memory in huge pages, for what is read at the speed of memory; and memory that others can map.

With pages of 4 KiB the processor looks up an address every few hundred nanoseconds, and fetching
ahead stops at the end of a page. Streaming weights took two thirds of the time in huge pages, and
attention over a cold store three quarters. A system without huge pages gives ordinary ones. Shared
memory has them only where the system's owner has allowed it (``shmem_enabled``).
"""

from __future__ import annotations

import math
import mmap

import torch

from isthmus.common.shared_memory import create_shared_memory

_ALIGNMENT = 64  # a cache line
_ARENA_BYTES = 64 << 20


def zeros_in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A zeroed CPU tensor of its own mapping. Pages are taken when they are first written."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(_mapping(num_bytes), dtype=dtype).view(shape)


def zeros_in_shared_memory(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """A zeroed CPU tensor that other processes can map, and the descriptor of its file, which is
    the caller's to close: see ``isthmus.common.shared_memory``. Raises OSError."""
    mapping, fd = create_shared_memory(math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(mapping, dtype=dtype).view(shape), fd


class HugePageArena:
    """Tensors side by side in mappings that are large enough for huge pages; for those that live
    about as long as each other. A mapping lives as long as the last of its tensors."""

    def __init__(self) -> None:
        self._mapping = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy; of any size."""
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes > self._mapping.numel() - self._used:
            size = max(_ARENA_BYTES, num_bytes)
            self._mapping = zeros_in_huge_pages((size,), torch.uint8)
            self._used = 0
        place = self._mapping[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _mapping(num_bytes: int) -> mmap.mmap:
    # Private: pages of shared memory are huge only where the system's owner has allowed it.
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
