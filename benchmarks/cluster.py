"""An Isthmus cluster of its own for a measurement: started by the CLI, stopped by its pid."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from isthmus.controlplane.client import InstanceStatus, cluster_status
from isthmus.controlplane.state_file import find_running

OUT = Path(__file__).resolve().parent / "out"
MODEL_NAME = "bench"
CLUSTER_NAME = "bench"
PAIR = (
    "--prefill", "1", "--decode", "1", "--actuator", "process",
    "--set", "prefill.cpus=[0]", "--set", "decode.cpus=[1]",
)  # fmt: skip
"""One prefill and one decode instance, each on a core of its own."""
VOCAB = 49_152
"""Of the sample model."""


@dataclass(frozen=True, slots=True)
class Running:
    url: str
    pid: int
    ready_s: float
    state_dir: Path

    async def fetch_instances(self) -> tuple[InstanceStatus, ...]:
        """What ``isthmus status`` shows."""
        state = find_running(self.state_dir, CLUSTER_NAME)
        if state is None:
            raise RuntimeError("the cluster is not running any more")
        return (await cluster_status(state.control_address)).instances


def cli(*words: str) -> list[str]:
    return [sys.executable, "-m", "isthmus.cli.main", *words]


@contextmanager
def ended_in_order() -> Iterator[None]:
    """A SIGTERM unwinds the stack meanwhile, so that no cluster outlives its benchmark."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def serve(model: Path | str, *flags: str, ready_timeout_s: float = 180) -> Iterator[Running]:
    """``isthmus up`` with the flags, until the block ends. Raises RuntimeError with its log."""
    with (
        ended_in_order(),
        TemporaryDirectory(prefix="isthmus-bench-", ignore_cleanup_errors=True) as folder,
    ):
        log = Path(folder) / "up.log"
        port = free_port()
        command = [
            *cli("up"), "--model", str(model), "--served-name", MODEL_NAME, "--port", str(port),
            "--name", CLUSTER_NAME, "--set", f"state_dir={folder}", *flags,
        ]  # fmt: skip
        started = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True, cwd=folder
            )
        url = f"http://127.0.0.1:{port}"
        try:
            wait_for(f"{url}/ready", process, ready_timeout_s, log)
            yield Running(url, process.pid, time.monotonic() - started, Path(folder))
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=40)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Different ones: all are held until the last is found."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def wait_for(
    url: str, process: subprocess.Popen[bytes], timeout_s: float, log: Path | None = None
) -> None:
    """Returns when ``url`` answers 200; raises RuntimeError when the process ends first."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            text = log.read_text(errors="replace") if log else ""
            raise RuntimeError(f"{process.args} ended with code {process.returncode}\n{text}")
        try:
            if httpx.get(url, timeout=2, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    text = log.read_text(errors="replace") if log else ""
    raise RuntimeError(f"{url} did not answer within {timeout_s:.0f} s\n{text}")
