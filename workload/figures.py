"""How figures of many calls are told: percentiles by nearest rank, the same live and simulated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds over the calls that have the figure; all zero when none has."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def spread(values: Iterable[float | None]) -> Spread:
    known = sorted(value for value in values if value is not None)
    if not known:
        return Spread(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    middle, high, tail = (quantile(known, q) for q in QUANTILES)
    return Spread(len(known), sum(known) / len(known), middle, high, tail, known[-1])


def quantile(ordered: Sequence[float], q: float) -> float:
    """The smallest value that at least a share q does not exceed (nearest rank)."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]
