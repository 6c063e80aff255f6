# ruff: noqa: N802  (gRPC names the methods and their arguments)
"""ControlService: what `isthmus status`, `down` and scaling ask of the control process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import grpc.aio

from isthmus.common.cluster import InstanceInfo, Role
from isthmus.common.errors import ConfigError
from isthmus.common.registry.routers import RouterRecord
from isthmus.common.rpc import abort_with
from isthmus.controlplane.front import Front
from isthmus.controlplane.supervised import SupervisedProcess
from isthmus.protos.convert.instances import info_to_pb, role_from_pb, role_to_pb
from isthmus.protos.v1 import control_pb2 as pb
from isthmus.protos.v1 import control_pb2_grpc

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

MAX_REPLICAS = 1024


class Controlled(Protocol):
    """The cluster as its service sees it."""

    @property
    def name(self) -> str: ...

    @property
    def model(self) -> str: ...

    @property
    def gateway_addresses(self) -> list[str]: ...

    @property
    def front(self) -> Front | None: ...

    def workers(self) -> list[SupervisedProcess]: ...

    def info(self, instance_id: str) -> InstanceInfo | None: ...

    async def scale(self, role: Role, replicas: int) -> int: ...

    def request_stop(self, reason: str) -> None: ...


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """Translates only; the cluster decides."""

    def __init__(self, cluster: Controlled) -> None:
        self._cluster = cluster

    async def ListInstances(
        self, request: pb.ListInstancesRequest, context: Context
    ) -> pb.ListInstancesResponse:
        return pb.ListInstancesResponse(
            instances=[self._instance(process) for process in self._cluster.workers()],
            cluster=self._cluster.name,
            gateway_address=self._cluster.gateway_addresses[0],
            model=self._cluster.model,
            front=await self._front_processes(),
        )

    async def Scale(self, request: pb.ScaleRequest, context: Context) -> pb.ScaleResponse:
        if request.role not in pb_roles() or request.replicas > MAX_REPLICAS:
            message = f"scale needs a role and at most {MAX_REPLICAS} replicas"
            await abort_with(context, ConfigError(message, stage="scale"))
        old = await self._cluster.scale(role_from_pb(request.role), request.replicas)
        return pb.ScaleResponse(old_replicas=old, new_replicas=request.replicas)

    async def Shutdown(self, request: pb.ShutdownRequest, context: Context) -> pb.ShutdownResponse:
        self._cluster.request_stop(request.reason or "shutdown was asked for")
        return pb.ShutdownResponse()

    async def _front_processes(self) -> list[pb.FrontProcess]:
        front = self._cluster.front
        if front is None:
            return []
        records, leader = await front.router_records(), await front.leading_router()
        addresses = dict(
            zip(
                (item.spec.name for item in front.gateways),
                self._cluster.gateway_addresses,
                strict=True,
            )
        )
        return [
            pb.FrontProcess(
                name=(name := process.spec.name),
                kind=process.spec.kind.value,
                pid=process.pid,
                num_restarts=process.num_restarts,
                last_exit=process.last_exit,
                address=addresses.get(name) or _address(records.get(name)),
                has_router=name in records,
                is_leading=name == leader,
            )
            for process in front.processes
        ]

    def _instance(self, process: SupervisedProcess) -> pb.ManagedInstance:
        info = self._cluster.info(process.spec.name)
        role = process.spec.kind.role
        assert role is not None, "workers have a role"
        return pb.ManagedInstance(
            instance_id=process.spec.name,
            role=role_to_pb(role),
            pid=process.pid,
            num_restarts=process.num_restarts,
            last_exit=process.last_exit,
            info=None if info is None else info_to_pb(info),
        )


def _address(record: RouterRecord | None) -> str:
    return record.address if record is not None else ""


def pb_roles() -> frozenset[int]:
    return frozenset(int(role_to_pb(role)) for role in Role)
