"""What a gateway process has to find its instances with: a view of the cluster, and a decider.

Either it embeds the router (and lets others ask it), or routers run as processes of their own; then
this process's router is only its view, and its last resort while none of those leads.
"""

from __future__ import annotations

import secrets
from typing import Protocol

from isthmus.common.clock import SystemClock
from isthmus.common.config import ClusterConfig
from isthmus.common.registry import Registry
from isthmus.gateway.decider import Decider, EmbeddedDecider
from isthmus.gateway.remote_router import RemoteDecider
from isthmus.router.explain_host import ExplainHost
from isthmus.router.feed import ClusterFeed
from isthmus.router.host import RouterHost
from isthmus.router.router import Router


class RoutingArgs(Protocol):
    @property
    def config(self) -> ClusterConfig: ...

    @property
    def gateway_id(self) -> str: ...


class Routing:
    """``start``, then ``close``; the registry's client is the caller's."""

    def __init__(self, args: RoutingArgs, registry: Registry) -> None:
        config, clock = args.config, SystemClock()
        self._host: RouterHost | ExplainHost
        self._remote: RemoteDecider | None = None
        self.decider: Decider
        if config.has_router_processes:
            own = config.router.model_copy(update={"policy": "least_loaded"})
            self.router = Router(own, clock)
            # Two lives of one gateway must not be taken for one: what the first left open is void.
            gateway_id = f"{args.gateway_id}.{secrets.token_hex(4)}"
            self._remote = RemoteDecider(registry, config.name, gateway_id, self.router, clock)
            self.decider = self._remote
            self._host = ExplainHost(self.router, registry, config, args.gateway_id)
        else:
            self.router = Router(config.router, clock, tenant_weights=config.tenant_weights)
            host = RouterHost(self.router, registry, config, args.gateway_id, clock)
            self._host = host
            self.decider = EmbeddedDecider(self.router, host.driver)
        self._feed = ClusterFeed(
            registry,
            config.name,
            self.router.state,
            config.router,
            follows_kv=self._remote is None,
        )

    async def start(self) -> None:
        self._feed.start()
        await self._host.start()
        if self._remote is not None:
            self._remote.start()

    async def close(self) -> None:
        await self._host.close()
        if self._remote is not None:
            await self._remote.close()
        await self._feed.close()
