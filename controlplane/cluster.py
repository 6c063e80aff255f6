"""A running cluster: registry, control service, workers and gateway, in one object.

::

    registry ─ control service ─ state file ─┬─ gateways and routers (supervised children)
                                             └─ actuator ─ workers (supervised)
                                                              │ all READY, every /ready is 200
    ◀─ everything in reverse: gateways first, so that their streams can end ◀─ request_stop

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
from google.protobuf.message import DecodeError

from isthmus.common.clock import NS_PER_S, Clock
from isthmus.common.cluster import InstanceInfo, InstanceState, Role
from isthmus.common.config import ClusterConfig
from isthmus.common.errors import (
    DeadlineError,
    InstanceError,
    InstanceLostError,
    IsthmusError,
    ModelError,
)
from isthmus.common.model_files import locate_model
from isthmus.common.registry import instances_prefix
from isthmus.common.registry.embedded import RegistryServer
from isthmus.common.rpc import bind, create_server, stop_server
from isthmus.controlplane.actuators.base import Actuator
from isthmus.controlplane.front import Front, gateway_addresses
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
from isthmus.protos.convert.instances import info_from_pb
from isthmus.protos.v1 import common_pb2, control_pb2_grpc

_TEND_PERIOD_S = 1.0
_READY_PERIOD_S = 0.1
_SERVER_GRACE_S = 0.5


def expected_model_name(config: ClusterConfig) -> str:
    """As the instances will call it, before any of them is up."""
    if config.model.served_name:
        return config.model.served_name
    with suppress(ModelError):
        return locate_model(config.model.path).name
    return config.model.path


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
        self._front: Front | None = None
        self._reconciler: Reconciler | None = None
        self._state: ClusterState | None = None
        self._started_ns = clock.monotonic_ns()
        self._model_name = expected_model_name(config)

    # --- Controlled ---

    @property
    def name(self) -> str:
        return self._config.name

    @property
    def model(self) -> str:
        for info in self._infos.values():
            self._model_name = info.model
        return self._model_name

    @property
    def gateway_addresses(self) -> list[str]:
        return gateway_addresses(self._config)

    @property
    def front(self) -> Front | None:
        """None while the cluster is starting."""
        return self._front

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
        front = self._front.processes if self._front is not None else []
        for process in (*front, *self.workers()):
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
        self._front = Front(
            config,
            self._gateway_actuator,
            self._clock,
            self._registry.registry,
            registry_address,
            self._on_exit,
        )
        self._front.start(self._spawn)
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
            gateway_url=f"http://{self.gateway_addresses[0]}",
            model=self.model,
            log_dir=str(log_folder(self._config)),
            drain_ms=self._config.lifecycle.drain_ms,
            other_urls=self._other_urls(),
        )
        write_state(state_folder(self._config), state)
        return state

    def _other_urls(self) -> tuple[str, ...]:
        return tuple(f"http://{address}" for address in self.gateway_addresses[1:])

    async def _wait_ready(self) -> None:
        assert self._front is not None, "started before"
        limit_s = self._config.lifecycle.ready_timeout_ms / 1000
        deadline_ns = self._clock.monotonic_ns() + int(limit_s * NS_PER_S)
        async with httpx.AsyncClient(trust_env=False, timeout=2.0) as client:
            while True:
                if self._start_failure is not None:
                    raise self._start_failure
                missing = self._missing() or await self._front.missing(client)
                if not missing:
                    return
                if self._clock.monotonic_ns() > deadline_ns:
                    what = ", ".join(missing)
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
                    continue
                try:
                    info = info_from_pb(common_pb2.InstanceInfo.FromString(event.entry.value))
                except (DecodeError, IsthmusError) as error:
                    self._say(Stage.WARNING, f"the record of {instance_id} is unreadable: {error}")
                    continue
                self._instance_changed(instance_id, info)

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
            url=f"http://{self.gateway_addresses[0]}",
            other_urls=self._other_urls(),
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
            if self._front is not None:
                last_to_first.push_async_callback(self._front.stop_routers)
                last_to_first.push_async_callback(self._front.stop_gateways)

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
