"""Workers as Ray actors: one placement group per instance, with a bundle for each of its ranks.

The leader's actor is started here; it starts those of its followers (``worker.ray_ranks``).

Without an address a private Ray is started for this cluster alone: on the loopback interface, with
a token of its own, no usage reports and no dashboard pages; it ends with this process, whatever way
that ends. With an address a running Ray is joined and left as it was.

Ray restarts an actor whose process ends in a fault. A worker that keeps ending soon after its start
is given up here, so that the supervisor's growing pauses apply to it instead of Ray's none.

Ray's calls that block run in one thread of their own, which lives as long as the actuator: the
kernel ends Ray's processes together with the thread that started them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import ray
import ray.exceptions
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from isthmus.common.clock import NS_PER_S, Clock
from isthmus.common.errors import CapacityError, ConfigError
from isthmus.controlplane.actuators.base import Exit, ProcessSpec, process_environment
from isthmus.controlplane.logs import last_problem, log_file
from isthmus.controlplane.state_file import process_start
from isthmus.worker.lifecycle import ExitCode
from isthmus.worker.ray_actor import ActorHealth, remote_worker_class

ResultT = TypeVar("ResultT")

OBJECT_STORE_BYTES = 80 * 2**20  # nothing but replies of a few bytes goes through it
PLACEMENT_TIMEOUT_S = 20.0
FAULT_WINDOW_S = 60.0
MAX_FAULTS_IN_WINDOW = 3
_GONE_TIMEOUT_S = 5.0
_RESTART_PERIOD_S = 0.25  # Ray has no event for "restarted"


LEADER_BUNDLE = 0
_PLACE = "isthmus_instance"
_NUM_PLACES = 10_000


def instance_resources(spec: ProcessSpec, *, is_private: bool) -> dict[str, float]:
    """The placement group's bundle of one rank.

    A shared Ray hands out CPUs. In a private one nobody else competes, and an operator who scales
    beyond the cores of one machine means it: there an instance takes a place, not a CPU.
    """
    resources = {_PLACE: 1.0} if is_private else {"CPU": float(spec.num_threads)}
    if spec.pool.engine.device.startswith("cuda"):
        resources["GPU"] = 1.0
    return resources


class RayActuator:
    """Implements ``Actuator``. Owns the connection to Ray and, when private, Ray itself."""

    def __init__(
        self,
        cluster: str,
        address: str,
        log_dir: Path,
        clock: Clock,
    ) -> None:
        self._cluster = cluster
        self._address = address
        self._log_dir = log_dir
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray")
        self._temp_dir: Path | None = None
        self._handles: list[RayHandle] = []
        self._is_closed = False

    async def open(self) -> None:
        self._log_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            await self._call(self._connect)
        except Exception as error:  # Ray raises bare ones, of a start that takes too long
            where = f"join Ray at {self._address}" if self._address else "start Ray"
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigError(f"cannot {where}: {reason[0]}", stage="start") from error

    async def start(self, spec: ProcessSpec) -> RayHandle:
        """Raises CapacityError when Ray has no room for the instance."""
        resources = instance_resources(spec, is_private=self.is_private)
        bundles = [dict(resources) for _ in range(spec.pool.engine.tp_size)]
        group = await self._call(
            # One node for all ranks: they meet at the leader's address, and share its interface.
            lambda: placement_group(bundles, strategy="STRICT_PACK", name=self._full_name(spec))
        )
        if not await self._call(lambda: group.wait(PLACEMENT_TIMEOUT_S)):
            await self._call(lambda: remove_placement_group(group))
            wanted = ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
            ranks = f" for each of {len(bundles)} ranks" if len(bundles) > 1 else ""
            message = f"cannot place {spec.name}: Ray has no node with {wanted} free{ranks}"
            raise CapacityError(message, stage="start", instance_id=spec.name)
        actor = await self._call(lambda: self._create_actor(spec, group))
        handle = RayHandle(spec, group, actor, self)
        self._handles.append(handle)
        return handle

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for handle in self._handles:
            await handle.release()
        with suppress(RuntimeError):
            await self._call(ray.shutdown)
        self._thread.shutdown(wait=True)
        if self._temp_dir is not None:
            shutil.rmtree(self._temp_dir, ignore_errors=True)

    # --- for the handles ---

    @property
    def clock(self) -> Clock:
        return self._clock

    @property
    def is_private(self) -> bool:
        return not self._address

    def problem_of(self, name: str, pid: int) -> str:
        """What the log of an actor's process says about its end; empty when it is elsewhere."""
        file = self._ray_log(pid)
        if file is None:
            return ""
        with log_file(self._log_dir, name).open("ab") as log:
            log.write(file.read_bytes())
        return last_problem(file)

    async def remove_group(self, group: PlacementGroup) -> None:
        with suppress(ray.exceptions.RayError, RuntimeError):
            await self._call(lambda: remove_placement_group(group))

    # --- the thread ---

    async def _call(self, work: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _connect(self) -> None:
        # It warns that it is not in the main thread, where this process has handlers of its own.
        logging.getLogger("ray").setLevel(logging.ERROR)
        options: dict[str, Any] = {
            "namespace": f"isthmus-{self._cluster}",
            "log_to_driver": False,
            "configure_logging": False,
            "logging_level": "ERROR",
        }
        if self._address:
            ray.init(address=self._address, **options)
            return
        # Not in the state folder: Ray's socket names must stay within 107 characters.
        self._temp_dir = Path(tempfile.mkdtemp(prefix="isthmus-ray-"))
        ray.init(
            address="local",
            num_cpus=1,  # Ray starts as many idle workers ahead of need
            resources={_PLACE: _NUM_PLACES},
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(self._temp_dir),
            **options,
        )

    def _create_actor(self, spec: ProcessSpec, group: PlacementGroup) -> ray.actor.ActorHandle:
        role = spec.kind.role
        assert role is not None, "only instances run as actors"
        resources = instance_resources(spec, is_private=self.is_private)
        options: dict[str, Any] = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "max_restarts": -1,
            "max_task_retries": 0,
            "name": self._full_name(spec),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=LEADER_BUNDLE
            ),
        }
        if self._address:
            options["runtime_env"] = {"env_vars": process_environment(spec.num_threads)}
        actor_class = remote_worker_class().options(**options)
        return actor_class.remote(
            spec.config.model_dump_json(), role.value, spec.name, spec.registry_address
        )

    def _full_name(self, spec: ProcessSpec) -> str:
        # A name may be taken for a moment after its last holder was killed.
        return f"{spec.name}-{secrets.token_hex(4)}"

    def _ray_log(self, pid: int) -> Path | None:
        if self._temp_dir is None or not pid:
            return None
        return next(self._temp_dir.glob(f"session_*/logs/worker-*-{pid}.err"), None)


class RayHandle:
    """Implements ``Handle`` for one actor through all restarts that Ray makes of it."""

    def __init__(
        self,
        spec: ProcessSpec,
        group: PlacementGroup,
        actor: ray.actor.ActorHandle,
        actuator: RayActuator,
    ) -> None:
        self.pid = 0
        self.num_restarts = 0
        self._spec = spec
        self._group = group
        self._actor = actor
        self._actuator = actuator
        self._faults_ns: deque[int] = deque(maxlen=MAX_FAULTS_IN_WINDOW)
        self._is_stopping = False
        self._followed = asyncio.create_task(self._follow(), name=f"follow-{spec.name}")

    @property
    def is_alive(self) -> bool:
        return not self._followed.done()

    async def wait(self) -> Exit:
        try:
            return await asyncio.shield(self._followed)
        except asyncio.CancelledError:
            if self._followed.cancelled():  # by release, not this waiter
                return Exit("ended by force")
            raise

    async def stop(self, timeout_s: float) -> None:
        self._is_stopping = True
        drain_ms = self._spec.config.lifecycle.drain_ms
        self._actor.stop.remote("actuator", drain_ms)
        try:
            await asyncio.wait_for(self.wait(), timeout_s)
        except TimeoutError:
            self._end_actor()
        await self.release()

    def kill(self) -> None:
        """Ray starts the actor again unless it was told to stop."""
        if not self.is_alive:
            return
        if self._actuator.is_private and self.pid:
            # Ray asks a process to end itself, which one that hangs does not.
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        else:
            ray.kill(self._actor, no_restart=self._is_stopping)

    async def release(self) -> None:
        """Ends the actor for good and returns when its process is gone. Idempotent."""
        self._end_actor()
        self._followed.cancel()
        with suppress(asyncio.CancelledError):
            await self._followed
        await self._process_gone()
        await self._actuator.remove_group(self._group)

    async def _follow(self) -> Exit:
        """Stays with the actor until it has ended for good."""
        while True:
            code = await self._run_to_end()
            if code is not None:
                problem = self._actuator.problem_of(self._spec.name, self.pid)
                self._end_actor()
                await self._process_gone()
                await self._actuator.remove_group(self._group)
                reason = f"exit code {code}" + (f": {problem}" if code and problem else "")
                return Exit(reason, is_final=code == ExitCode.CONFIG)
            problem = self._actuator.problem_of(self._spec.name, self.pid)
            self.pid = 0
            if self._is_stopping or not self._may_restart():
                self._end_actor()
                await self._actuator.remove_group(self._group)
                return Exit(f"ended in a fault: {problem}" if problem else "its process ended")
            self.num_restarts += 1

    async def _run_to_end(self) -> int | None:
        """The worker's exit code, or None when its process ended without giving one."""
        try:
            self.pid = (await self._health()).pid
            return int(await _result(self._actor.run.remote()))
        except ray.exceptions.RayError:
            return None

    async def _health(self) -> ActorHealth:
        """The first sign of life of the actor's present process; Ray may be starting it still."""
        while True:
            try:
                health: ActorHealth = await _result(self._actor.health.remote())
                return health
            except ray.exceptions.ActorUnavailableError:
                await asyncio.sleep(_RESTART_PERIOD_S)

    def _may_restart(self) -> bool:
        now_ns = self._actuator.clock.monotonic_ns()
        self._faults_ns.append(now_ns)
        is_full = len(self._faults_ns) == MAX_FAULTS_IN_WINDOW
        return not is_full or now_ns - self._faults_ns[0] > FAULT_WINDOW_S * NS_PER_S

    def _end_actor(self) -> None:
        with suppress(ray.exceptions.RayError, ValueError, RuntimeError):
            ray.kill(self._actor, no_restart=True)

    async def _process_gone(self) -> None:
        """A private Ray's processes are on this machine: see the process end, or end it."""
        if not (self._actuator.is_private and self.pid):
            return
        deadline_ns = self._actuator.clock.monotonic_ns() + _GONE_TIMEOUT_S * NS_PER_S
        while process_start(self.pid) is not None:
            if self._actuator.clock.monotonic_ns() > deadline_ns:
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                return
            await asyncio.sleep(0.05)


async def _result(reference: ray.ObjectRef) -> Any:
    future: Future[Any] = reference.future()
    return await asyncio.wrap_future(future)
