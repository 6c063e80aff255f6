"""Plain child processes: gateways and routers always, and workers where Ray is not wanted.

Each child leads its own session (a Ctrl-C at the terminal reaches only the control process, which
then drains them in order), dies with its parent, and writes its output to a log file of its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from isthmus.common.errors import InternalError
from isthmus.controlplane.actuators.base import (
    Exit,
    Handle,
    ProcessKind,
    ProcessSpec,
    process_environment,
)
from isthmus.controlplane.logs import last_problem, log_file

CONFIG_EXIT_CODE = 2  # of a process that cannot start as it is configured
LAUNCH = str(Path(__file__).with_name("launch.py"))
MODULES: Mapping[ProcessKind, str] = {
    ProcessKind.GATEWAY: "isthmus.gateway.main",
    ProcessKind.ROUTER: "isthmus.router.main",
    ProcessKind.PREFILL: "isthmus.prefill_worker.main",
    ProcessKind.DECODE: "isthmus.decode_worker.main",
    ProcessKind.MIXED: "isthmus.decode_worker.main",
}


def command_of(spec: ProcessSpec, config_file: Path, module: str) -> list[str]:
    """Arguments for Python that run ``spec``."""
    command = ["-m", module, "--config-json", str(config_file)]
    command += ["--registry", spec.registry_address]
    if spec.kind.role is not None:
        command += ["--instance-id", spec.name]
    else:
        command += [f"--{spec.kind.value}-id", spec.name]
    if spec.kind in (ProcessKind.DECODE, ProcessKind.MIXED):
        command += ["--role", spec.kind.value]
    return command


def describe_exit(returncode: int, log: Path) -> Exit:
    """The exit in words; for a process that ended in a fault with what its log says of it."""
    if returncode < 0:
        number = -returncode
        known = {item.value: item.name for item in signal.Signals}
        return Exit(f"ended by {known.get(number, f'signal {number}')}")
    problem = last_problem(log) if returncode else ""
    reason = f"exit code {returncode}" if not problem else f"exit code {returncode}: {problem}"
    return Exit(reason, is_final=returncode == CONFIG_EXIT_CODE)


class ProcessActuator:
    """Implements ``Actuator``. ``run_dir`` holds configuration files, ``log_dir`` the logs."""

    def __init__(
        self, run_dir: Path, log_dir: Path, modules: Mapping[ProcessKind, str] = MODULES
    ) -> None:
        self._run_dir = run_dir
        self._log_dir = log_dir
        self._modules = modules
        self._handles: list[ProcessHandle] = []

    async def open(self) -> None:
        for folder in (self._run_dir, self._log_dir):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    async def start(self, spec: ProcessSpec) -> Handle:
        config_file = self._run_dir / f"{spec.name}.json"
        config_file.touch(mode=0o600)
        config_file.write_text(spec.config.model_dump_json(), encoding="utf-8")
        cpus = ",".join(map(str, spec.cpus)) or "-"
        launch = ["-I", "-S", LAUNCH, str(os.getpid()), cpus]
        with log_file(self._log_dir, spec.name).open("ab") as log:
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *launch,
                    *command_of(spec, config_file, self._modules[spec.kind]),
                    stdin=DEVNULL,
                    stdout=log,
                    stderr=STDOUT,
                    start_new_session=True,
                    env=os.environ | process_environment(spec.num_threads),
                )
            except OSError as error:
                message = f"cannot start {spec.name}: {error.strerror}"
                raise InternalError(message, stage="start") from error
        handle = ProcessHandle(process, log_file(self._log_dir, spec.name))
        self._handles = [known for known in self._handles if known.is_alive]
        self._handles.append(handle)
        return handle

    async def close(self) -> None:
        for handle in self._handles:
            handle.kill()
        for handle in self._handles:
            await handle.wait()
        self._handles.clear()


class ProcessHandle:
    """Implements ``Handle`` for one child process."""

    num_restarts = 0

    def __init__(self, process: Process, log: Path) -> None:
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def wait(self) -> Exit:
        return describe_exit(await self._process.wait(), self._log)

    async def stop(self, timeout_s: float) -> None:
        if self.is_alive:
            with suppress(ProcessLookupError):
                self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        if self.is_alive:
            # The group: a child of the child (a compiler) must not outlive it.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
