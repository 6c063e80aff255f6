"""Memory for large stores that are read at random."""

from __future__ import annotations

import math
import mmap

import torch


def zeros_in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A zeroed CPU tensor of its own mapping, for which the system is asked to use huge pages.

    Blocks of a paged store lie scattered; with 4 KiB pages nearly every one costs address look-ups
    (attention over a cold store was about a quarter faster with huge pages). Pages are taken when
    they are first written. A system without huge pages gives ordinary ones.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.zeros(shape, dtype=dtype)
    mapping = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=dtype).view(shape)
