"""Whole workers in this process: real services and real KV bytes over a tiny model.

Each worker is ``run_worker`` in a task, with its own engine thread and gRPC server; the registry
and the local connector join them. A worker's model can be reached, to hold or fail its steps.
"""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType

from isthmus.common.clock import Clock
from isthmus.common.cluster import InstanceInfo, InstanceState, Role
from isthmus.common.config import ClusterConfig, EngineConfig
from isthmus.common.ids import InstanceId
from isthmus.common.registry import instances_prefix
from isthmus.common.registry.embedded import RegistryServer
from isthmus.decode_worker.main import build_role as build_decode
from isthmus.engine.core import EngineCore
from isthmus.prefill_worker.main import build_role as build_prefill
from isthmus.protos.convert.instances import info_from_pb
from isthmus.protos.v1 import common_pb2
from isthmus.worker.lifecycle import ExitCode, StopRequest
from isthmus.worker.process import load_engine, run_worker
from isthmus.worker.role import WorkerArgs
from isthmus.worker.transfers import staging_bytes_of
from tests.support.tiny_model import TinyModel

START_TIMEOUT_S = 60.0
TINY = "sample"  # path of a model that is not loaded: workers have a tiny one instead


class GatedModel(TinyModel):
    """A tiny model whose forward passes can be held at the door."""

    def __init__(self, seed: int = 0, windows: tuple[int, ...] = ()) -> None:
        super().__init__(seed, windows)
        self.gate = threading.Event()
        self.gate.set()
        self.num_held = 0

    def forward(self, batch, kv, marks=None, kv_scales=None):  # type: ignore[no-untyped-def]
        if not self.gate.is_set():
            self.num_held += 1
            self.gate.wait(60)
        return super().forward(batch, kv, marks, kv_scales)


class LocalWorker:
    """One worker in a task."""

    def __init__(
        self,
        role: Role,
        instance_id: str,
        config: ClusterConfig,
        seed: int,
        windows: tuple[int, ...] = (),
    ) -> None:
        self.role = role
        self.model = GatedModel(seed, windows)
        self.stop = StopRequest()
        self.engine: EngineCore | None = None
        self.info: InstanceInfo | None = None
        self.task: asyncio.Task[ExitCode] | None = None
        self._args = WorkerArgs(config, role, InstanceId(instance_id), "")

    def start(self, registry: str) -> None:
        args = WorkerArgs(self._args.config, self.role, self._args.instance_id, registry)
        build = build_prefill if self.role is Role.PREFILL else build_decode
        self.task = asyncio.create_task(run_worker(args, build, self.stop, self._build_engine))

    def _build_engine(self, args: WorkerArgs, clock: Clock) -> EngineCore:
        if args.config.model.path != TINY:
            self.engine = load_engine(args, clock)
            return self.engine
        self.engine = EngineCore(
            self.model,
            self._engine_config(args),
            clock,
            staging_bytes=staging_bytes_of(args.config, args.role),
        )
        return self.engine

    @staticmethod
    def _engine_config(args: WorkerArgs) -> EngineConfig:
        config = args.config
        pools = {Role.PREFILL: config.prefill, Role.DECODE: config.decode, Role.MIXED: config.mixed}
        return pools[args.role].engine

    @property
    def instance_id(self) -> str:
        return self._args.instance_id

    async def end(self) -> ExitCode:
        """Without a drain."""
        assert self.task is not None
        self.model.gate.set()
        self.stop.drain("test", 0)
        return await asyncio.wait_for(self.task, 60)


def local_config(max_num_seqs: int = 8, **sections: object) -> ClusterConfig:
    """Small pools of blocks of four tokens over the local connector."""
    engine = {
        "block_size": 4,
        "num_blocks": 65,
        "max_num_batched_tokens": 16,
        "max_num_seqs": max_num_seqs,
        "watermark": 0.0,
    }
    pool = {"engine": engine}
    tree: dict[str, object] = {
        "name": "local",
        "prefill": pool,
        "decode": pool,
        "mixed": pool,
        "transfer": {"connector": "local", "quarantine_ms": 200},
        "registry": {"lease_ms": 5_000},
    }
    return ClusterConfig.model_validate({**tree, **sections})


class LocalCluster:
    """Use as an async context manager; every worker still there at the end is ended."""

    def __init__(self, config: ClusterConfig | None = None) -> None:
        self.config = config or local_config()
        self.registry = RegistryServer()
        self.registry_address = ""
        self._workers: list[LocalWorker] = []

    async def __aenter__(self) -> LocalCluster:
        self.registry_address = await self.registry.start("127.0.0.1", 0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.gather(*(worker.end() for worker in self._workers))
        await self.registry.stop()

    def launch(
        self,
        role: Role,
        instance_id: str,
        config: ClusterConfig | None = None,
        *,
        seed: int = 0,
        windows: tuple[int, ...] = (),
    ) -> LocalWorker:
        worker = LocalWorker(role, instance_id, config or self.config, seed, windows)
        worker.start(self.registry_address)
        self._workers.append(worker)
        return worker

    async def start(
        self,
        role: Role,
        instance_id: str,
        config: ClusterConfig | None = None,
        *,
        seed: int = 0,
        windows: tuple[int, ...] = (),
    ) -> LocalWorker:
        worker = self.launch(role, instance_id, config, seed=seed, windows=windows)
        assert worker.task is not None
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                info = await self.find(instance_id)
                if info is not None and info.state is InstanceState.READY:
                    worker.info = info
                    return worker
                assert not worker.task.done(), f"{instance_id} ended: {worker.task.result()}"
                await asyncio.sleep(0.01)

    async def find(self, instance_id: str) -> InstanceInfo | None:
        for entry in await self.registry.registry.get(instances_prefix(self.config.name)):
            info = info_from_pb(common_pb2.InstanceInfo.FromString(entry.value))
            if info.instance_id == instance_id:
                return info
        return None
