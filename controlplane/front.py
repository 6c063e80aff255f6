"""The processes of a cluster that are no instances: its gateways, and routers of their own.

They are child processes of the control process whatever starts the workers, and are started again
whenever they end. The gateway of index i listens on the port i behind the first one's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import httpx

from isthmus.common.addresses import join_address
from isthmus.common.clock import Clock
from isthmus.common.config import ClusterConfig
from isthmus.common.registry import Registry, leader_key, routers_prefix
from isthmus.common.registry.routers import ROUTER, RouterRecord
from isthmus.controlplane.actuators.base import Actuator, ProcessKind, ProcessSpec
from isthmus.controlplane.supervised import SupervisedProcess

_GATEWAY_GRACE_S = 3.0
_ROUTER_STOP_S = 3.0
Spawn = Callable[[Coroutine[Any, Any, None], str], None]


def gateway_addresses(config: ClusterConfig) -> list[str]:
    """host:port of each gateway, as a client of this machine reaches it."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(  # noqa: S104
        config.gateway.host, config.gateway.host
    )
    first = config.gateway.port
    return [join_address(host, first + index) for index in range(config.gateway.replicas)]


def process_names(what: str, count: int) -> list[str]:
    """The only one of its kind has no number."""
    return [what] if count == 1 else [f"{what}-{index}" for index in range(count)]


class Front:
    def __init__(
        self,
        config: ClusterConfig,
        actuator: Actuator,
        clock: Clock,
        registry: Registry,
        registry_address: str,
        on_exit: Callable[[SupervisedProcess], None],
    ) -> None:
        self._config = config
        self._registry = registry

        def supervised(name: str, kind: ProcessKind, own: ClusterConfig) -> SupervisedProcess:
            spec = ProcessSpec(name, kind, own, registry_address)
            return SupervisedProcess(spec, actuator, clock, on_exit=on_exit)

        self.gateways = [
            supervised(name, ProcessKind.GATEWAY, _with_port(config, config.gateway.port + index))
            for index, name in enumerate(process_names("gateway", config.gateway.replicas))
        ]
        num_routers = config.router.replicas if config.has_router_processes else 0
        self.routers = [
            supervised(name, ProcessKind.ROUTER, config)
            for name in (process_names("router", num_routers) if num_routers else [])
        ]

    @property
    def processes(self) -> list[SupervisedProcess]:
        return [*self.gateways, *self.routers]

    def start(self, spawn: Spawn) -> None:
        for process in self.processes:
            spawn(process.run(), f"supervise-{process.spec.name}")

    async def missing(self, client: httpx.AsyncClient) -> list[str]:
        """Names of those that do not answer yet."""
        known = await self.router_records()
        names = [item.spec.name for item in self.routers if item.spec.name not in known]
        for process, address in zip(self.gateways, gateway_addresses(self._config), strict=True):
            if not await _is_ready(client, address):
                names.append(process.spec.name)
        return names

    async def router_records(self) -> dict[str, RouterRecord]:
        """Where routers answer, by name, those within gateways included."""
        entries = await self._registry.get(routers_prefix(self._config.name))
        records = (RouterRecord.decode(entry.value) for entry in entries)
        return {record.router_id: record for record in records if record is not None}

    async def leading_router(self) -> str:
        """Name of who decides for all; empty when nobody does."""
        for entry in await self._registry.get(leader_key(self._config.name, ROUTER)):
            record = RouterRecord.decode(entry.value)
            return record.router_id if record is not None else ""
        return ""

    async def stop_gateways(self) -> None:
        """Lets their streams end."""
        drain_s = self._config.lifecycle.drain_ms / 1000 + _GATEWAY_GRACE_S
        await asyncio.gather(*(process.stop(drain_s) for process in self.gateways))

    async def stop_routers(self) -> None:
        await asyncio.gather(*(process.stop(_ROUTER_STOP_S) for process in self.routers))


def _with_port(config: ClusterConfig, port: int) -> ClusterConfig:
    return config.model_copy(update={"gateway": config.gateway.model_copy(update={"port": port})})


async def _is_ready(client: httpx.AsyncClient, address: str) -> bool:
    try:
        reply = await client.get(f"http://{address}/ready")
    except httpx.HTTPError:
        return False
    return reply.status_code == httpx.codes.OK
