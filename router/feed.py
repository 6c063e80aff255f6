"""Brings the cluster's news to the router: registry records, load reports, KV events.

One task watches the registry; two follow each instance epoch (load, KV events) over one channel.
Every wait on a peer is bounded and every reconnection backs off with jitter, so an instance that
does not answer costs nobody else anything, least of all the router's start. What a broken or silent
load stream means is decided in ``router.state``; this module only says that it broke:

- refused or reset: at once;
- silent for ``stale_load_ms``: after one quick try to open it again, since the silence may have
  been this process's own.

A gap in the KV events opens the stream again at the missing event, once; further trouble backs off.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from isthmus.common.backoff import Backoff
from isthmus.common.cluster import InstanceInfo
from isthmus.common.config import RouterConfig
from isthmus.common.errors import IsthmusError
from isthmus.common.ids import InstanceId
from isthmus.common.logging import RateLimitedLog, get_logger
from isthmus.common.registry import Registry, WatchEvent, instances_prefix, resume_watch
from isthmus.common.rpc import create_channel
from isthmus.common.tasks import end_task, tell_if_broken
from isthmus.protos.convert.instances import info_from_pb, load_from_pb
from isthmus.protos.convert.kv_events import kv_batch_from_pb
from isthmus.protos.v1 import common_pb2, instance_pb2, instance_pb2_grpc
from isthmus.router.kv_index import ApplyResult
from isthmus.router.state import RouterState

if TYPE_CHECKING:
    from isthmus.protos.v1.instance_pb2_grpc import InstanceServiceStub

LOAD_INTERVAL_MS = 100
FIRST_REPORT_S = 0.5
RETRY_CAP_S = 0.5  # a suspect instance must not wait longer than this to be found well again
KV_RETRY_CAP_S = 2.0
SILENT = "silent"

log = get_logger("feed")


class ClusterFeed:
    """Feeds one RouterState until closed. Everything runs on the loop that called ``start``.

    ``follows_kv`` False: for a policy that looks at no prefix.
    """

    def __init__(
        self,
        registry: Registry,
        cluster: str,
        state: RouterState,
        config: RouterConfig,
        *,
        follows_kv: bool = True,
    ) -> None:
        self._registry = registry
        self._prefix = instances_prefix(cluster)
        self._state = state
        self._silence_s = config.stale_load_ms / 1000
        self._follows_kv = follows_kv
        self._listed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._followers: dict[InstanceId, tuple[int, asyncio.Task[None]]] = {}
        self._warnings = RateLimitedLog(log)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="cluster-feed")
        self._task.add_done_callback(tell_if_broken(log, "the feed broke, the view is frozen"))

    async def wait_listed(self, timeout_s: float) -> bool:
        """True once the registry has been read; False when it was not within the time.

        Not that every instance was reached: that may never be.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._listed.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Idempotent. The state keeps its last view."""
        task, self._task = self._task, None
        await end_task(task)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            watch = resume_watch(self._registry, self._prefix, on_connected=self._connected)
            try:
                async for event in watch:
                    self._on_registry(event, group)
            finally:
                await watch.aclose()

    def _connected(self, is_connected: bool) -> None:
        self._state.registry_connected(is_connected)
        if is_connected:
            self._listed.set()

    def _on_registry(self, event: WatchEvent, group: asyncio.TaskGroup) -> None:
        instance_id = InstanceId(event.key.removeprefix(self._prefix))
        if event.entry is None:
            self._state.deregistered(instance_id)
            return
        try:
            info = info_from_pb(common_pb2.InstanceInfo.FromString(event.entry.value))
        except (DecodeError, IsthmusError) as error:
            self._warnings.warning(event.key, "unreadable record", record=event.key, why=str(error))
            return
        self._state.registered(info)
        self._follow(info, group)

    def _follow(self, info: InstanceInfo, group: asyncio.TaskGroup) -> None:
        """One follower per instance, of the newest epoch."""
        epoch, task = self._followers.get(info.instance_id, (0, None))
        if task is not None:
            if epoch >= info.epoch:
                return
            task.cancel()
        task = group.create_task(self._follow_epoch(info), name=f"follow-{info.instance_id}")
        self._followers[info.instance_id] = (info.epoch, task)

    async def _follow_epoch(self, info: InstanceInfo) -> None:
        """Both streams of one epoch, until it is LOST or superseded."""
        channel = create_channel(info.address)
        stub = instance_pb2_grpc.InstanceServiceStub(channel)
        kv_events = [asyncio.create_task(self._follow_kv(stub, info))] if self._follows_kv else []
        try:
            await self._follow_load(stub, info)
        finally:
            if self._followers.get(info.instance_id, (0, None))[1] is asyncio.current_task():
                del self._followers[info.instance_id]
            for task in kv_events:
                task.cancel()
            await asyncio.gather(*kv_events, return_exceptions=True)
            await channel.close()

    async def _follow_load(self, stub: InstanceServiceStub, info: InstanceInfo) -> None:
        backoff = Backoff(cap_s=RETRY_CAP_S)
        patience_s = FIRST_REPORT_S
        while True:
            num_reports, why = await self._read_load(stub, patience_s)
            if num_reports:
                backoff.reset()
            if num_reports and why == SILENT:
                patience_s = FIRST_REPORT_S
                continue
            if self._state.stream_broken(info.instance_id, info.epoch, why):
                return
            # It is out of the choice now; a slow answer must still be able to bring it back.
            patience_s = self._silence_s
            await asyncio.sleep(backoff.next_s())

    async def _read_load(self, stub: InstanceServiceStub, first_s: float) -> tuple[int, str]:
        """Reads one stream to its end: reports taken, and why it ended."""
        call = stub.WatchLoad(instance_pb2.WatchLoadRequest(interval_ms=LOAD_INTERVAL_MS))
        num_reports = 0
        try:
            while True:
                async with asyncio.timeout(self._silence_s if num_reports else first_s):
                    message = await call.read()
                if not isinstance(message, instance_pb2.WatchLoadResponse):
                    return num_reports, "ended"
                self._state.reported(load_from_pb(message.report))
                num_reports += 1
        except TimeoutError:
            return num_reports, SILENT
        except grpc.aio.AioRpcError as error:
            return num_reports, error.code().name.lower()
        finally:
            call.cancel()

    async def _follow_kv(self, stub: InstanceServiceStub, info: InstanceInfo) -> None:
        backoff = Backoff(cap_s=KV_RETRY_CAP_S)
        while True:
            result = await self._read_kv(stub, info)
            if result is ApplyResult.APPLIED:
                backoff.reset()
            if result is ApplyResult.GAP:
                self._warnings.warning("gap", "KV events missing", instance=info.instance_id)
            else:
                await asyncio.sleep(backoff.next_s())

    async def _read_kv(self, stub: InstanceServiceStub, info: InstanceInfo) -> ApplyResult | None:
        """Reads one stream until it ends or events are missing; the last batch's result."""
        next_seq = self._state.index.next_seq(info.instance_id, info.epoch)
        request = instance_pb2.WatchKvEventsRequest(epoch=info.epoch, from_seq=next_seq)
        result: ApplyResult | None = None
        async with _stream(stub.WatchKvEvents(request)) as messages:
            async for message in messages:
                result = self._state.kv_events(kv_batch_from_pb(message.batch))
                if result in (ApplyResult.GAP, ApplyResult.AWAITING):
                    break
        return result


@asynccontextmanager
async def _stream(
    call: grpc.aio.UnaryStreamCall[
        instance_pb2.WatchKvEventsRequest, instance_pb2.WatchKvEventsResponse
    ],
) -> AsyncIterator[AsyncIterator[instance_pb2.WatchKvEventsResponse]]:
    """Ends quietly when the peer does: its load stream says so already."""
    try:
        yield aiter(call)
    except grpc.aio.AioRpcError:
        return
    finally:
        call.cancel()
