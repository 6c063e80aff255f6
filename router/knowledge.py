"""What the router learns from outcomes, beside what each instance's view has learned of itself.

Also the publisher of what it is worth: coverage of the predicted quantiles, with an alarm when it
is off by more than ``TOLERANCE``, and what was kept of all that was promised.
"""

from __future__ import annotations

from isthmus.common import metrics
from isthmus.router.lengths import OutputLengths
from isthmus.router.links import Links
from isthmus.router.prices import PriceBook
from isthmus.router.quantiles import ResidualTable

TOLERANCE = 0.05
ENOUGH = 100  # measurements, below which a coverage says nothing


class Knowledge:
    def __init__(self, links: Links) -> None:
        """``links`` are the state's: instances report how fast theirs are."""
        self.residuals = ResidualTable()
        self.lengths = OutputLengths()
        self.prices = PriceBook()
        self.links = links

    def publish(self) -> None:
        """Sets the gauges."""
        for kind, quantile in self.residuals.levels():
            coverage, count = self.residuals.coverage(kind, quantile)
            labels = {"kind": kind.value, "quantile": f"{quantile:g}"}
            metrics.PREDICTION_COVERAGE.labels(**labels).set(coverage)
            metrics.PROMISES_KEPT.labels(**labels).set(self.residuals.kept(kind, quantile)[0])
            is_off = count >= ENOUGH and abs(coverage - quantile) > TOLERANCE
            metrics.PREDICTION_ALARM.labels(**labels).set(is_off)
        prices = self.prices.current
        for resource, price in (("prefill", prices.prefill), ("decode", prices.decode)):
            metrics.SHADOW_PRICE.labels(resource=resource).set(price)
