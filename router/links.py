"""How fast KV travels between two instances: by where they are, corrected by what was measured.

Links are taken by class (same node, same zone, or farther), since one of hundreds of pairs is
measured too rarely; a pair that was measured often enough, or whose sender reports what it measures
(see ``kvtransfer.link``), goes by its own rate. A rate is an exponential mean of bytes per
millisecond. Bounded: pairs beyond ``MAX_PAIRS`` stay with their class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from isthmus.common.cluster import InstanceInfo
from isthmus.common.ids import InstanceId

SETUP_MS = 2.0
SMOOTHING = 0.1
ENOUGH = 8
MAX_PAIRS = 8_192
MIN_BYTES = 2**16  # less says more about set-up than about the link
NOTABLE = 0.1  # change of a rate, below which tables need not be made anew


class LinkClass(Enum):
    NODE = "node"
    ZONE = "zone"
    FAR = "far"


# bytes/ms, until one is measured: shared memory, a network card, a share of the way between zones
FIRST_RATES = {LinkClass.NODE: 5e6, LinkClass.ZONE: 2e6, LinkClass.FAR: 5e5}
Pair = tuple[InstanceId, InstanceId]
Floats = NDArray[np.float64]


@dataclass(slots=True)
class _Rate:
    value: float
    num_samples: int = 0
    published: float = 0.0

    def learn(self, measured: float) -> bool:
        """True when it has moved notably since it was last looked at."""
        weight = max(SMOOTHING, 1.0 / (self.num_samples + 1))
        self.value += weight * (measured - self.value)
        self.num_samples += 1
        return self._has_moved()

    def replace(self, mean: float) -> bool:
        """Takes another's mean for its own. True as for ``learn``."""
        self.value = mean
        self.num_samples = max(self.num_samples, ENOUGH)
        return self._has_moved()

    def _has_moved(self) -> bool:
        if abs(self.value - self.published) <= NOTABLE * self.published:
            return False
        self.published = self.value
        return True


class Links:
    def __init__(self) -> None:
        self._classes = {name: _Rate(rate, 0, rate) for name, rate in FIRST_RATES.items()}
        self._pairs: dict[Pair, _Rate] = {}
        self.version = 0  # grows when a rate has changed notably

    def rates(self, sources: Sequence[InstanceInfo], targets: Sequence[InstanceInfo]) -> Floats:
        """Bytes/ms, [sources, targets]."""
        of_class = {name: rate.value for name, rate in self._classes.items()}
        rates: Floats = np.full((len(sources), len(targets)), of_class[LinkClass.FAR])
        nodes: dict[str, list[int]] = {}
        zones: dict[str, list[int]] = {}
        for column, target in enumerate(targets):
            zones.setdefault(target.zone, []).append(column)
            if target.node:
                nodes.setdefault(target.node, []).append(column)
        rows = {source.instance_id: row for row, source in enumerate(sources)}
        for row, source in enumerate(sources):
            rates[row, zones.get(source.zone, [])] = of_class[LinkClass.ZONE]
            rates[row, nodes.get(source.node, [])] = of_class[LinkClass.NODE]
        places = {target.instance_id: column for column, target in enumerate(targets)}
        for (source_id, target_id), own in self._pairs.items():
            if own.num_samples >= ENOUGH and source_id in rows and target_id in places:
                rates[rows[source_id], places[target_id]] = own.value
        return rates

    def rate(self, source: InstanceInfo | None, target: InstanceInfo) -> float:
        """Bytes/ms of one link, as ``rates`` says it; of None: from somewhere in the zone."""
        if source is None:
            return self._classes[LinkClass.ZONE].value
        own = self._pairs.get((source.instance_id, target.instance_id))
        if own is not None and own.num_samples >= ENOUGH:
            return own.value
        return self._classes[link_class(source, target)].value

    def observe(
        self, source: InstanceInfo, target: InstanceInfo, num_bytes: int, elapsed_ms: float
    ) -> None:
        """A transfer took ``elapsed_ms`` from its first byte to its last."""
        if num_bytes < MIN_BYTES or elapsed_ms <= 0:
            return
        rate = num_bytes / elapsed_ms
        has_moved = self._classes[link_class(source, target)].learn(rate)
        pair = source.instance_id, target.instance_id
        own = self._pairs.get(pair)
        if own is None and len(self._pairs) < MAX_PAIRS:
            own = self._pairs[pair] = _Rate(rate)
        if own is not None:
            has_moved = (own.learn(rate) and own.num_samples >= ENOUGH) or has_moved
        self.version += has_moved

    def reported(self, source: InstanceInfo, target: InstanceInfo, bytes_per_ms: float) -> None:
        """``source`` measures what it sends and keeps a mean of its own: that one counts."""
        pair = source.instance_id, target.instance_id
        own = self._pairs.get(pair)
        if own is None:
            if len(self._pairs) >= MAX_PAIRS:
                return
            own = self._pairs[pair] = _Rate(bytes_per_ms)
        self.version += own.replace(bytes_per_ms)

    def forget(self, instance_id: InstanceId) -> None:
        """The instance is gone, or has restarted elsewhere."""
        for pair in [pair for pair in self._pairs if instance_id in pair]:
            del self._pairs[pair]


def link_class(source: InstanceInfo, target: InstanceInfo) -> LinkClass:
    """Nodes without a name are different ones, in the same zone where none is named."""
    if source.node and source.node == target.node:
        return LinkClass.NODE
    return LinkClass.ZONE if source.zone == target.zone else LinkClass.FAR
