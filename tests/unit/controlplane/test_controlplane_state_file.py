from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from isthmus.common.config import load_config
from isthmus.controlplane.state_file import (
    ClusterState,
    find_running,
    process_start,
    remove_state,
    state_file,
    state_folder,
    write_state,
)


def state_of(pid: int, started_at: float | None = None) -> ClusterState:
    return ClusterState(
        cluster="c",
        pid=pid,
        started_at=started_at if started_at is not None else process_start(pid) or 0.0,
        control_address="127.0.0.1:1",
        registry_address="127.0.0.1:2",
        gateway_url="http://127.0.0.1:3",
        model="m",
        log_dir="/nowhere",
    )


def test_running_process_is_found(tmp_path: Path) -> None:
    write_state(tmp_path / "new", state_of(os.getpid()))
    assert find_running(tmp_path / "new", "c") == state_of(os.getpid())
    assert find_running(tmp_path / "new", "other") is None


def test_file_of_a_process_that_is_gone_is_removed(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    started_at = process_start(gone.pid)
    gone.wait()
    write_state(tmp_path, state_of(gone.pid, started_at))
    assert find_running(tmp_path, "c") is None
    assert not state_file(tmp_path, "c").exists()


def test_number_that_belongs_to_another_program_is_not_believed(tmp_path: Path) -> None:
    write_state(tmp_path, state_of(os.getpid(), started_at=1.0))
    assert find_running(tmp_path, "c") is None


@pytest.mark.parametrize("content", [b"", b"{", b'{"cluster": 1}'])
def test_broken_file_is_removed(tmp_path: Path, content: bytes) -> None:
    state_file(tmp_path, "c").write_bytes(content)
    assert find_running(tmp_path, "c") is None
    assert not state_file(tmp_path, "c").exists()


def test_only_the_owner_removes_the_file(tmp_path: Path) -> None:
    write_state(tmp_path, state_of(os.getpid()))
    remove_state(tmp_path, "c", pid=os.getpid() + 1)
    assert state_file(tmp_path, "c").exists()
    remove_state(tmp_path, "c", pid=os.getpid())
    remove_state(tmp_path, "c", pid=os.getpid())
    assert not state_file(tmp_path, "c").exists()


def test_folder_follows_the_configuration_and_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_folder(load_config(environ={})) == tmp_path / "isthmus"
    config = load_config(overrides={"state_dir": str(tmp_path / "own")}, environ={})
    assert state_folder(config) == tmp_path / "own"


def test_file_is_readable_by_people_and_programs(tmp_path: Path) -> None:
    write_state(tmp_path, state_of(os.getpid()))
    assert msgspec.json.decode(state_file(tmp_path, "c").read_bytes())["pid"] == os.getpid()
