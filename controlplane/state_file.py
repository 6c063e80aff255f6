"""Where a running cluster is found by the other commands: one small file per cluster.

It names the control process by pid and start time, so that a file left by one that was killed, or
whose number now belongs to another program, is recognised and removed.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from isthmus.common.config import ClusterConfig


class ClusterState(msgspec.Struct, frozen=True):
    cluster: str
    pid: int
    started_at: float
    """Start of the process in unix seconds, as the operating system has it."""
    control_address: str
    registry_address: str
    gateway_url: str
    """Of the first gateway."""
    model: str
    log_dir: str
    is_ready: bool = False
    """Whether the cluster has been ready once."""
    drain_ms: int = 10_000
    """How long one of its instances may take to leave."""
    other_urls: tuple[str, ...] = ()
    """Of the gateways behind the first."""


def state_folder(config: ClusterConfig) -> Path:
    """``state_dir``, or ``$XDG_STATE_HOME/isthmus``, by default ``~/.local/state/isthmus``."""
    if config.state_dir:
        return Path(config.state_dir).expanduser()
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser() / "isthmus"


def log_folder(config: ClusterConfig) -> Path:
    return state_folder(config) / "logs" / config.name


def state_file(folder: Path, cluster: str) -> Path:
    return folder / f"{cluster}.json"


def process_start(pid: int) -> float | None:
    """When a process started, in unix seconds; None when there is none."""
    try:
        process = psutil.Process(pid)
        is_zombie = process.status() == psutil.STATUS_ZOMBIE
        return None if is_zombie else process.create_time()
    except psutil.Error:
        return None


def write_state(folder: Path, state: ClusterState) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = state_file(folder, state.cluster)
    draft = file.with_suffix(f".{state.pid}.tmp")
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(state)) + b"\n")
    draft.replace(file)


def is_running(state: ClusterState) -> bool:
    started_at = process_start(state.pid)
    return started_at is not None and abs(started_at - state.started_at) < 1.0


def find_running(folder: Path, cluster: str) -> ClusterState | None:
    """The cluster's state when its control process lives; a stale file is removed."""
    file = state_file(folder, cluster)
    try:
        state = msgspec.json.decode(file.read_bytes(), type=ClusterState)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError:
        state = None
    if state is not None and is_running(state):
        return state
    file.unlink(missing_ok=True)
    return None


def remove_state(folder: Path, cluster: str, pid: int) -> None:
    """Removes the file when it is still the one of process ``pid``."""
    file = state_file(folder, cluster)
    with suppress(FileNotFoundError, msgspec.DecodeError):
        if msgspec.json.decode(file.read_bytes(), type=ClusterState).pid == pid:
            file.unlink(missing_ok=True)
