"""When calls come: gaps of mean 1 / rate, as regular or as bursty as asked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Gaps are gamma distributed with coefficient of variation ``cv``: 1 is a Poisson process, more
    is burstier, 0 is a clock."""

    rate: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        if self.rate <= 0 or self.cv < 0:
            raise ValueError(
                f"arrivals need rate > 0 and cv >= 0, not {self.rate:g} and {self.cv:g}"
            )


def arrival_times(arrivals: Arrivals, count: int, rng: np.random.Generator) -> Times:
    """[count] seconds, ascending; the first comes one gap after 0."""
    mean_s = 1 / arrivals.rate
    if arrivals.cv == 0:
        gaps = np.full(count, mean_s)
    else:
        shape = arrivals.cv**-2  # of a gamma distribution: cv = 1 / sqrt(shape)
        gaps = rng.gamma(shape, mean_s / shape, count)
    return np.cumsum(gaps)
