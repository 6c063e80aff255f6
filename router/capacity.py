"""How much work the workers of a pool can have done by when, as they stand.

A worker that has w ms to do yet and is s times as fast as the one that work is measured on does
``s · max(0, t − w)`` by t; the pool does the sum of that. So a worker that computes a prompt of
minutes is none for whoever has seconds, without being counted out for whoever has more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Capacity:
    """``waits``: milliseconds, ``speeds``: beside the fastest; one entry a worker. ``helpers``:
    workers more, of elsewhere, which begin at once."""

    waits: Floats
    speeds: Floats
    helpers: float = 0.0

    @classmethod
    def even(cls, num_workers: float, wait_ms: float = 0.0) -> Capacity:
        """Of alike workers that all have as much to do; their number need not be whole."""
        return cls(np.array([wait_ms]), np.array([float(num_workers)]))

    @property
    def first_ms(self) -> float:
        """Until one of them has nothing to do; 0 without any."""
        return float(self.waits.min()) if self.waits.size else 0.0

    def lost_ms(self, later: Capacity, passed_ms: float) -> float:
        """How much less at most the pool can have done by any time than was thought ``passed_ms``
        ago, now that it stands as ``later``; infinite where that cannot be said."""
        if later.speeds.shape != self.speeds.shape or later.helpers < self.helpers:
            return NEVER
        delays = np.maximum(later.waits + passed_ms - self.waits, 0.0)
        slower = np.maximum(self.speeds - later.speeds, 0.0)
        if slower.any():
            return NEVER
        return float(delays @ self.speeds) + self.helpers * passed_ms

    def by(self, times_ms: Floats) -> Floats:
        """Work that can be done by each of ``times_ms``; for times that have passed, how long ago
        that was, negative."""
        free = np.maximum(times_ms[:, None] - self.waits, 0.0)
        done: Floats = free @ self.speeds + self.helpers * np.maximum(times_ms, 0.0)
        return done + np.minimum(times_ms, 0.0)
