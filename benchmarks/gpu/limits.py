"""What this card allows: the rate of a large copy and of a large bf16 matrix product."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.gpu.timing import Timer

COPY_BYTES = 2**30
MATRIX_SIZE = 8192


@dataclass(frozen=True, slots=True)
class CardLimits:
    """``bytes_per_s`` counts what is read and what is written."""

    bytes_per_s: float
    flops_per_s: float

    def seconds(self, num_bytes: float, flops: float) -> float:
        """The least time for work that moves so many bytes and computes so much, side by side."""
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


def measure_limits(
    timer: Timer, device: str, copy_bytes: int = COPY_BYTES, matrix_size: int = MATRIX_SIZE
) -> CardLimits:
    copy_s = _copy_seconds(timer, device, copy_bytes)
    product_s = _product_seconds(timer, device, matrix_size)
    return CardLimits(2 * copy_bytes / copy_s, 2 * matrix_size**3 / product_s)


def _copy_seconds(timer: Timer, device: str, num_bytes: int) -> float:
    source = torch.zeros(num_bytes // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return timer.seconds(lambda: target.copy_(source))


def _product_seconds(timer: Timer, device: str, size: int) -> float:
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return timer.seconds(lambda: a @ b)
