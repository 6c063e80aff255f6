"""Desired replicas per role → supervised processes.

``scale`` changes what is wanted; ``reconcile`` starts what is missing and stops what is too much,
the highest numbers first, and touches nothing else. A process that is alive but was not seen in the
registry for too long is hung or cut off: it is ended, and its supervisor starts it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from isthmus.common.clock import NS_PER_MS, Clock
from isthmus.common.cluster import Role
from isthmus.common.config import ClusterConfig
from isthmus.common.errors import DrainingError
from isthmus.common.logging import get_logger
from isthmus.controlplane.actuators.base import Actuator, ProcessKind, ProcessSpec
from isthmus.controlplane.placement import desired_replicas, instance_name, plan_cpus, with_cpus
from isthmus.controlplane.supervised import ProcessState, SupervisedProcess

_log = get_logger("reconciler")
_GRACE_S = 3.0  # between the end of a drain and the kill


class Reconciler:
    """Owns the workers of one cluster and the tasks that supervise them."""

    def __init__(
        self,
        config: ClusterConfig,
        actuator: Actuator,
        clock: Clock,
        registry_address: str,
        cores: Collection[int] = (),
        on_exit: Callable[[SupervisedProcess], None] = lambda _: None,
    ) -> None:
        self.processes: dict[str, SupervisedProcess] = {}
        self._config = config
        self._actuator = actuator
        self._clock = clock
        self._registry_address = registry_address
        self._cpus = plan_cpus(config, sorted(cores))
        self._on_exit = on_exit
        self._desired = desired_replicas(config)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._unseen_since_ns: dict[str, int] = {}
        self._changes: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()
        self._is_stopping = False

    async def scale(self, role: Role, replicas: int) -> int:
        """Sets the wanted number of one role and returns the old one.

        Raises DrainingError when everything is being stopped."""
        if self._is_stopping:
            raise DrainingError("the cluster is being stopped", stage="scale")
        old = self._desired[role]
        self._desired = {**self._desired, role: replicas}
        change = asyncio.create_task(self.reconcile(), name=f"scale-{role.value}")
        self._changes.add(change)
        change.add_done_callback(self._changed)
        await asyncio.shield(change)  # whoever asked may leave; what has begun is seen through
        return old

    def _changed(self, change: asyncio.Task[None]) -> None:
        self._changes.discard(change)
        if not change.cancelled() and (error := change.exception()) is not None:
            _log.warning("a scaling failed", problem=str(error))

    async def reconcile(self) -> None:
        """Makes the processes be the wanted ones. Calls from several tasks take turns."""
        async with self._lock:
            if self._is_stopping:  # one that waited for its turn must not start anything again
                return
            wanted = {
                instance_name(role, index): role
                for role, replicas in self._desired.items()
                for index in range(replicas)
            }
            surplus = [name for name in self.processes if name not in wanted]
            await asyncio.gather(*(self._stop(name) for name in surplus))
            for name, role in wanted.items():
                if name not in self.processes:
                    self._start(name, role)

    def check_seen(self, registered: Collection[str]) -> list[str]:
        """Ends running workers that have been out of the registry too long; returns their names.

        ``registered`` are the instance ids in the registry now. Call it periodically.
        """
        now_ns = self._clock.monotonic_ns()
        limit_ns = self._config.lifecycle.ready_timeout_ms * NS_PER_MS
        hung = []
        for name, process in self.processes.items():
            if name in registered or process.state is not ProcessState.RUNNING:
                self._unseen_since_ns.pop(name, None)
            elif now_ns - self._unseen_since_ns.setdefault(name, now_ns) > limit_ns:
                hung.append(name)
                self._unseen_since_ns.pop(name)
                process.kill()
        return hung

    async def stop_all(self) -> None:
        """For good: no process is started any more."""
        self._is_stopping = True
        async with self._lock:
            await asyncio.gather(*(self._stop(name) for name in list(self.processes)))

    def _start(self, name: str, role: Role) -> None:
        cpus = self._cpus.get(name, ())  # one that was added later is not pinned
        spec = ProcessSpec(
            name=name,
            kind=ProcessKind(role.value),
            config=with_cpus(self._config, role, cpus),
            registry_address=self._registry_address,
            cpus=cpus,
        )
        process = SupervisedProcess(
            spec,
            self._actuator,
            self._clock,
            self._config.lifecycle.max_restarts,
            on_exit=self._on_exit,
        )
        self.processes[name] = process
        self._tasks[name] = asyncio.create_task(process.run(), name=f"supervise-{name}")

    async def _stop(self, name: str) -> None:
        drain_s = self._config.lifecycle.drain_ms / 1000 + _GRACE_S
        await self.processes[name].stop(drain_s)
        await self._tasks.pop(name)
        del self.processes[name]
