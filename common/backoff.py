"""How long to wait before trying a peer again: growing, bounded and jittered.

Jitter matters more than the growth: a registry that comes back after a pause must not meet every
client in the same millisecond.
"""

from __future__ import annotations

import random
from collections.abc import Callable

RETRY_RANGE_MS = (1_000, 60_000)
SHORT_WAIT_MS = 1_000
"""For ``retry_after_ms``, where nobody can tell how long it takes."""


class Backoff:
    """Waits of ``initial_s``, twice that, … up to ``cap_s``, each scaled by a random 0.5 … 1."""

    def __init__(
        self,
        initial_s: float = 0.05,
        cap_s: float = 2.0,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._initial_s = initial_s
        self._cap_s = cap_s
        self._uniform = uniform
        self._ceiling_s = initial_s

    def next_s(self) -> float:
        wait_s = self._ceiling_s * self._uniform(0.5, 1.0)
        self._ceiling_s = min(self._cap_s, self._ceiling_s * 2)
        return wait_s

    def lasted(self, seconds: float) -> None:
        """What was tried again went well for so long: only what outlives the longest wait counts as
        mended, or what breaks at once would be tried at once for ever."""
        if seconds >= self._cap_s:
            self.reset()

    def reset(self) -> None:
        self._ceiling_s = self._initial_s


def retry_after_ms(wait_ms: float) -> int:
    """What a refused client is told to wait: jittered by a fifth, so that the refused do not come
    back together; 1 to 60 seconds."""
    low, high = RETRY_RANGE_MS
    return int(min(max(wait_ms * random.uniform(0.8, 1.2), low), high))
