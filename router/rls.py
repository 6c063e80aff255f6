"""Recursive least squares with forgetting, for a linear model of which a good first guess is known.

    y ≈ Σ θᵢ · gᵢ · xᵢ        gᵢ the guessed coefficients, θ what they are multiplied by

θ starts at 1 and is learned (L. Ljung, System Identification, 2nd ed., §11.2). Working on multiples
of a guess keeps features of unlike size (tokens, token pairs) on one scale, in milliseconds. Where
a guess is nothing to multiply, θ starts at 0 and another scale takes its place (``of``).

Bounded on purpose: an outlier counts as far as a few times the usual error (Huber); the
covariance's trace is capped, so that long sameness cannot make the next odd sample overturn
everything; θ stays within ``RANGE``, or begins at 0 and stays below its end. Three coefficients,
plain floats: for so few, numpy costs more than it saves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite

FORGETTING = 0.98  # about 50 samples are remembered
START_VARIANCE = 0.25
MAX_TRACE = 3.0
RANGE = (0.05, 20.0)
NOTHING = 1e-3
HUBER = 3.0
ERROR_SMOOTHING = 0.1
LEAST_ERROR = 0.02  # of the whole: a perfect fit must still be able to move

Triple = tuple[float, float, float]


def _start() -> list[list[float]]:
    return [[START_VARIANCE if i == j else 0.0 for j in range(3)] for i in range(3)]


@dataclass(slots=True)
class RecursiveFit:
    """``scale``: what θ multiplies, of each coefficient; ``lowest``: below which no θ goes."""

    scale: Triple
    theta: list[float] = field(default_factory=lambda: [1.0, 1.0, 1.0])
    lowest: list[float] = field(default_factory=lambda: [RANGE[0]] * 3)
    covariance: list[list[float]] = field(default_factory=_start)
    error: float = 0.0  # usual size of one, as a share
    num_samples: int = 0

    @classmethod
    def of(cls, guess: Triple, instead: Triple = (0.0, 0.0, 0.0)) -> RecursiveFit:
        """``instead``: the scale of a coefficient of which the guess is less than ``NOTHING`` of
        that; 0 = the guess in any case."""
        fit = cls(guess)
        lost = [g < NOTHING * other for g, other in zip(guess, instead, strict=True)]
        a, b, c = (o if is_lost else g for g, o, is_lost in zip(guess, instead, lost, strict=True))
        fit.scale = a, b, c
        for place, is_lost in enumerate(lost):
            if is_lost:
                fit.theta[place] = fit.lowest[place] = 0.0
        return fit

    @property
    def coefficients(self) -> Triple:
        (a, b, c), (x, y, z) = self.scale, self.theta
        return a * x, b * y, c * z

    def predict(self, features: Triple) -> float:
        return sum(c * x for c, x in zip(self.coefficients, features, strict=True))

    def observe(self, features: Triple, measured_ms: float) -> None:
        """One sample. What is not finite, or negative, is not a measurement and is ignored."""
        x = [s * f for s, f in zip(self.scale, features, strict=True)]
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
        for i in range(3):
            theta = self.theta[i] + px[i] * error / gain
            self.theta[i] = min(max(theta, self.lowest[i]), RANGE[1])
            for j in range(3):
                p[i][j] = (p[i][j] - px[i] * px[j] / gain) / FORGETTING
        trace = p[0][0] + p[1][1] + p[2][2]
        if trace > MAX_TRACE:
            for row in p:
                for j in range(3):
                    row[j] *= MAX_TRACE / trace
