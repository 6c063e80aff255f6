"""How long prompts and answers are: a distribution by a short text.

::

    128                 always 128
    64-512              uniform, both ends included
    lognormal:512:0.8   median 512, sigma of the logarithm 0.8
    exponential:200     mean 200
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from isthmus.common.errors import ConfigError

Counts = npt.NDArray[np.int64]
_NUM_PARAMETERS = {"lognormal": 2, "exponential": 1}


class Shape(Enum):
    CONSTANT = "constant"
    UNIFORM = "uniform"
    LOGNORMAL = "lognormal"
    EXPONENTIAL = "exponential"


@dataclass(frozen=True, slots=True)
class Lengths:
    """``first`` and ``second`` as in the module docstring; draws are cut to ``limit``."""

    shape: Shape
    first: float
    second: float = 0.0
    limit: int = 1_000_000

    def draw(self, count: int, rng: np.random.Generator) -> Counts:
        """[count] int64, each from 1 to ``limit``."""
        match self.shape:
            case Shape.CONSTANT:
                drawn = np.full(count, self.first)
            case Shape.UNIFORM:
                drawn = rng.integers(int(self.first), int(self.second) + 1, count).astype(float)
            case Shape.LOGNORMAL:
                drawn = rng.lognormal(np.log(self.first), self.second, count)
            case Shape.EXPONENTIAL:
                drawn = rng.exponential(self.first, count)
        counts: Counts = np.clip(np.rint(drawn), 1, self.limit).astype(np.int64)
        return counts


def parse_lengths(text: str, limit: int = 1_000_000) -> Lengths:
    """Raises ConfigError, naming the forms there are, for anything else."""
    try:
        return _parse(text.strip(), limit)
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"lengths '{text}': write 128, 64-512, lognormal:MEDIAN:SIGMA or exponential:MEAN, "
            "with positive numbers",
            stage="workload",
        ) from error


def _parse(text: str, limit: int) -> Lengths:
    name, colon, rest = text.partition(":")
    if colon:
        numbers = [float(item) for item in rest.split(":")]
        if len(numbers) != _NUM_PARAMETERS[name] or min(numbers) <= 0:
            raise ValueError(text)
        return Lengths(Shape(name), numbers[0], numbers[-1], limit)
    low, dash, high = text.partition("-")
    first = int(low)
    second = int(high) if dash else first
    if not 1 <= first <= second:
        raise ValueError(text)
    return Lengths(Shape.UNIFORM if dash else Shape.CONSTANT, first, second, limit)
