"""Shadow prices: what a second of each pool is worth beside the other's, as misses show it.

A pool whose targets are missed more often than its classes allow is scarce: its price rises, and
choices that spare it (a local prefill where prefill is scarce, a pair where decode is) win more
often; a pool that keeps its targets gets cheaper again, down to 1. The law is multiplicative, once
an interval: price ← price^decay · exp(gain · max(0, miss rate − allowed)).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import exp

from isthmus.common.clock import NS_PER_MS

INTERVAL_MS = 1_000
GAIN = 2.0
DECAY = 0.97
RANGE = (1.0, 8.0)
ENOUGH = 4  # outcomes in an interval, below which it says nothing


class Stage(Enum):
    """Whose target it is."""

    PREFILL = "prefill"  # TTFT
    DECODE = "decode"  # TPOT

    __hash__ = object.__hash__  # an enum's own is computed in Python


@dataclass(frozen=True, slots=True)
class Prices:
    """Of a second of a prefill instance and of a decode instance."""

    prefill: float = 1.0
    decode: float = 1.0


@dataclass(slots=True)
class _Count:
    total: int = 0
    missed: int = 0
    allowed: float = 0.0


@dataclass(slots=True)
class PriceBook:
    """Owned by the router. All times are its monotonic clock."""

    current: Prices = field(default_factory=Prices)
    _counts: dict[Stage, _Count] = field(default_factory=lambda: {s: _Count() for s in Stage})
    _updates_ns: int = 0

    def count(self, stage: Stage, quantile: float, has_missed: bool, now_ns: int) -> None:
        """A request with a target for ``stage`` has met or missed it."""
        count = self._counts[stage]
        count.total += 1
        count.missed += has_missed
        count.allowed += 1.0 - quantile
        self.refresh(now_ns)

    def refresh(self, now_ns: int) -> None:
        if now_ns < self._updates_ns:
            return
        self._updates_ns = now_ns + INTERVAL_MS * NS_PER_MS
        counts, self._counts = self._counts, {stage: _Count() for stage in Stage}
        self.current = Prices(
            prefill=_moved(self.current.prefill, counts[Stage.PREFILL]),
            decode=_moved(self.current.decode, counts[Stage.DECODE]),
        )


def _moved(price: float, count: _Count) -> float:
    excess = 0.0
    if count.total >= ENOUGH:
        excess = max(0.0, (count.missed - count.allowed) / count.total)
    low, high = RANGE
    moved = float(price**DECAY) * exp(GAIN * excess)
    return min(max(moved, low), high)
