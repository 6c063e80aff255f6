"""The other side of ControlService, and of an instance's own figures: for the command line."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TypeVar

import grpc.aio

from isthmus.common.cluster import InstanceInfo, LoadReport, Role
from isthmus.common.errors import IsthmusError
from isthmus.common.logging import get_logger
from isthmus.common.rpc import create_channel, error_from_rpc
from isthmus.protos.convert.instances import info_from_pb, load_from_pb, role_from_pb, role_to_pb
from isthmus.protos.v1 import control_pb2, control_pb2_grpc, instance_pb2, instance_pb2_grpc

CALL_TIMEOUT_S = 3.0
INSTANCE_TIMEOUT_S = 2.0
SCALE_MARGIN_S = 30.0
"""Beyond the drains: processes that are ended by force, and the start of new ones."""
_T = TypeVar("_T")

log = get_logger("control")


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """``info`` is None while the instance has not registered, ``load`` when it did not answer.
    ``connectors``: what KV goes over, for each peer that it has shaken hands with."""

    instance_id: str
    role: Role
    pid: int
    num_restarts: int
    last_exit: str
    info: InstanceInfo | None
    load: LoadReport | None = None
    connectors: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FrontStatus:
    """A gateway or a router process. ``address`` is empty while a router does not answer."""

    name: str
    kind: str
    pid: int
    num_restarts: int
    last_exit: str
    address: str
    has_router: bool
    is_leading: bool


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    cluster: str
    model: str
    gateway_url: str
    instances: tuple[InstanceStatus, ...]
    front: tuple[FrontStatus, ...] = ()


async def cluster_status(control_address: str) -> ClusterStatus:
    """What the control process says, with the load of every instance that answers.

    Raises IsthmusError when the control process does not answer.
    """
    async with create_channel(control_address) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        request = control_pb2.ListInstancesRequest()
        reply = await _call(stub.ListInstances(request, timeout=CALL_TIMEOUT_S), control_address)
    instances = await asyncio.gather(*(_with_load(item) for item in reply.instances))
    return ClusterStatus(
        cluster=reply.cluster,
        model=reply.model,
        gateway_url=f"http://{reply.gateway_address}",
        instances=tuple(item for item in instances if item is not None),
        front=tuple(_front(item) for item in reply.front),
    )


async def scale(control_address: str, role: Role, replicas: int, drain_ms: int) -> int:
    """Sets the wanted replicas of a role and returns the old number.

    Waits for drains, of which each may take ``drain_ms``: those that leave together, and those of
    a change that is still under way.
    """
    timeout_s = 2 * drain_ms / 1000 + SCALE_MARGIN_S
    async with create_channel(control_address) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        request = control_pb2.ScaleRequest(role=role_to_pb(role), replicas=replicas)
        reply = await _call(stub.Scale(request, timeout=timeout_s), control_address)
    return int(reply.old_replicas)


async def shut_down(control_address: str, reason: str) -> None:
    async with create_channel(control_address) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        request = control_pb2.ShutdownRequest(reason=reason)
        await _call(stub.Shutdown(request, timeout=CALL_TIMEOUT_S), control_address)


def _front(item: control_pb2.FrontProcess) -> FrontStatus:
    return FrontStatus(
        name=item.name,
        kind=item.kind,
        pid=item.pid,
        num_restarts=item.num_restarts,
        last_exit=item.last_exit,
        address=item.address,
        has_router=item.has_router,
        is_leading=item.is_leading,
    )


async def _with_load(item: control_pb2.ManagedInstance) -> InstanceStatus | None:
    """None for an instance of a kind that is not known here."""
    try:
        role = role_from_pb(item.role)
        info = info_from_pb(item.info) if item.HasField("info") else None
    except IsthmusError as error:
        log.warning("an instance is left out", instance=item.instance_id, why=error.message)
        return None
    load: LoadReport | None = None
    connectors: dict[str, str] = {}
    if info is not None:
        async with create_channel(info.address) as channel:
            stub = instance_pb2_grpc.InstanceServiceStub(channel)
            load, connectors = await asyncio.gather(_load(stub), _connectors(stub))
    return InstanceStatus(
        instance_id=item.instance_id,
        role=role,
        pid=item.pid,
        num_restarts=item.num_restarts,
        last_exit=item.last_exit,
        info=info,
        load=load,
        connectors=connectors,
    )


async def _connectors(stub: instance_pb2_grpc.InstanceServiceStub) -> dict[str, str]:
    """By peer; empty when the instance does not answer in time."""
    try:
        reply = await stub.ListPeers(instance_pb2.ListPeersRequest(), timeout=INSTANCE_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return {}
    return dict(reply.connectors)


async def _load(stub: instance_pb2_grpc.InstanceServiceStub) -> LoadReport | None:
    """The first load report of an instance; None when it gives none in time."""
    request = instance_pb2.WatchLoadRequest(interval_ms=100)
    call = stub.WatchLoad(request, timeout=INSTANCE_TIMEOUT_S)
    try:
        async for reply in call:
            return load_from_pb(reply.report)
    except grpc.aio.AioRpcError:
        return None
    finally:
        call.cancel()
    return None


async def _call(call: Awaitable[_T], peer: str) -> _T:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error, peer=peer, stage="control") from error
