"""Routers that others can ask, over real gRPC in this process, and gateways that ask them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from isthmus.common.clock import SystemClock
from isthmus.common.config import ClusterConfig
from isthmus.common.errors import IsthmusError
from isthmus.common.registry import MemoryRegistry
from isthmus.common.registry.routers import RouterRecord
from isthmus.common.types import RouteDecision
from isthmus.gateway import pulse, remote_router
from isthmus.gateway.remote_router import RemoteDecider
from isthmus.router import Router
from isthmus.router.host import RouterHost
from tests.support.poll import poll_until
from tests.support.router_cluster import Cluster

PATIENCE_S = 60.0  # no question is given up because the machine is slow


@dataclass
class Asker:
    """Hears once; ``heard`` is set then."""

    decision: RouteDecision | None = None
    error: IsthmusError | None = None
    heard: asyncio.Event = field(default_factory=asyncio.Event)

    def on_routed(self, decision: RouteDecision) -> None:
        assert not self.heard.is_set()
        self.decision = decision
        self.heard.set()

    def on_refused(self, error: IsthmusError) -> None:
        assert not self.heard.is_set()
        self.error = error
        self.heard.set()

    async def answer(self) -> RouteDecision:
        await asyncio.wait_for(self.heard.wait(), 60)
        assert self.decision is not None, self.error
        return self.decision


class HostedRouter:
    """A router with a prefill and a decode instance, made up, that others can ask."""

    def __init__(self, registry: MemoryRegistry, name: str) -> None:
        self.registry = registry
        self.router: Router = Cluster(1, 1).router
        self.host = RouterHost(self.router, registry, ClusterConfig(), name, SystemClock())
        self.record: RouterRecord | None = None

    async def start(self) -> HostedRouter:
        self.record = await self.host.start()
        return self

    async def leads(self) -> None:
        await poll_until(lambda: self.host.is_leading, timeout_s=60)

    async def die(self) -> None:
        """As a process that is killed: answers nobody, gives nothing back."""
        campaign = self.host._campaign
        assert campaign is not None
        campaign.cancel()
        with suppress(asyncio.CancelledError):
            await campaign
        await self.host._server.stop(0)


@asynccontextmanager
async def running_registry() -> AsyncIterator[MemoryRegistry]:
    """With its lease timer."""
    registry = MemoryRegistry()
    expiry = asyncio.create_task(registry.run_expiry())
    try:
        yield registry
    finally:
        registry.close()
        expiry.cancel()
        await asyncio.gather(expiry, return_exceptions=True)


@asynccontextmanager
async def remote_decider(registry: MemoryRegistry) -> AsyncIterator[RemoteDecider]:
    """Of a gateway whose own view is of one decode instance, and that is patient."""
    answer_s, remote_router.ANSWER_S = remote_router.ANSWER_S, PATIENCE_S
    silence_s, pulse.SILENCE_S = pulse.SILENCE_S, PATIENCE_S
    own = Cluster(0, 1, policy="least_loaded").router
    decider = RemoteDecider(registry, ClusterConfig().name, "g", own, SystemClock())
    decider.start()
    try:
        yield decider
    finally:
        remote_router.ANSWER_S, pulse.SILENCE_S = answer_s, silence_s
        await decider.close()
