"""Lets people ask a gateway why it decided by itself, while no router led.

Such a decision is in no router's log. The gateway answers for it, and for nothing else: it stands
for no election, and nobody asks it to decide.
"""

from __future__ import annotations

import os

from isthmus.common.config import ClusterConfig
from isthmus.common.registry import Registry, deciders_prefix
from isthmus.common.registry.presence import Presence
from isthmus.common.registry.routers import RouterRecord
from isthmus.common.rpc import bind, create_server, stop_server
from isthmus.protos.v1 import router_pb2_grpc
from isthmus.router.router import Router
from isthmus.router.service import ExplainServicer

STOP_GRACE_S = 0.5


class ExplainHost:
    """``start``, then ``close``."""

    def __init__(
        self, router: Router, registry: Registry, config: ClusterConfig, name: str
    ) -> None:
        self._router = router
        self._registry = registry
        self._config = config
        self._name = name
        self._server = create_server()
        self._presence: Presence | None = None

    async def start(self) -> None:
        """Raises InternalError when its port cannot be had."""
        router_pb2_grpc.add_RouterServiceServicer_to_server(
            ExplainServicer(self._router), self._server
        )
        address = await bind(self._server, self._config.host, 0)
        await self._server.start()
        record = RouterRecord(self._name, address, os.getpid())
        key = f"{deciders_prefix(self._config.name)}{self._name}"
        self._presence = Presence(self._registry, key, record.encode())
        self._presence.start()

    async def close(self) -> None:
        if self._presence is not None:
            await self._presence.close()
        await stop_server(self._server, STOP_GRACE_S)
