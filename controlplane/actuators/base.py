"""What starts and stops the processes of a cluster, behind one protocol.

An ``Actuator`` starts; the ``Handle`` it gives back is that one process until its end. Whether and
when to start again is decided by ``SupervisedProcess``, never here (Ray restarts its own actors
faster than anyone else could; its handle then lives on and counts ``num_restarts``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from isthmus.common.cluster import Role
from isthmus.common.config import ClusterConfig, PoolConfig


class ProcessKind(Enum):
    GATEWAY = "gateway"
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @property
    def role(self) -> Role | None:
        """None for what is no instance."""
        is_instance = self not in (ProcessKind.GATEWAY, ProcessKind.ROUTER)
        return Role(self.value) if is_instance else None


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process as it should be; ``name`` is the instance id of a worker.

    ``config`` is the process's own: its pool's ``cpus`` are the cores of this one process.
    """

    name: str
    kind: ProcessKind
    config: ClusterConfig
    registry_address: str
    cpus: tuple[int, ...] = ()

    @property
    def pool(self) -> PoolConfig:
        """Of an instance; gateways and routers are in none."""
        role = self.kind.role
        assert role is not None, f"{self.name} is no instance"
        return self.config.pool(role)

    @property
    def num_threads(self) -> int:
        return 1 if self.kind.role is None else self.pool.engine.num_threads


def process_environment(num_threads: int) -> dict[str, str]:
    """Environment that every process of a cluster needs, whoever starts it."""
    return {
        # Two threads that spin while a third process runs make small products 30 times slower.
        "OMP_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        # Without it a process that used UCX on a machine without InfiniBand crashes at its exit.
        "UCX_MODULES": "^ib",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended; ``is_final``: a restart cannot help, the configuration has to change."""

    reason: str
    is_final: bool = False


class Handle(Protocol):
    """One started process."""

    @property
    def pid(self) -> int:
        """0 while it is not known."""
        ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def num_restarts(self) -> int:
        """Restarts that the actuator made by itself under this handle."""
        ...

    async def wait(self) -> Exit:
        """Returns when the process is gone for good. May be called and cancelled many times."""
        ...

    async def stop(self, timeout_s: float) -> None:
        """Asks the process to drain and leave, ends it after the time; returns when it is gone."""
        ...

    def kill(self) -> None:
        """Ends the process at once. Idempotent."""
        ...


class Actuator(Protocol):
    async def open(self) -> None:
        """Makes ready to start processes. Raises ConfigError in one sentence when it cannot."""
        ...

    async def start(self, spec: ProcessSpec) -> Handle:
        """Raises IsthmusError when the process cannot be started."""
        ...

    async def close(self) -> None:
        """Ends whatever it still holds. Idempotent."""
        ...
