"""The goodput ratio of the last minute, by class of service and tenant.

A request enters when it ends. Time passes in periods, so that memory is bounded by the number of
classes and tenants whatever the rate.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from isthmus.common import metrics
from isthmus.common.clock import NS_PER_S, Clock

PERIOD_S = 5
NUM_PERIODS = 12
Key = tuple[str, str]  # class of service, tenant


@dataclass(slots=True)
class _Period:
    number: int
    offered: dict[Key, int] = field(default_factory=dict)
    good: dict[Key, int] = field(default_factory=dict)


class GoodputWindow:
    """One thread. ``publish`` sets the gauges: before they are read, since time alone changes
    them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._periods: deque[_Period] = deque(maxlen=NUM_PERIODS)
        self._published: set[Key] = set()

    def add(self, slo_class: str, tenant: str, *, is_good: bool) -> None:
        """A request that was offered has ended."""
        period, key = self._current(), (slo_class, tenant)
        period.offered[key] = period.offered.get(key, 0) + 1
        if is_good:
            period.good[key] = period.good.get(key, 0) + 1

    def ratios(self) -> dict[Key, float]:
        """Of everybody who had a request end within the window."""
        oldest = self._number() - NUM_PERIODS
        recent = [period for period in self._periods if period.number > oldest]
        keys = {key for period in recent for key in period.offered}
        return {key: _ratio(recent, key) for key in keys}

    def publish(self) -> None:
        ratios = self.ratios()
        for slo_class, tenant in self._published - ratios.keys():
            metrics.GOODPUT_RATIO.remove(slo_class, tenant)
        for (slo_class, tenant), ratio in ratios.items():
            metrics.GOODPUT_RATIO.labels(slo_class=slo_class, tenant=tenant).set(ratio)
        self._published = set(ratios)

    def _number(self) -> int:
        return self._clock.monotonic_ns() // (PERIOD_S * NS_PER_S)

    def _current(self) -> _Period:
        number = self._number()
        if not self._periods or self._periods[-1].number != number:
            self._periods.append(_Period(number))
        return self._periods[-1]


def _ratio(periods: list[_Period], key: Key) -> float:
    offered = sum(period.offered.get(key, 0) for period in periods)
    return sum(period.good.get(key, 0) for period in periods) / offered
