"""A router made available to others: its driver, its server and its candidacy for the lead.

A gateway hosts the one that it embeds, so that people can ask it why; a router process hosts
nothing else. The router and what feeds it belong to whoever made them.
"""

from __future__ import annotations

import asyncio
import os

from isthmus.common import metrics
from isthmus.common.backoff import Backoff
from isthmus.common.clock import Clock
from isthmus.common.config import ClusterConfig
from isthmus.common.logging import get_logger
from isthmus.common.registry import Candidate, Registry, leader_key, routers_prefix
from isthmus.common.registry.routers import ROUTER, RouterRecord
from isthmus.common.rpc import bind, create_server, stop_server
from isthmus.common.tasks import end_task
from isthmus.protos.v1 import router_pb2_grpc
from isthmus.router.driver import RouterDriver
from isthmus.router.router import Router
from isthmus.router.service import RouterServicer

STOP_GRACE_S = 0.5
_log = get_logger("router")


class RouterHost:
    """``start``, then ``close``. ``driver`` may be used by the host's own process as well."""

    def __init__(
        self, router: Router, registry: Registry, config: ClusterConfig, name: str, clock: Clock
    ) -> None:
        self.driver = RouterDriver(router, clock)
        self._registry = registry
        self._config = config
        self._name = name
        self._server = create_server()
        self._leads = asyncio.Event()
        self._servicer = RouterServicer(router, self.driver, name, self._leads)
        self._candidate: Candidate | None = None
        self._campaign: asyncio.Task[None] | None = None

    @property
    def is_leading(self) -> bool:
        return self._candidate is not None and self._candidate.is_leading

    async def start(self, metrics_address: str = "") -> RouterRecord:
        """Returns when it answers; it leads when nobody else does. Raises InternalError when its
        port cannot be had."""
        config = self._config
        router_pb2_grpc.add_RouterServiceServicer_to_server(self._servicer, self._server)
        address = await bind(self._server, config.host, 0)
        await self._server.start()
        record = RouterRecord(self._name, address, os.getpid(), metrics_address)
        self._candidate = Candidate(
            self._registry,
            leader_key(config.name, ROUTER),
            record.encode(),
            presence_key=f"{routers_prefix(config.name)}{record.router_id}",
            on_change=self._on_lead,
        )
        self._campaign = asyncio.get_running_loop().create_task(
            _campaign(self._candidate), name="router-campaign"
        )
        return record

    def _on_lead(self, is_leading: bool) -> None:
        metrics.ROUTER_LEADING.set(int(is_leading))
        if is_leading:
            self._leads.set()
        else:
            self._leads.clear()

    async def close(self) -> None:
        """The lead goes first, so that gateways ask another before this one is gone."""
        if self._campaign is not None and self._candidate is not None:
            await end_task(self._campaign)
            await self._candidate.resign()
        await stop_server(self._server, STOP_GRACE_S)
        self.driver.close()
        self._servicer.open.close()


async def _campaign(candidate: Candidate) -> None:
    """A candidacy that breaks is begun anew: one that led must neither lead without a lease nor
    be lost as a standby."""
    backoff = Backoff(cap_s=1.0)
    while True:
        try:
            await candidate.run()
        except Exception:  # noqa: BLE001  # whatever broke it
            _log.exception("the candidacy for the lead broke")
        await candidate.resign()
        await asyncio.sleep(backoff.next_s())
