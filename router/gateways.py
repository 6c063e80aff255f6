"""Which decisions each gateway has open, so that one that dies leaves nothing behind.

A gateway is known by its stream of outcomes. When that ends and does not come back within
``GRACE_S``, its open decisions end as if their clients had left: they blame nobody.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from isthmus.common.ids import DecisionId
from isthmus.common.logging import get_logger
from isthmus.router.router import Router
from isthmus.router.types import Outcome

GRACE_S = 5.0
_log = get_logger("router")


@dataclass(slots=True)
class _Gateway:
    open: dict[DecisionId, None] = field(default_factory=dict)
    num_streams: int = 0
    ends: asyncio.TimerHandle | None = None


class OpenDecisions:
    def __init__(self, router: Router, grace_s: float = GRACE_S) -> None:
        self._router = router
        self._grace_s = grace_s
        self._gateways: dict[str, _Gateway] = {}

    def made(self, gateway_id: str, decision_id: DecisionId) -> None:
        gateway = self._gateways.setdefault(gateway_id, _Gateway())
        _drop_expired(gateway.open, self._router)
        gateway.open[decision_id] = None
        if not gateway.num_streams:
            self._doubt(gateway_id, gateway)

    def told(self, gateway_id: str, decision_id: DecisionId, outcome: Outcome) -> None:
        self._router.report(decision_id, outcome)
        gateway = self._gateways.get(gateway_id)
        if gateway is not None and outcome.kind.is_end:
            gateway.open.pop(decision_id, None)

    def stream_begins(self, gateway_id: str) -> None:
        gateway = self._gateways.setdefault(gateway_id, _Gateway())
        gateway.num_streams += 1
        if gateway.ends is not None:
            gateway.ends.cancel()
            gateway.ends = None

    def stream_ends(self, gateway_id: str) -> None:
        gateway = self._gateways[gateway_id]
        gateway.num_streams -= 1
        if not gateway.num_streams:
            self._doubt(gateway_id, gateway)

    def close(self) -> None:
        for gateway in self._gateways.values():
            if gateway.ends is not None:
                gateway.ends.cancel()

    def _doubt(self, gateway_id: str, gateway: _Gateway) -> None:
        if gateway.ends is None:
            loop = asyncio.get_running_loop()
            gateway.ends = loop.call_later(self._grace_s, self._forget, gateway_id)

    def _forget(self, gateway_id: str) -> None:
        gateway = self._gateways.pop(gateway_id)
        for decision_id in gateway.open:
            self._router.report(decision_id, Outcome.cancelled())
        if gateway.open:
            _log.warning("gateway gone", gateway=gateway_id, open_decisions=len(gateway.open))


def _drop_expired(opened: dict[DecisionId, None], router: Router) -> None:
    """About in the order in which they expire: a first token gives one its time anew, and those
    behind it stay as long as it does."""
    while opened and not router.is_open(oldest := next(iter(opened))):
        del opened[oldest]
