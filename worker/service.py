"""The RPCs that every instance serves, whatever its role. No state of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from isthmus.common.cluster import InstanceState
from isthmus.common.errors import HandshakeError, IsthmusError
from isthmus.common.logging import get_logger
from isthmus.common.rpc import abort_with
from isthmus.protos.convert.instances import info_to_pb, load_to_pb, state_to_pb
from isthmus.protos.convert.kv_events import kv_batch_to_pb
from isthmus.protos.convert.transfers import offer_from_pb, offer_to_pb
from isthmus.protos.v1 import instance_pb2 as pb
from isthmus.protos.v1 import instance_pb2_grpc, transfer_pb2, transfer_pb2_grpc
from isthmus.worker.lifecycle import StopRequest
from isthmus.worker.role import RoleWorker, WorkerRuntime

_DRAIN_REPORT_S = 0.2

Server = grpc.aio.Server

log = get_logger("service")


class InstanceServicer(instance_pb2_grpc.InstanceServiceServicer):
    def __init__(self, runtime: WorkerRuntime, role: RoleWorker, stop: StopRequest) -> None:
        self._runtime = runtime
        self._role = role
        self._stop = stop

    async def GetInfo(  # noqa: N802
        self,
        request: pb.GetInfoRequest,
        context: grpc.aio.ServicerContext[pb.GetInfoRequest, pb.GetInfoResponse],
    ) -> pb.GetInfoResponse:
        return pb.GetInfoResponse(info=info_to_pb(self._runtime.lifecycle.info))

    async def WatchLoad(  # noqa: N802
        self,
        request: pb.WatchLoadRequest,
        context: grpc.aio.ServicerContext[pb.WatchLoadRequest, pb.WatchLoadResponse],
    ) -> AsyncIterator[pb.WatchLoadResponse]:
        async for report in self._runtime.load.follow(request.interval_ms):
            yield pb.WatchLoadResponse(report=load_to_pb(report))

    async def WatchKvEvents(  # noqa: N802
        self,
        request: pb.WatchKvEventsRequest,
        context: grpc.aio.ServicerContext[pb.WatchKvEventsRequest, pb.WatchKvEventsResponse],
    ) -> AsyncIterator[pb.WatchKvEventsResponse]:
        async for batch in self._runtime.kv_log.follow(request.epoch, request.from_seq):
            yield pb.WatchKvEventsResponse(batch=kv_batch_to_pb(batch))

    async def FlushCache(  # noqa: N802
        self,
        request: pb.FlushCacheRequest,
        context: grpc.aio.ServicerContext[pb.FlushCacheRequest, pb.FlushCacheResponse],
    ) -> pb.FlushCacheResponse:
        num_blocks = self._runtime.engine.flush_cache()
        self._runtime.cache_changed()
        return pb.FlushCacheResponse(num_blocks=num_blocks)

    async def Drain(  # noqa: N802
        self,
        request: pb.DrainRequest,
        context: grpc.aio.ServicerContext[pb.DrainRequest, pb.DrainResponse],
    ) -> AsyncIterator[pb.DrainResponse]:
        self._stop.drain("Drain call", request.timeout_ms or None)
        while True:
            state = self._runtime.lifecycle.state
            yield pb.DrainResponse(
                state=state_to_pb(state),
                running_requests=self._role.num_running(),
                held_transfers=self._role.num_held(),
            )
            if state is InstanceState.STOPPED:
                return
            await asyncio.sleep(_DRAIN_REPORT_S)

    async def CheckIntegrity(  # noqa: N802
        self,
        request: pb.CheckIntegrityRequest,
        context: grpc.aio.ServicerContext[pb.CheckIntegrityRequest, pb.CheckIntegrityResponse],
    ) -> pb.CheckIntegrityResponse:
        problem = ""
        try:
            self._runtime.engine.check_integrity()
        except AssertionError as error:
            problem = str(error) or "an invariant of the pool does not hold"
            log.error("integrity check failed", problem=problem)
        return pb.CheckIntegrityResponse(
            is_clean=not problem,
            problem=problem,
            load=load_to_pb(self._runtime.load.report()),
            sessions_by_state=self._runtime.transfers.sessions_by_state(),
        )

    async def ListPeers(  # noqa: N802
        self,
        request: pb.ListPeersRequest,
        context: grpc.aio.ServicerContext[pb.ListPeersRequest, pb.ListPeersResponse],
    ) -> pb.ListPeersResponse:
        connectors = self._runtime.transfers.connectors_by_peer()
        return pb.ListPeersResponse(connectors=dict(connectors.items()))


class TransferServicer(transfer_pb2_grpc.TransferServiceServicer):
    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime

    async def Handshake(  # noqa: N802
        self,
        request: transfer_pb2.HandshakeRequest,
        context: grpc.aio.ServicerContext[
            transfer_pb2.HandshakeRequest, transfer_pb2.HandshakeResponse
        ],
    ) -> transfer_pb2.HandshakeResponse:
        offer = offer_from_pb(request.offer)
        timeout_s = self._runtime.config.transfer.handshake_timeout_ms / 1000
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._runtime.transfers.answer(offer)
        except TimeoutError:
            await abort_with(
                context, HandshakeError("the connector did not answer in time", stage="handshake")
            )
        except IsthmusError as error:
            log.warning("handshake refused", peer=offer.instance.instance_id, problem=error.message)
            await abort_with(context, error)
        return transfer_pb2.HandshakeResponse(offer=offer_to_pb(answer))


class HealthReporter:
    """grpc.health.v1 of this server: serving while the instance is READY and makes progress."""

    def __init__(self) -> None:
        self._servicer = health.aio.HealthServicer()
        self._is_serving: bool | None = None

    def add_to(self, server: Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set(self, is_serving: bool) -> None:
        if is_serving is self._is_serving:
            return
        self._is_serving = is_serving
        status = health_pb2.HealthCheckResponse
        await self._servicer.set("", status.SERVING if is_serving else status.NOT_SERVING)


def add_services(
    server: Server,
    runtime: WorkerRuntime,
    role: RoleWorker,
    stop: StopRequest,
    role_service: str,
) -> HealthReporter:
    """Adds what every instance serves; ``role_service`` is the full name of the role's own."""
    instance_pb2_grpc.add_InstanceServiceServicer_to_server(
        InstanceServicer(runtime, role, stop), server
    )
    transfer_pb2_grpc.add_TransferServiceServicer_to_server(TransferServicer(runtime), server)
    reporter = HealthReporter()
    reporter.add_to(server)
    names = (
        role_service,
        pb.DESCRIPTOR.services_by_name["InstanceService"].full_name,
        transfer_pb2.DESCRIPTOR.services_by_name["TransferService"].full_name,
        health.SERVICE_NAME,
        reflection.SERVICE_NAME,
    )
    reflection.enable_server_reflection(names, server)
    return reporter
