"""A second registry that shows every instance at the address of a proxy of its own.

A gateway that is given this registry reaches instances through proxies, and its decisions send
decode instances to prefill instances through them, too.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from isthmus.common.cluster import InstanceInfo
from isthmus.common.registry import instances_prefix
from isthmus.common.registry.base import Registry, WatchEvent
from isthmus.common.registry.embedded import RegistryServer
from isthmus.protos.convert.instances import info_from_pb, info_to_pb
from isthmus.protos.v1 import common_pb2
from tests.support.fault_proxy import FaultProxy


class ProxiedRegistry:
    """Use as an async context manager."""

    def __init__(self, source: Registry, cluster: str) -> None:
        self._source = source
        self._prefix = instances_prefix(cluster)
        self._server = RegistryServer()
        self._addresses: dict[tuple[str, int], str] = {}
        self._task: asyncio.Task[None] | None = None
        self.address = ""
        self.proxies: dict[tuple[str, int], FaultProxy] = {}  # by instance and epoch

    async def __aenter__(self) -> ProxiedRegistry:
        self.address = await self._server.start("127.0.0.1", 0)
        self._task = asyncio.create_task(self._mirror())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._server.stop()
        await asyncio.gather(*(proxy.close() for proxy in self.proxies.values()))

    @property
    def num_cut(self) -> int:
        return sum(proxy.num_cut for proxy in self.proxies.values())

    @property
    def num_corrupted(self) -> int:
        return sum(proxy.num_corrupted for proxy in self.proxies.values())

    async def _mirror(self) -> None:
        listing = await self._source.list_and_watch(self._prefix)
        try:
            for entry in listing.entries:
                await self._show(WatchEvent(entry.key, entry, entry.revision))
            async for event in listing.changes:
                await self._show(event)
        finally:
            await listing.changes.aclose()

    async def _show(self, event: WatchEvent) -> None:
        if event.entry is None:
            await self._server.registry.delete(event.key)
            return
        info = info_from_pb(common_pb2.InstanceInfo.FromString(event.entry.value))
        shown = replace(info, address=await self._proxy(info))
        record = info_to_pb(shown).SerializeToString()
        await self._server.registry.put(event.key, record)

    async def _proxy(self, info: InstanceInfo) -> str:
        key = (info.instance_id, info.epoch)
        if key not in self.proxies:
            self.proxies[key] = FaultProxy(info.address)
            self._addresses[key] = await self.proxies[key].start()
        return self._addresses[key]
