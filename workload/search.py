"""The highest rate at which enough calls are good: doubling, then bisection by ratio.

As in DistServe (OSDI '24, section 4) the answer is the largest rate whose attainment reaches the
asked one. Attainment falls with the rate but for noise: a probe that fails is believed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RateSearch:
    """``rate`` is the one to try next, until ``is_over``; then ``passing`` is the answer, within
    ``tolerance`` (a share of it) of one that fails. It is 0 when not even ``lowest`` passes, and
    ``is_capped`` when ``highest`` does."""

    rate: float
    tolerance: float
    lowest: float
    highest: float
    passing: float = 0.0
    failing: float = 0.0
    is_capped: bool = False
    is_over: bool = False

    def tell(self, *, is_enough: bool) -> None:
        """What the run at ``rate`` came to."""
        if is_enough:
            self.passing = self.rate
        else:
            self.failing = self.rate
        if self.passing and self.failing:
            self.is_over = self.failing <= self.passing * (1 + self.tolerance)
            # The middle by ratio, as the tolerance is one.
            self.rate = (self.passing * self.failing) ** 0.5
        elif is_enough:
            self.is_over = self.is_capped = self.rate >= self.highest
            self.rate = min(2 * self.rate, self.highest)
        else:
            self.is_over = self.rate <= self.lowest
            self.rate = max(self.rate / 2, self.lowest)
