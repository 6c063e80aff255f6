"""How long a piece of work takes on the device, and how often memory is taken from the driver.

A device's caches hold what the last repetition read; a step of a model never finds its weights and
KV there. So a buffer larger than the caches is overwritten before each repetition. It takes the
device a while, in which the host launches what is timed: no gap between two kernels is the host's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch

Action = Callable[[], object]

FLUSH_BYTES = 2**30  # the L2 of any card many times over (B200: 126 MB); 0.2 ms or more
WARM_UPS = 3
REPEATS = 20
BUDGET_S = 0.4  # of one measurement; slow work is repeated less often
LEAST_REPEATS = 5


class Timer(Protocol):
    def seconds(self, action: Action) -> float:
        """The median of several runs; ``action`` was run before, so that nothing is compiled."""
        ...


class CudaTimer:
    """Between two events on the current stream: what the device does, without the launch."""

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def seconds(self, action: Action) -> float:
        for _ in range(WARM_UPS):
            action()
        torch.cuda.synchronize()
        samples = [self._once(action)]
        while len(samples) < REPEATS:
            if sum(samples) > BUDGET_S and len(samples) >= LEAST_REPEATS:
                break
            samples.append(self._once(action))
        return statistics.median(samples)

    def _once(self, action: Action) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        start.record()
        action()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


class HostTimer:
    """The wall clock, for work on the CPU: it shows that the script runs, not what a card does."""

    def __init__(self, repeats: int = 1) -> None:
        self._repeats = repeats

    def seconds(self, action: Action) -> float:
        samples = []
        for _ in range(self._repeats):
            began = time.perf_counter()
            action()
            samples.append(time.perf_counter() - began)
        return statistics.median(samples)


def num_allocations() -> int:
    """How often torch's allocator has handed memory out; on the CPU it is not known: 0."""
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])
