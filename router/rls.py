"""Recursive least squares with forgetting, for a linear model of which a good first guess is known.

    y ≈ Σ θᵢ · gᵢ · xᵢ        gᵢ the guessed coefficients, θ what they are multiplied by

θ starts at 1 and is learned (L. Ljung, System Identification, 2nd ed., §11.2). Working on multiples
of a guess keeps features of unlike size (tokens, token pairs) on one scale, in milliseconds.

Bounded on purpose: an outlier counts as far as a few times the usual error (Huber); the
covariance's trace is capped, so that long sameness cannot make the next odd sample overturn
everything; θ stays within ``RANGE``. Three coefficients, plain floats: for so few, numpy costs
more than it saves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite

FORGETTING = 0.98  # about 50 samples are remembered
START_VARIANCE = 0.25
MAX_TRACE = 3.0
RANGE = (0.05, 20.0)
HUBER = 3.0
ERROR_SMOOTHING = 0.1
LEAST_ERROR = 0.02  # of the whole: a perfect fit must still be able to move

Triple = tuple[float, float, float]


def _start() -> list[list[float]]:
    return [[START_VARIANCE if i == j else 0.0 for j in range(3)] for i in range(3)]


@dataclass(slots=True)
class RecursiveFit:
    guess: Triple
    theta: list[float] = field(default_factory=lambda: [1.0, 1.0, 1.0])
    covariance: list[list[float]] = field(default_factory=_start)
    error: float = 0.0  # usual size of one, as a share
    num_samples: int = 0

    @property
    def coefficients(self) -> Triple:
        (a, b, c), (x, y, z) = self.guess, self.theta
        return a * x, b * y, c * z

    def predict(self, features: Triple) -> float:
        return sum(c * x for c, x in zip(self.coefficients, features, strict=True))

    def observe(self, features: Triple, measured_ms: float) -> None:
        """One sample. What is not finite, or negative, is not a measurement and is ignored."""
        x = [g * f for g, f in zip(self.guess, features, strict=True)]
        size = sum(x)
        if not isfinite(size + measured_ms) or measured_ms < 0 or size <= 0:
            return
        # Divided by their size, so that a long step does not count more than many short ones.
        x = [value / size for value in x]
        y = measured_ms / size
        error = y - sum(t * value for t, value in zip(self.theta, x, strict=True))
        usual = max(self.error, LEAST_ERROR)
        self.num_samples += 1
        if self.num_samples > 1:
            clipped = max(-HUBER * usual, min(HUBER * usual, error))
        else:
            clipped, usual = error, abs(error)
        # A usual error that grows by half at most a sample: one spike cannot open the gate.
        self.error = usual + ERROR_SMOOTHING * (min(abs(error), 6.0 * usual) - usual)
        self._update(x, clipped)

    def _update(self, x: list[float], error: float) -> None:
        p = self.covariance
        px = [sum(row[j] * x[j] for j in range(3)) for row in p]
        gain = FORGETTING + sum(x[i] * px[i] for i in range(3))
        low, high = RANGE
        for i in range(3):
            self.theta[i] = min(max(self.theta[i] + px[i] * error / gain, low), high)
            for j in range(3):
                p[i][j] = (p[i][j] - px[i] * px[j] / gain) / FORGETTING
        trace = p[0][0] + p[1][1] + p[2][2]
        if trace > MAX_TRACE:
            for row in p:
                for j in range(3):
                    row[j] *= MAX_TRACE / trace
