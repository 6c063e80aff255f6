"""Recursive least squares with forgetting, for a linear model of which a good first guess is known.

    y ≈ Σ θᵢ · gᵢ · xᵢ        gᵢ the guessed coefficients, θ what they are multiplied by

θ starts at 1 and is learned (L. Ljung, System Identification, 2nd ed., §11.2). Working on multiples
of a guess keeps features of unlike size (tokens, token pairs) on one scale, in milliseconds. Where
a guess is nothing to multiply, θ starts at 0 and another scale takes its place (``of``).

Forgetting ends at a little that is always known (Salgado, Goodwin and Middleton, Int. J. Control
47, 1988): of a coefficient that nothing varies no sample tells anything, and doubt of it that grew
without end would have to be cut, together with the doubt by which the others learn. Errors that all
have one sign are a change and no noise (Trigg and Leach's tracking signal, Oper. Res. Quarterly 18,
1967): then less is remembered, and half the speed is known after some thirty samples.

Bounded on purpose: an outlier counts as far as a few times the usual error (Huber); θ stays within
``RANGE``, or begins at 0 and stays below its end. Three coefficients, plain floats: for so few,
numpy costs more than it saves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite

FORGETTING = 0.98  # about 50 samples are remembered …
HASTY = 0.8  # … and about five, where all errors have one sign
SURE = 0.6  # share of the usual error that has one sign, from which on that is no chance
KNOWN = 4.0  # at the start: 1 / variance of each θ …
LEAST_KNOWN = 0.3  # … and when no sample has told of it for long
RANGE = (0.05, 20.0)
NOTHING = 1e-3
HUBER = 3.0
ERROR_SMOOTHING = 0.1
LEAST_ERROR = 0.02  # of the whole: a perfect fit must still be able to move

Triple = tuple[float, float, float]


def _start() -> list[float]:
    return [KNOWN, 0.0, 0.0, KNOWN, 0.0, KNOWN]


@dataclass(slots=True)
class RecursiveFit:
    """``scale``: what θ multiplies, of each coefficient; ``lowest``: below which no θ goes."""

    scale: Triple
    theta: list[float] = field(default_factory=lambda: [1.0, 1.0, 1.0])
    lowest: list[float] = field(default_factory=lambda: [RANGE[0]] * 3)
    known: list[float] = field(default_factory=_start)  # the covariance's inverse, upper triangle
    error: float = 0.0  # usual size of one, as a share …
    bias: float = 0.0  # … and usual one with its sign
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
        self.bias += ERROR_SMOOTHING * (clipped - self.bias)
        self._update(x, clipped)

    def _memory(self) -> float:
        """What is left of earlier samples when one more comes."""
        one_sided = min(1.0, abs(self.bias) / max(self.error, LEAST_ERROR))
        haste = max(0.0, one_sided - SURE) / (1.0 - SURE)
        return FORGETTING - haste * (FORGETTING - HASTY)

    def _update(self, x: list[float], error: float) -> None:
        left = self._memory()
        fresh = (1.0 - left) * LEAST_KNOWN
        known, (x0, x1, x2) = self.known, x
        a = known[0] = left * known[0] + fresh + x0 * x0
        b = known[1] = left * known[1] + x0 * x1
        c = known[2] = left * known[2] + x0 * x2
        d = known[3] = left * known[3] + fresh + x1 * x1
        e = known[4] = left * known[4] + x1 * x2
        f = known[5] = left * known[5] + fresh + x2 * x2
        # The step is known⁻¹ · x · error. No eigenvalue is less than ``LEAST_KNOWN``, so det > 0.
        aa, bb, cc = d * f - e * e, c * e - b * f, b * e - c * d
        dd, ee, ff = a * f - c * c, b * c - a * e, a * d - b * b
        weight = error / (a * aa + b * bb + c * cc)
        steps = (
            weight * (aa * x0 + bb * x1 + cc * x2),
            weight * (bb * x0 + dd * x1 + ee * x2),
            weight * (cc * x0 + ee * x1 + ff * x2),
        )
        for place, step in enumerate(steps):
            theta = self.theta[place] + step
            self.theta[place] = min(max(theta, self.lowest[place]), RANGE[1])
