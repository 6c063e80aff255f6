"""A running cluster: registry, control service, workers and gateway, in one object.

::

    registry ─ control service ─ state file ─┬─ gateway (supervised child)
                                             └─ actuator ─ workers (supervised)
                                                              │ all READY, gateway /ready is 200
    ◀─ everything in reverse: gateway first, so that its streams can end ◀─ request_stop

It runs on one event loop and owns all of these. A process that ends before the cluster was ready
for the first time ends the start, with its reason; after that it is started again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any

import httpx
import msgspec

from isthmus.common.clock import NS_PER_S, Clock
from isthmus.common.cluster import InstanceInfo, InstanceState, Role
from isthmus.common.config import ClusterConfig
from isthmus.common.errors import DeadlineError, InstanceError, InstanceLostError, IsthmusError
from isthmus.common.registry import instances_prefix
from isthmus.common.registry.embedded import RegistryServer
from isthmus.common.rpc import bind, create_server, stop_server
from isthmus.controlplane.actuators.base import Actuator, ProcessKind, ProcessSpec
from isthmus.controlplane.logs import log_file
from isthmus.controlplane.progress import Progress, ReadyCluster, ReadyInstance, Report, Stage
from isthmus.controlplane.reconciler import Reconciler
from isthmus.controlplane.service import ControlServicer
from isthmus.controlplane.state_file import (
    ClusterState,
    log_folder,
    process_start,
    remove_state,
    state_folder,
    write_state,
)
from isthmus.controlplane.supervised import SupervisedProcess
from isthmus.protos.convert import info_from_pb
from isthmus.protos.v1 import common_pb2, control_pb2_grpc

_TEND_PERIOD_S = 1.0
_READY_PERIOD_S = 0.1
_SERVER_GRACE_S = 0.5
_GATEWAY_GRACE_S = 3.0


def gateway_address(config: ClusterConfig) -> str:
    """host:port under which a client of this machine reaches the gateway."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(  # noqa: S104
        config.gateway.host, config.gateway.host
    )
    return f"{host}:{config.gateway.port}"


class Cluster:
    """Implements ``service.Controlled``. ``run`` once; ``request_stop`` and ``kill_now`` end it."""

    def __init__(
        self,
        config: ClusterConfig,
        actuator: Actuator,
        gateway_actuator: Actuator,
        clock: Clock,
        report: Report,
    ) -> None:
        self._config = config
        self._actuator = actuator
        self._gateway_actuator = gateway_actuator
        self._clock = clock
        self._report = report
        self._registry = RegistryServer(clock)
        self._server = create_server()
        self._infos: dict[str, InstanceInfo] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._stop_asked = asyncio.Event()
        self._has_been_ready = False
        self._start_failure: IsthmusError | None = None
        self._gateway: SupervisedProcess | None = None
        self._reconciler: Reconciler | None = None
        self._state: ClusterState | None = None
        self._started_ns = clock.monotonic_ns()

    # --- Controlled ---

    @property
    def name(self) -> str:
        return self._config.name

    @property
    def model(self) -> str:
        names = {info.model for info in self._infos.values()}
        return next(iter(names), self._config.model.served_name or self._config.model.path)

    @property
    def gateway_address(self) -> str:
        return gateway_address(self._config)

    def workers(self) -> list[SupervisedProcess]:
        return list(self._reconciler.processes.values()) if self._reconciler else []

    def info(self, instance_id: str) -> InstanceInfo | None:
        return self._infos.get(instance_id)

    async def scale(self, role: Role, replicas: int) -> int:
        if self._reconciler is None:
            message = f"cluster {self.name} is still starting"
            raise InstanceError(message, stage="scale")
        old = await self._reconciler.scale(role, replicas)
        self._say(Stage.START, f"{role.value}: {old} → {replicas} instances")
        return old

    def request_stop(self, reason: str) -> None:
        """Ends ``run`` in order. Idempotent."""
        if not self._stop_asked.is_set():
            self._say(Stage.STOP, f"stopping ({reason})")
            self._stop_asked.set()

    @property
    def is_stopping(self) -> bool:
        return self._stop_asked.is_set()

    def kill_now(self) -> None:
        """Ends every process of the cluster without a drain; the caller exits right after."""
        for process in (self._gateway, *self.workers()):
            if process is not None:
                process.kill()
        remove_state(state_folder(self._config), self.name, os.getpid())

    # --- life ---

    async def run(self, on_ready: Callable[[ReadyCluster], None]) -> None:
        """Starts everything, calls ``on_ready`` once, returns after ``request_stop``.

        Raises IsthmusError, in one sentence, when the cluster cannot be brought up; everything that
        was started is gone by then.
        """
        try:
            if await self._unless_stopped(self._start()):
                on_ready(self._describe())
                await self._unless_stopped(self._tend())
        finally:
            await self._stop()

    async def _start(self) -> None:
        config = self._config
        registry_address = await self._registry.start(config.registry.host, config.registry.port)
        control_pb2_grpc.add_ControlServiceServicer_to_server(ControlServicer(self), self._server)
        control_address = await bind(self._server, "127.0.0.1", 0)
        await self._server.start()
        self._state = self._write_state(control_address, registry_address)
        self._spawn(self._follow_instances(), "follow-instances")
        await self._gateway_actuator.open()
        self._start_gateway(registry_address)
        self._say(Stage.START, f"starting workers ({config.lifecycle.actuator})")
        await self._actuator.open()
        self._reconciler = Reconciler(
            config,
            self._actuator,
            self._clock,
            registry_address,
            os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else (),
            on_exit=self._on_exit,
        )
        await self._reconciler.reconcile()
        await self._wait_ready()
        self._has_been_ready = True
        self._state = msgspec.structs.replace(self._state, model=self.model, is_ready=True)
        write_state(state_folder(config), self._state)

    def _write_state(self, control_address: str, registry_address: str) -> ClusterState:
        state = ClusterState(
            cluster=self.name,
            pid=os.getpid(),
            started_at=process_start(os.getpid()) or 0.0,
            control_address=control_address,
            registry_address=registry_address,
            gateway_url=f"http://{self.gateway_address}",
            model=self.model,
            log_dir=str(log_folder(self._config)),
            drain_ms=self._config.lifecycle.drain_ms,
        )
        write_state(state_folder(self._config), state)
        return state

    def _start_gateway(self, registry_address: str) -> None:
        spec = ProcessSpec("gateway", ProcessKind.GATEWAY, self._config, registry_address)
        self._gateway = SupervisedProcess(
            spec, self._gateway_actuator, self._clock, on_exit=self._on_exit
        )
        self._spawn(self._gateway.run(), "supervise-gateway")

    async def _wait_ready(self) -> None:
        limit_s = self._config.lifecycle.ready_timeout_ms / 1000
        deadline_ns = self._clock.monotonic_ns() + int(limit_s * NS_PER_S)
        async with httpx.AsyncClient(trust_env=False, timeout=2.0) as client:
            while True:
                if self._start_failure is not None:
                    raise self._start_failure
                missing = self._missing()
                if not missing and await self._is_gateway_ready(client):
                    return
                if self._clock.monotonic_ns() > deadline_ns:
                    what = ", ".join(missing) or "the gateway"
                    message = f"not ready after {limit_s:g} s: {what}; see the logs in "
                    raise DeadlineError(message + str(log_folder(self._config)), stage="start")
                await asyncio.sleep(_READY_PERIOD_S)

    def _missing(self) -> list[str]:
        return [
            process.spec.name
            for process in self.workers()
            if (info := self._infos.get(process.spec.name)) is None
            or info.state is not InstanceState.READY
        ]

    async def _is_gateway_ready(self, client: httpx.AsyncClient) -> bool:
        try:
            reply = await client.get(f"http://{self.gateway_address}/ready")
        except httpx.HTTPError:
            return False
        return reply.status_code == httpx.codes.OK

    async def _tend(self) -> None:
        """Watches for workers that live but are not seen any more."""
        assert self._reconciler is not None, "started"
        while True:
            await asyncio.sleep(_TEND_PERIOD_S)
            for name in self._reconciler.check_seen(self._infos.keys()):
                self._say(Stage.WARNING, f"{name} is out of the registry too long; ended")

    async def _follow_instances(self) -> None:
        prefix = instances_prefix(self.name)
        with suppress(InstanceLostError):  # the registry stops with the cluster
            async for event in self._registry.registry.watch(prefix):
                instance_id = event.key.removeprefix(prefix)
                if event.entry is None:
                    self._instance_left(instance_id)
                else:
                    message = common_pb2.InstanceInfo.FromString(event.entry.value)
                    self._instance_changed(instance_id, info_from_pb(message))

    def _instance_left(self, instance_id: str) -> None:
        if self._infos.pop(instance_id, None) is not None and not self.is_stopping:
            self._say(Stage.WARNING, f"{instance_id} left the registry")

    def _instance_changed(self, instance_id: str, info: InstanceInfo) -> None:
        old = self._infos.get(instance_id)
        self._infos[instance_id] = info
        if old is None or (old.state, old.epoch) != (info.state, info.epoch):
            text = f"{instance_id} is {info.state.value} (pid {info.pid}, epoch {info.epoch})"
            self._say(Stage.INSTANCE, text)

    def _on_exit(self, process: SupervisedProcess) -> None:
        if self.is_stopping:
            return
        name, reason = process.spec.name, process.last_exit
        if self._has_been_ready:
            self._say(Stage.WARNING, f"{name} ended ({reason}); state: {process.state.value}")
        elif self._start_failure is None:
            log = log_file(log_folder(self._config), name)
            text = f"{name} ended while starting ({reason}); its log: {log}"
            self._start_failure = InstanceError(text, stage="start", instance_id=name)

    def _describe(self) -> ReadyCluster:
        return ReadyCluster(
            cluster=self.name,
            url=f"http://{self.gateway_address}",
            model=self.model,
            pid=os.getpid(),
            log_dir=str(log_folder(self._config)),
            state_dir=str(state_folder(self._config)),
            seconds=(self._clock.monotonic_ns() - self._started_ns) / NS_PER_S,
            instances=tuple(
                ReadyInstance(
                    instance_id=info.instance_id,
                    role=info.role.value,
                    address=info.address,
                    metrics_address=info.metrics_address,
                    pid=info.pid,
                    epoch=info.epoch,
                )
                for _, info in sorted(self._infos.items())
            ),
        )

    async def _stop(self) -> None:
        """Gateway first, so that its streams can end; each step is taken whatever the others do."""
        self._stop_asked.set()
        async with AsyncExitStack() as last_to_first:
            last_to_first.callback(remove_state, state_folder(self._config), self.name, os.getpid())
            last_to_first.push_async_callback(self._cancel_tasks)
            last_to_first.push_async_callback(self._registry.stop)
            last_to_first.push_async_callback(stop_server, self._server, _SERVER_GRACE_S)
            last_to_first.push_async_callback(self._gateway_actuator.close)
            last_to_first.push_async_callback(self._actuator.close)
            if self._reconciler is not None:
                last_to_first.push_async_callback(self._reconciler.stop_all)
            if self._gateway is not None:
                drain_s = self._config.lifecycle.drain_ms / 1000 + _GATEWAY_GRACE_S
                last_to_first.push_async_callback(self._gateway.stop, drain_s)

    async def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Whether ``work`` came to its end before ``request_stop``; its errors pass through."""
        task = asyncio.create_task(work)
        asked = asyncio.create_task(self._stop_asked.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
                return True
            return False
        finally:
            task.cancel()
            asked.cancel()
            await asyncio.gather(task, asked, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(asyncio.create_task(work, name=name))

    def _say(self, stage: Stage, message: str) -> None:
        self._report(Progress(stage, message))
