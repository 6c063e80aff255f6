"""One worker process from start to end.

::

    epoch ─ load model ─ bind ─ transfers ─ register (STARTING) ─ calibrate ─ serve (READY)
                                                                                │ StopRequest
    exit ◀─ close everything ◀─ lease revoked ◀─ (STOPPED) ◀─ (DRAINING) ◀──────┘

The order of closing is the reverse of the order of building; what was never built is not closed.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from isthmus.common.clock import Clock, SystemClock
from isthmus.common.cluster import InstanceInfo, InstanceState
from isthmus.common.config import PoolConfig
from isthmus.common.errors import ConfigError, IsthmusError, ModelError
from isthmus.common.logging import get_logger
from isthmus.common.registry.embedded import EmbeddedRegistryClient
from isthmus.common.rpc import bind, create_server, stop_server
from isthmus.common.tasks import tell_if_broken
from isthmus.common.types import InstanceRef
from isthmus.engine.core import EngineCore
from isthmus.engine.types import StepOutput
from isthmus.kvtransfer.manager import TransferManager
from isthmus.kvtransfer.rank_port import RankPort
from isthmus.worker.calibrate import calibrate
from isthmus.worker.engine_loop import EngineLoop
from isthmus.worker.kv_event_log import KvEventLog
from isthmus.worker.lifecycle import ExitCode, Lifecycle, StopRequest
from isthmus.worker.load_reporter import LoadReporter, OutsideLoad
from isthmus.worker.metrics import InstanceMetrics, MetricsServer
from isthmus.worker.peer_watch import PeerWatch
from isthmus.worker.rank_launcher import ChildLauncher, RankLauncher
from isthmus.worker.registration import Registration, claim_epoch
from isthmus.worker.role import RoleWorker, WorkerArgs, WorkerRuntime
from isthmus.worker.service import HealthReporter, Server, add_services
from isthmus.worker.threads import run_in_thread
from isthmus.worker.transfers import open_local_port, staging_bytes_of

if TYPE_CHECKING:
    from isthmus.worker.ranks import Ranks

_WATCHDOG_S = 1.0
_SERVER_GRACE_S = 0.5
_CONNECTOR_CLOSE_S = 2.0

log = get_logger("process")


@dataclass(frozen=True, slots=True)
class RoleParts:
    """What a role's ``main`` contributes to the process."""

    worker: RoleWorker
    service_name: str


RoleFactory = Callable[[WorkerRuntime, Server], RoleParts]
EngineFactory = Callable[[WorkerArgs, Clock], EngineCore]


def pool_of(args: WorkerArgs) -> PoolConfig:
    return args.config.pool(args.role)


def load_engine(args: WorkerArgs, clock: Clock) -> EngineCore:
    """Loads the configured model. Raises ModelError and ConfigError."""
    staging_bytes = staging_bytes_of(args.config, args.role)
    return EngineCore.build(args.config.model, pool_of(args).engine, clock, staging_bytes)


async def run_worker(
    args: WorkerArgs,
    build_role: RoleFactory,
    stop: StopRequest,
    build_engine: EngineFactory = load_engine,
    launcher: RankLauncher | None = None,
) -> ExitCode:
    """Runs until asked to stop. Says on the log why it ended when that was not a drain.

    ``launcher`` starts the followers of an instance of several ranks; None = as children.
    """
    try:
        async with AsyncExitStack() as stack:
            parts = (build_role, build_engine, launcher or ChildLauncher())
            await _Worker(args, *parts, stop, stack).run()
    except (ModelError, ConfigError) as error:
        log.error("cannot start", code=error.code, problem=error.message)
        return ExitCode.CONFIG
    except IsthmusError as error:
        log.error("worker failed", code=error.code, stage=error.stage, problem=error.message)
        return ExitCode.FAULT
    if stop.exit_code is not ExitCode.OK:
        log.error("worker ends after a fault", problem=stop.reason)
    return stop.exit_code


class _Worker:
    """The stages of one process; ``stack`` closes what they opened."""

    def __init__(
        self,
        args: WorkerArgs,
        build_role: RoleFactory,
        build_engine: EngineFactory,
        launcher: RankLauncher,
        stop: StopRequest,
        stack: AsyncExitStack,
    ) -> None:
        self._launcher = launcher
        self._ranks: Ranks | None = None  # of an instance of several
        self._args = args
        self._build_role = build_role
        self._build_engine = build_engine
        self._stop = stop
        self._stack = stack
        self._clock: Clock = SystemClock()
        self._role: RoleWorker | None = None

    async def run(self) -> None:
        started = asyncio.create_task(self._start(), name="start")
        asked = asyncio.create_task(self._stop.wait(), name="stop-request")
        try:
            await asyncio.wait({started, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not started.done():  # asked to stop while starting: there is nothing to drain
                started.cancel()
                await asyncio.wait({started})
                return
            lifecycle, role = started.result()
            await asked
            await self._drain(lifecycle, role)
        finally:
            asked.cancel()

    async def _start(self) -> tuple[Lifecycle, RoleWorker]:
        args, config, stack = self._args, self._args.config, self._stack
        registry = EmbeddedRegistryClient(args.registry)
        stack.push_async_callback(registry.close)
        epoch = await claim_epoch(
            registry, config.name, args.instance_id, config.lifecycle.ready_timeout_ms / 1000
        )
        engine = await self._load()
        stack.callback(engine.close)
        server = create_server()
        address = await bind(server, config.host, 0)
        me = InstanceRef(args.instance_id, epoch, address)
        metrics = InstanceMetrics(args.role, me, engine)
        transfers = await self._build_transfers(me, engine, metrics)
        metrics.bind_sessions(transfers.sessions_by_state)
        transfers.start()
        stack.push_async_callback(transfers.close)
        metrics_server = MetricsServer(config.host)
        stack.callback(metrics_server.close)
        registration = Registration(
            registry,
            config.name,
            _describe(args, me, engine, metrics_server.address, self._rank_pids()),
            config.registry.lease_ms,
            on_superseded=lambda: self._stop.fail("a newer epoch of this instance exists"),
        )
        stack.push_async_callback(registration.close)
        registration.start()
        lifecycle = Lifecycle(registration)
        lifecycle.subscribe(metrics.state_changed)
        runtime = WorkerRuntime(
            args=args,
            me=me,
            clock=self._clock,
            engine=engine,
            transfers=transfers,
            lifecycle=lifecycle,
            kv_log=KvEventLog(engine, me.instance_id, epoch),
            load=LoadReporter(engine, me, self._clock, self._outside_load),
            metrics=metrics,
        )
        budget = pool_of(args).engine.max_num_batched_tokens
        latency = await run_in_thread(lambda: calibrate(engine, budget, self._clock))
        engine.expect(latency)
        health = await self._serve(runtime, server)
        watch = PeerWatch(
            registry,
            config.name,
            self._clock,
            config.transfer.peer_grace_ms,
            (transfers, self._require_role()),
        )
        stack.push_async_callback(watch.close)
        watch.start()
        runtime.lifecycle.ready(latency)
        await health.set(True)
        log.info("ready", address=address, epoch=epoch, metrics=metrics_server.address)
        return runtime.lifecycle, self._require_role()

    async def _load(self) -> EngineCore:
        if pool_of(self._args).engine.tp_size == 1:
            return await run_in_thread(lambda: self._build_engine(self._args, self._clock))
        # Here, not above: an instance of one process needs no torch.distributed.
        from isthmus.worker.ranks import Ranks

        ranks = Ranks(self._args, self._launcher)
        self._stack.push_async_callback(lambda: run_in_thread(ranks.close))
        ranks.launch()
        engine = await ranks.start(self._clock)
        self._ranks = ranks
        ranks.failed.add_done_callback(lambda failed: self._stop.fail(str(failed.exception())))
        return engine

    async def _build_transfers(
        self, me: InstanceRef, engine: EngineCore, metrics: InstanceMetrics
    ) -> TransferManager:
        config = self._args.config.transfer
        ports: list[RankPort] = [open_local_port(config, me, engine.kv_store, self._clock)]
        if self._ranks is not None:
            try:
                ports += await self._ranks.open_ports(me, self._clock)
            except BaseException:
                await ports[0].close(_CONNECTOR_CLOSE_S)
                raise
        return TransferManager(
            me,
            ports,
            config,
            self._clock,
            metrics,
            on_failed=lambda error: self._stop.fail(f"transfers: {error}"),
        )

    async def _serve(self, runtime: WorkerRuntime, server: Server) -> HealthReporter:
        parts = self._build_role(runtime, server)
        self._role = role = parts.worker

        def on_step(output: StepOutput) -> None:
            role.on_step(output)
            runtime.metrics.observe_step(output)
            runtime.cache_changed()

        engine_loop = EngineLoop(
            runtime.engine,
            self._clock,
            on_step,
            on_fatal=lambda error: self._stop.fail(f"engine: {error}"),
            on_launch=role.on_launch,
        )
        health = add_services(server, runtime, role, self._stop, parts.service_name)
        self._stack.push_async_callback(engine_loop.stop)
        self._stack.push_async_callback(role.close)
        self._stack.push_async_callback(stop_server, server, _SERVER_GRACE_S)
        engine_loop.start()
        role.start()
        await server.start()
        watchdog = asyncio.create_task(
            self._watch_progress(engine_loop, runtime.lifecycle, health), name="watchdog"
        )
        watchdog.add_done_callback(tell_if_broken(log, "nobody looks for hung steps any more"))
        self._stack.callback(watchdog.cancel)
        return health

    async def _watch_progress(
        self, engine_loop: EngineLoop, lifecycle: Lifecycle, health: HealthReporter
    ) -> None:
        """Not ready while work waits and no step ends; ends the process when a step hangs."""
        while True:
            await asyncio.sleep(_WATCHDOG_S)
            is_progressing = engine_loop.is_progressing()
            if not is_progressing:
                log.warning("no step has ended for a long time although there is work")
            await health.set(is_progressing and lifecycle.state is InstanceState.READY)
            if engine_loop.is_hung():
                self._stop.fail("an engine step does not return")

    async def _drain(self, lifecycle: Lifecycle, role: RoleWorker) -> None:
        if self._stop.exit_code is ExitCode.OK:
            drain_ms = self._stop.drain_ms
            if drain_ms is None:
                drain_ms = self._args.config.lifecycle.drain_ms
            await lifecycle.drain(role.num_running, drain_ms)
            await role.close()
            lifecycle.stopped()

    def _rank_pids(self) -> tuple[int, ...]:
        return self._ranks.pids if self._ranks is not None else (os.getpid(),)

    def _outside_load(self) -> OutsideLoad:
        return self._role.outside_load() if self._role is not None else OutsideLoad()

    def _require_role(self) -> RoleWorker:
        assert self._role is not None, "set by _serve"
        return self._role


def _describe(
    args: WorkerArgs,
    me: InstanceRef,
    engine: EngineCore,
    metrics_address: str,
    rank_pids: tuple[int, ...],
) -> InstanceInfo:
    limits = pool_of(args).engine
    return InstanceInfo(
        instance_id=me.instance_id,
        role=args.role,
        state=InstanceState.STARTING,
        epoch=me.epoch,
        address=me.address,
        metrics_address=metrics_address,
        model=args.config.model.served_name or engine.spec.name,
        model_path=args.config.model.path,
        kv_layout=engine.kv_layout,
        num_blocks=engine.num_blocks,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=engine.max_model_len,
        connector=",".join(sorted(args.config.transfer.named_connectors)) or "auto",
        node=socket.gethostname(),
        pid=os.getpid(),
        version=version("isthmus"),
        rank_pids=rank_pids,
        zone=pool_of(args).zone or args.config.zone,
        # Nothing is fetched where a transfer leaves out what no window sees.
        fetch_min_tokens=0 if engine.kv_layout.windows else args.config.transfer.fetch_min_tokens,
    )
