"""Worker processes on loopback, started and ended one by one by their pid.

They are forked from a server that has imported their modules already, because importing
torch is most of the time that a tiny worker takes to start. ``fresh=True`` starts one as an
operator would, with an interpreter of its own.
"""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import multiprocessing.process
import os
import signal
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType

from isthmus.common.cluster import InstanceInfo, InstanceState, Role
from isthmus.common.config import ClusterConfig
from isthmus.common.registry import instances_prefix
from isthmus.common.registry.embedded import RegistryServer
from isthmus.protos.convert.instances import info_from_pb
from isthmus.protos.v1 import common_pb2
from tests.support.poll import poll_until
from tests.support.ports import held_port

MODULES = {
    Role.PREFILL: "isthmus.prefill_worker.main",
    Role.DECODE: "isthmus.decode_worker.main",
    Role.MIXED: "isthmus.decode_worker.main",
}
START_TIMEOUT_S = 200.0
ENVIRON = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "UCX_MODULES": "^ib"}


forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(
    [*sorted(set(MODULES.values())), "isthmus.engine.models.loader", "isthmus.gateway.main"]
)


def _run_module(module: str, argv: list[str], log: str, environ: dict[str, str]) -> None:
    """In the child: its log to a file, then the module's own main."""
    os.environ.update(environ)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.exit(importlib.import_module(module).main(argv))


class ChildProcess:
    """One started ``module``; its log goes to a file."""

    def __init__(self, module: str, argv: list[str], log: Path, fresh: bool) -> None:
        self.log = log
        self._popen: subprocess.Popen[bytes] | None = None
        self._forked: multiprocessing.process.BaseProcess | None = None
        if fresh:
            with log.open("ab") as output:
                self._popen = subprocess.Popen(
                    [sys.executable, "-m", module, *argv],
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **ENVIRON},
                )
        else:
            self._forked = forkserver.Process(
                target=_run_module, args=(module, argv, str(log), ENVIRON), daemon=True
            )
            self._forked.start()

    @property
    def pid(self) -> int:
        pid = self._popen.pid if self._popen is not None else self._process.pid
        assert pid is not None
        return pid

    @property
    def _process(self) -> multiprocessing.process.BaseProcess:
        assert self._forked is not None
        return self._forked

    @property
    def exit_code(self) -> int | None:
        return self._popen.poll() if self._popen is not None else self._process.exitcode

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def wait(self, timeout_s: float = 60.0) -> int:
        """The exit code; negative for a signal."""
        await poll_until(lambda: self.exit_code is not None, timeout_s)
        assert self.exit_code is not None
        return self.exit_code

    def end(self) -> None:
        if self.exit_code is None:
            self.signal(signal.SIGKILL)
        if self._popen is not None:
            self._popen.wait(10)
        else:
            self._process.join(10)
            self._process.close()

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")


class WorkerProcess(ChildProcess):
    """One started worker."""

    def __init__(self, role: Role, instance_id: str, argv: list[str], log: Path, fresh: bool):
        super().__init__(MODULES[role], argv, log, fresh)
        self.role = role
        self.instance_id = instance_id
        self.info: InstanceInfo | None = None


class WorkerCluster:
    """A registry in this process and workers as children. Use as an async context manager.

    The ports of the registry and of a gateway without one are held, so that both can come back.
    """

    def __init__(self, config: ClusterConfig, folder: Path) -> None:
        self.config = config
        self.registry = RegistryServer()
        self.registry_address = ""
        self.gateway_registry = ""  # where the gateway looks, when not there
        self.num_started = 0
        self._started: list[ChildProcess] = []
        self.folder = folder
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> WorkerCluster:
        if self.config.gateway.port == 0:
            port = self._stack.enter_context(held_port())
            gateway = self.config.gateway.model_copy(update={"port": port})
            self.config = self.config.model_copy(update={"gateway": gateway})
        registry_port = self._stack.enter_context(held_port())
        self.registry_address = await self.registry.start("127.0.0.1", registry_port)
        self._stack.push_async_callback(self._stop_registry)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self._started:
            worker.end()
        await self._stack.aclose()

    async def _stop_registry(self) -> None:
        """Whichever is there by then."""
        await self.registry.stop()

    def spawn(
        self,
        role: Role,
        instance_id: str,
        config: ClusterConfig | None = None,
        *,
        fresh: bool = False,
    ) -> WorkerProcess:
        self.num_started += 1
        name = f"{instance_id}.{self.num_started}"
        file = self.folder / f"{name}.json"
        file.write_text((config or self.config).model_dump_json())
        argv = ["--config-json", str(file), "--instance-id", instance_id]
        argv += ["--registry", self.registry_address]
        if role is not Role.PREFILL:
            argv += ["--role", role.value]
        worker = WorkerProcess(role, instance_id, argv, self.folder / f"{name}.log", fresh)
        self._started.append(worker)
        return worker

    def spawn_gateway(self) -> ChildProcess:
        """The gateway of ``config``, on the port named there."""
        self.num_started += 1
        name = f"gateway.{self.num_started}"
        file = self.folder / f"{name}.json"
        file.write_text(self.config.model_dump_json())
        registry = self.gateway_registry or self.registry_address
        argv = ["--config-json", str(file), "--registry", registry]
        gateway = ChildProcess("isthmus.gateway.main", argv, self.folder / f"{name}.log", False)
        self._started.append(gateway)
        return gateway

    async def start(self, *specs: tuple[Role, str]) -> list[WorkerProcess]:
        """Starts workers side by side and waits until all are READY."""
        workers = [self.spawn(role, instance_id) for role, instance_id in specs]
        for worker in workers:
            await self.wait_ready(worker)
        return workers

    async def wait_ready(self, worker: WorkerProcess) -> InstanceInfo:
        return await self.wait_state(worker, InstanceState.READY)

    async def wait_state(self, worker: WorkerProcess, state: InstanceState) -> InstanceInfo:
        ends = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < ends:
            info = await self.find(worker.instance_id)
            if info is not None and info.state is state and info.pid == worker.pid:
                worker.info = info
                return info
            if worker.exit_code is not None:
                break
            await asyncio.sleep(0.05)
        raise AssertionError(
            f"{worker.instance_id} did not become {state.value}:\n{worker.log_text()}"
        )

    async def find(self, instance_id: str) -> InstanceInfo | None:
        for entry in await self.registry.registry.get(instances_prefix(self.config.name)):
            info = info_from_pb(common_pb2.InstanceInfo.FromString(entry.value))
            if info.instance_id == instance_id:
                return info
        return None
