"""A worker as a Ray actor. Ray starts, places and restarts it and is never on the request path.

The worker runs on an event loop in a thread of the actor's process, just as it would in a process
of its own. After a fault the whole process exits, so that Ray sees it and starts a new one, which
takes a new epoch; a live actor around a dead engine cannot exist.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

import ray

from isthmus.common.cluster import Role
from isthmus.common.config import ClusterConfig
from isthmus.common.ids import InstanceId
from isthmus.common.logging import configure_logging
from isthmus.worker.lifecycle import ExitCode, StopRequest
from isthmus.worker.pool import prepare_process
from isthmus.worker.process import pool_of, run_worker
from isthmus.worker.role import WorkerArgs

# By name: this package is below the roles and cannot import them.
ROLE_MODULES = {
    Role.PREFILL: "isthmus.prefill_worker.main",
    Role.DECODE: "isthmus.decode_worker.main",
    Role.MIXED: "isthmus.decode_worker.main",
}
CONCURRENCY = 4  # run() blocks for the life of the worker; health() and stop() go beside it


@dataclass(frozen=True, slots=True)
class ActorHealth:
    pid: int
    is_running: bool
    exit_code: int | None


class WorkerActor:
    """Runs from its construction on. Make it remote with ``remote_worker_class``."""

    def __init__(self, config_json: str, role: str, instance_id: str, registry: str) -> None:
        self._args = WorkerArgs(
            config=ClusterConfig.model_validate_json(config_json),
            role=Role(role),
            instance_id=InstanceId(instance_id),
            registry=registry,
        )
        self._loop = asyncio.new_event_loop()
        self._stop: StopRequest | None = None
        self._exit_code: ExitCode | None = None
        self._has_ended = threading.Event()
        threading.Thread(target=self._run_loop, name="worker", daemon=True).start()

    def run(self) -> int:
        """Blocks until the worker has ended in order (0) or cannot start as configured (2)."""
        self._has_ended.wait()
        return int(self._exit_code or ExitCode.OK)

    def health(self) -> ActorHealth:
        code = self._exit_code
        return ActorHealth(os.getpid(), code is None, None if code is None else int(code))

    def stop(self, reason: str = "actuator", drain_ms: int | None = None) -> None:
        """Asks for a drain and returns at once; ``run`` returns when it is over."""
        self._loop.call_soon_threadsafe(self._ask_to_stop, reason, drain_ms)

    def _ask_to_stop(self, reason: str, drain_ms: int | None) -> None:
        if self._stop is not None:
            self._stop.drain(reason, drain_ms)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        code = ExitCode.FAULT
        try:
            code = self._loop.run_until_complete(_run(self._args, self._remember))
        finally:
            if code is ExitCode.FAULT:
                sys.stderr.flush()
                os._exit(code)
            self._exit_code = code
            self._has_ended.set()

    def _remember(self, stop: StopRequest) -> None:
        self._stop = stop


# Not a method: a class with a coroutine method is an asyncio actor to Ray, which runs all methods
# of such a class on one loop, and run() would keep stop() from ever being heard.
async def _run(args: WorkerArgs, remember: Callable[[StopRequest], None]) -> ExitCode:
    configure_logging(args.config.logging, role=args.role.value, instance=args.instance_id)
    prepare_process(pool_of(args))
    build_role = importlib.import_module(ROLE_MODULES[args.role]).build_role
    stop = StopRequest()
    remember(stop)
    launcher = None
    if pool_of(args).engine.tp_size > 1:
        # Here, not above: an instance of one process needs nothing of it.
        from isthmus.worker.ray_ranks import RayLauncher

        launcher = RayLauncher()
    return await run_worker(args, build_role, stop, launcher=launcher)


def remote_worker_class() -> ray.actor.ActorClass:
    """``WorkerActor`` as Ray wants it; the caller adds resources, placement and restarts."""
    return ray.remote(max_concurrency=CONCURRENCY)(WorkerActor)
