"""Fairness between tenants: who waits is served by what his tenant has had for its weight.

Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996) over predicted work: a query's tag is
the later of the virtual time and its tenant's last finish, its tenant's finish moves on by work /
weight, and the virtual time is the tag of who was served last. A tenant that was away has saved
nothing up; one that floods delays itself. Who leaves the line unserved takes his work along.

Under overload the tags say nothing about who is left out, so each tenant's served work is counted
too, decaying with time: whoever has had more than others for its weight counts less when somebody
must go. At most ``MAX_TENANTS`` are remembered; the one served longest ago is forgotten first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import exp

from isthmus.common.clock import NS_PER_S

MAX_TENANTS = 1_024
MEMORY_S = 20.0
LEAST_FACTOR = 0.125


@dataclass(slots=True)
class _Tenant:
    weight: float
    finish: float = 0.0  # virtual, of who was served
    waiting: list[float] = field(default_factory=list)  # finishes of those in line, in order
    served_ms: float = 0.0  # for its weight, decayed
    at_ns: int = 0


class TenantShares:
    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """``weights``: of tenants that have one other than 1."""
        self._weights = dict(weights or {})
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._virtual = 0.0

    def __len__(self) -> int:
        return len(self._tenants)

    def tag(self, tenant: str, work_ms: float) -> float:
        """The place in the line of a query that begins to wait."""
        known = self._of(tenant)
        last = known.waiting[-1] if known.waiting else 0.0
        start = max(self._virtual, known.finish, last)
        insort(known.waiting, start + work_ms / known.weight)
        return start

    def withdrawn(self, tenant: str, tag: float, work_ms: float) -> None:
        """A query with this ``tag`` left the line without being served."""
        known = self._tenants.get(tenant)
        if known is not None:
            _take_out(known.waiting, tag + work_ms / known.weight)

    def served(self, tenant: str, tag: float | None, work_ms: float, now_ns: int) -> None:
        """A query was started. ``tag`` None: it had not waited in line."""
        known = self._of(tenant)
        if tag is not None:
            self._virtual = max(self._virtual, tag)
            finish = tag + work_ms / known.weight
            known.finish = max(known.finish, finish)
            _take_out(known.waiting, finish)
        known.served_ms = self._decayed(known, now_ns) + work_ms / known.weight
        known.at_ns = now_ns

    def factors(self, tenants: Iterable[str], now_ns: int) -> dict[str, float]:
        """What a query of each of these tenants counts beside others when somebody must be left
        out: 1 for whoever has had no more than the mean, less in proportion for whoever has."""
        wanted = dict.fromkeys(tenants, 1.0)
        if len(self._tenants) < 2:
            return wanted
        total = sum(self._decayed(known, now_ns) for known in self._tenants.values())
        mean = total / len(self._tenants)
        for tenant in wanted:
            known = self._tenants.get(tenant)
            mine = self._decayed(known, now_ns) if known is not None else 0.0
            if mine > mean:
                wanted[tenant] = max(LEAST_FACTOR, mean / mine)
        return wanted

    def _of(self, tenant: str) -> _Tenant:
        known = self._tenants.get(tenant)
        if known is None:
            known = self._tenants[tenant] = _Tenant(self._weights.get(tenant, 1.0))
            if len(self._tenants) > MAX_TENANTS:
                self._tenants.popitem(last=False)
        else:
            self._tenants.move_to_end(tenant)
        return known

    def _decayed(self, tenant: _Tenant, now_ns: int) -> float:
        return tenant.served_ms * exp(-(now_ns - tenant.at_ns) / NS_PER_S / MEMORY_S)


def _take_out(ordered: list[float], value: float) -> None:
    """Nothing when it is not there: its tenant was forgotten meanwhile."""
    place = bisect_left(ordered, value)
    if place < len(ordered) and ordered[place] == value:
        del ordered[place]
