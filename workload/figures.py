"""How figures of many calls are told: percentiles by nearest rank, the same live and simulated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds over the calls that have the figure; None when none has: no figure is not a
    perfect one."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None


def spread(values: Iterable[float | None]) -> Spread:
    known = sorted(value for value in values if value is not None)
    if not known:
        return Spread(0)
    middle, high, tail = (quantile(known, q) for q in QUANTILES)
    return Spread(len(known), sum(known) / len(known), middle, high, tail, known[-1])


def written(figure: float | None, digits: int = 0) -> str:
    """For people: with so many digits behind the point, or a dash."""
    return "–" if figure is None else f"{figure:.{digits}f}"


def quantile(ordered: Sequence[float], q: float) -> float:
    """The smallest value that at least a share q does not exceed (nearest rank)."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]
