"""What a side of a comparison is: something that can be set up, started on a port and stopped."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.cluster import free_port, wait_for
from benchmarks.peers.vllm_pair import stop_server

HERE = Path(__file__).resolve().parent


class Unavailable(RuntimeError):  # noqa: N818 - a state of the side, not a mistake
    """The side cannot be set up or started here; the message is one sentence for the reader."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What all sides share. ``model`` is a safetensors directory in bf16, ``folder`` for logs."""

    model: Path
    venvs: Path
    folder: Path
    num_threads: int
    peer_dtype: str
    may_install: bool
    ready_timeout_s: float


@dataclass(frozen=True, slots=True)
class Server:
    """A started server of the OpenAI API; ``pid`` is the root of its process tree."""

    url: str
    model: str
    pid: int
    start_s: float


class Side(Protocol):
    """``rival`` is the side of ours it is compared with ("" = it is ours).

    With ``is_split`` it has one server for requests one at a time and one for many, each with the
    flags that are best there.
    """

    name: str
    title: str
    rival: str
    is_split: bool

    def bytes_per_weight(self, setup: Setup) -> float: ...

    def prepare(self, setup: Setup) -> None:
        """Installs and converts what it needs. Raises Unavailable."""
        ...

    def serve(self, setup: Setup, stage: str) -> AbstractContextManager[Server]:
        """Runs until the block ends. Raises Unavailable when it does not come up."""
        ...


def install(script: str, venv: Path, setup: Setup, timeout_s: float = 3600) -> None:
    """Runs a setup script of this folder; it does nothing where the environment is ready.

    Raises Unavailable.
    """
    if not setup.may_install and not any(venv.glob(".ready-*")):
        raise Unavailable(f"{venv} is not set up, and --no-setup forbids it")
    venv.parent.mkdir(parents=True, exist_ok=True)
    log = setup.folder / f"{script}.log"
    try:
        with log.open("wb") as out:
            subprocess.run(
                [str(HERE / script), str(venv)], check=True, stdout=out, stderr=out,
                timeout=timeout_s, env=os.environ | {"PYTHON": sys.executable},
            )  # fmt: skip
    except subprocess.SubprocessError as error:
        raise Unavailable(f"{script} failed ({last_line(log) or error})") from error


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:300]


@contextmanager
def started(
    name: str, command: list[str], model_name: str, port: int, setup: Setup,
    env: Mapping[str, str] | None = None, health: str = "/health",
) -> Iterator[Server]:  # fmt: skip
    """The server of ``command``, ready, until the block ends. Raises Unavailable."""
    log = setup.folder / f"{name}.log"
    # What the benchmark itself runs with says nothing about its peers.
    threads = {"OMP_NUM_THREADS": str(setup.num_threads)}
    begin = time.monotonic()
    with log.open("wb") as out:
        # Not in the repository: its folder `kernels` would hide packages of that name.
        process = subprocess.Popen(
            command, env=os.environ | threads | dict(env or {}), stdout=out, stderr=out,
            start_new_session=True, cwd=setup.folder,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        try:
            wait_for(f"{url}{health}", process, setup.ready_timeout_s)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise Unavailable(f"{reason}; its log ends with: {last_line(log)}") from error
        yield Server(url, model_name, process.pid, time.monotonic() - begin)
    finally:
        stop_server(process)


__all__ = ["HERE", "Server", "Setup", "Side", "Unavailable", "free_port", "install", "started"]
