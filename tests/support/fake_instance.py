"""An InstanceService without an engine: the test scripts its loads, KV events and failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc.aio

from isthmus.common.cluster import InstanceInfo, LoadReport
from isthmus.common.ids import BlockHash
from isthmus.common.kv_events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvEvent,
    KvEventBatch,
)
from isthmus.common.registry import Registry, instance_key
from isthmus.common.rpc import bind, create_server
from isthmus.protos.convert.instances import info_to_pb, load_to_pb
from isthmus.protos.convert.kv_events import kv_batch_to_pb
from isthmus.protos.v1 import instance_pb2, instance_pb2_grpc


class FakeInstance(instance_pb2_grpc.InstanceServiceServicer):
    """Reports its ``load`` every 20 ms, and every KV event once, unless told to lose some.

    KV events are numbered from 1 and replayed from any number; ``from_seq`` 0 gets a snapshot.
    """

    def __init__(self, info: InstanceInfo) -> None:
        self.info = info
        self.load: dict[str, Any] = {"num_blocks": info.num_blocks, "free_blocks": info.num_blocks}
        self.is_silent = False  # connected, but says nothing
        self.num_load_streams = 0
        self.kv_requests: list[tuple[int, int]] = []  # (epoch, from_seq) of each stream
        self.num_to_lose = 0  # events that followers will not get to see
        self._report_seq = 0
        self._events: list[KvEvent] = []
        self._lost: set[int] = set()
        self._changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0) -> InstanceInfo:
        self._server = create_server()
        instance_pb2_grpc.add_InstanceServiceServicer_to_server(self, self._server)
        self.info = replace(self.info, address=await bind(self._server, "127.0.0.1", port))
        await self._server.start()
        return self.info

    async def stop(self) -> None:
        """As a kill would: streams break at once. The registry is told nothing."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def register(self, registry: Registry, cluster: str = "c", lease_id: int = 0) -> None:
        key = instance_key(cluster, self.info.instance_id)
        await registry.put(key, info_to_pb(self.info).SerializeToString(), lease_id)

    async def store(self, *hashes: BlockHash) -> None:
        await self._happen(BlocksStored(hashes))

    async def remove(self, *hashes: BlockHash) -> None:
        await self._happen(BlocksRemoved(hashes))

    async def clear(self) -> None:
        await self._happen(CacheCleared())

    def cached(self) -> set[BlockHash]:
        held: set[BlockHash] = set()
        for event in self._events:
            match event:
                case BlocksStored(hashes):
                    held |= set(hashes)
                case BlocksRemoved(hashes):
                    held -= set(hashes)
                case CacheCleared():
                    held = set()
        return held

    async def _happen(self, event: KvEvent) -> None:
        async with self._changed:
            self._events.append(event)
            if self.num_to_lose:
                self.num_to_lose -= 1
                self._lost.add(len(self._events))
            self._changed.notify_all()

    async def WatchLoad(  # noqa: N802
        self, request: instance_pb2.WatchLoadRequest, context: Any
    ) -> AsyncIterator[instance_pb2.WatchLoadResponse]:
        self.num_load_streams += 1
        while True:
            if not self.is_silent:
                self._report_seq += 1
                report = LoadReport(
                    self.info.instance_id, self.info.epoch, self._report_seq, 0, **self.load
                )
                yield instance_pb2.WatchLoadResponse(report=load_to_pb(report))
            await asyncio.sleep(0.02)

    async def WatchKvEvents(  # noqa: N802
        self, request: instance_pb2.WatchKvEventsRequest, context: Any
    ) -> AsyncIterator[instance_pb2.WatchKvEventsResponse]:
        self.kv_requests.append((request.epoch, request.from_seq))
        next_seq = request.from_seq if request.epoch == self.info.epoch else 0
        if next_seq == 0:
            last = len(self._events)
            yield self._batch(last, (BlocksStored(tuple(self.cached())),), is_snapshot=True)
            next_seq = last + 1
        elif next_seq <= len(self._events):
            yield self._batch(next_seq, tuple(self._events[next_seq - 1 :]))
            next_seq = len(self._events) + 1
        while True:
            async with self._changed:
                while len(self._events) < next_seq:
                    await self._changed.wait()
            while next_seq <= len(self._events):
                if next_seq not in self._lost:
                    yield self._batch(next_seq, (self._events[next_seq - 1],))
                next_seq += 1

    def _batch(
        self, first_seq: int, events: tuple[KvEvent, ...], is_snapshot: bool = False
    ) -> instance_pb2.WatchKvEventsResponse:
        batch = KvEventBatch(self.info.instance_id, self.info.epoch, first_seq, events, is_snapshot)
        return instance_pb2.WatchKvEventsResponse(batch=kv_batch_to_pb(batch))
