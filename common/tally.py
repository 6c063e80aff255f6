"""A histogram for what happens once a token, or many times a request.

prometheus_client's own takes locks and walks over its buckets, for one observation at a time. This
one is written by one thread, and takes equal observations together; it is read like any other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Tally:
    """What was observed under one set of labels."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """``count`` observations of one value."""
        self.counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count


class TallyHistogram(Collector):
    """``buckets``: upper bounds, ascending and not negative, each bound within its bucket; +Inf is
    added."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labelnames: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        assert list(buckets) == sorted(buckets), "bounds ascend"
        assert buckets[0] >= 0, "of negative ones there would be no sum"
        self.labelnames = tuple(labelnames)
        self._name, self._documentation = name, documentation
        self._bounds = tuple(float(bound) for bound in buckets)
        self._tallies: dict[tuple[str, ...], Tally] = {}
        self._whole = None if labelnames else self.labels()
        registry.register(self)

    def labels(self, **labels: str) -> Tally:
        """Looked up once: it costs more than an observation. Raises KeyError without a label."""
        key = tuple([labels[name] for name in self.labelnames])
        tally = self._tallies.get(key)
        if tally is None:
            tally = self._tallies[key] = Tally(self._bounds)
        return tally

    def observe(self, value: float, count: int = 1) -> None:
        """As of a ``Tally``, where there are no labels."""
        assert self._whole is not None, "with labels, those say where it goes"
        self._whole.observe(value, count)

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self.labelnames)
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for key, tally in list(self._tallies.items()):
            buckets = list(zip(names, accumulate(tally.counts), strict=True))
            family.add_metric(key, buckets, tally.sum)
        yield family

    def describe(self) -> Iterable[HistogramMetricFamily]:
        return self.collect()
