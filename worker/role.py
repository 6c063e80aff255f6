"""What both roles get from the process around them, and what that process asks of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from isthmus.common.clock import Clock
from isthmus.common.cluster import Role
from isthmus.common.config import ClusterConfig
from isthmus.common.ids import InstanceId
from isthmus.common.types import InstanceRef
from isthmus.engine.core import EngineCore
from isthmus.engine.types import StepLaunch, StepOutput
from isthmus.kvtransfer.manager import TransferManager
from isthmus.worker.kv_event_log import KvEventLog
from isthmus.worker.lifecycle import Lifecycle
from isthmus.worker.load_reporter import LoadReporter, OutsideLoad
from isthmus.worker.metrics import InstanceMetrics


@dataclass(frozen=True, slots=True)
class WorkerArgs:
    """What a worker process is started with."""

    config: ClusterConfig
    role: Role
    instance_id: InstanceId
    registry: str  # host:port


@dataclass(frozen=True, slots=True)
class WorkerRuntime:
    """One instance's parts, built once and shared by reference. Belongs to the event loop."""

    args: WorkerArgs
    me: InstanceRef
    clock: Clock
    engine: EngineCore
    transfers: TransferManager
    lifecycle: Lifecycle
    kv_log: KvEventLog
    load: LoadReporter
    metrics: InstanceMetrics

    @property
    def config(self) -> ClusterConfig:
        return self.args.config

    def cache_changed(self) -> None:
        """To be called after the event loop changed the pool (not after a step: that is known)."""
        self.kv_log.collect()
        self.load.changed()


class RoleWorker(Protocol):
    """The part of a worker that differs between roles. All methods run on the event loop."""

    def start(self) -> None: ...

    def on_launch(self, launch: StepLaunch) -> None:
        """A step has begun that computes for PREFILL_ONLY sequences; ``on_step`` follows."""
        ...

    def on_step(self, output: StepOutput) -> None: ...

    def outside_load(self) -> OutsideLoad: ...

    def num_running(self) -> int:
        """Requests that a drain has to wait for."""
        ...

    def num_held(self) -> int:
        """Transfers of which something is still kept for a peer."""
        ...

    def idle_peers(self) -> set[InstanceId]:
        """Instances for which the role keeps something (a channel) that is not in use."""
        ...

    async def forget(self, instance_id: InstanceId) -> None:
        """Lets go of what is kept for an instance that has left."""
        ...

    async def close(self) -> None:
        """Ends what is left with a typed error and returns when nothing of it runs any more."""
        ...
