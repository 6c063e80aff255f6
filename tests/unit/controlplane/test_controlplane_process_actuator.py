from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from isthmus.common.config import load_config
from isthmus.controlplane.actuators.base import ProcessKind, ProcessSpec
from isthmus.controlplane.actuators.process import (
    LAUNCH,
    MODULES,
    ProcessActuator,
    command_of,
    describe_exit,
)
from isthmus.controlplane.logs import log_file
from isthmus.controlplane.state_file import process_start
from tests.support.poll import poll_until

PROGRAM = dict.fromkeys(ProcessKind, "tests.support.child_program")


def spec(behaviour: str, cpus: tuple[int, ...] = ()) -> ProcessSpec:
    config = load_config(overrides={"model": {"path": behaviour}}, environ={})
    return ProcessSpec("prefill-0", ProcessKind.PREFILL, config, "127.0.0.1:7", cpus)


@asynccontextmanager
async def actuator(folder: Path) -> AsyncIterator[ProcessActuator]:
    made = ProcessActuator(folder / "run", folder / "log", PROGRAM)
    await made.open()
    try:
        yield made
    finally:
        await made.close()


async def facts(folder: Path) -> dict[str, Any]:
    log = log_file(folder / "log", "prefill-0")
    await poll_until(lambda: log.exists() and log.read_text().endswith("}\n"), timeout_s=30)
    found: dict[str, Any] = json.loads(log.read_text())
    return found


@pytest.mark.asyncio
async def test_child_gets_arguments_cores_and_a_session_of_its_own(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    async with actuator(tmp_path) as made:
        handle = await made.start(spec("wait", cpus=(core,)))
        found = await facts(tmp_path)
        assert found["cpus"] == [core]
        assert found["sid"] == handle.pid
        assert found["omp"] == "1"
        assert found["args"][2:] == ["--registry", "127.0.0.1:7", "--instance-id", "prefill-0"]
        config_file = Path(found["args"][1])
        assert config_file.stat().st_mode & 0o077 == 0  # it may hold keys


@pytest.mark.asyncio
async def test_stop_lets_the_process_leave(tmp_path: Path) -> None:
    async with actuator(tmp_path) as made:
        handle = await made.start(spec("wait"))
        await facts(tmp_path)
        await handle.stop(timeout_s=30)
        assert (await handle.wait()).reason == "exit code 0"
        assert not handle.is_alive


@pytest.mark.asyncio
async def test_stop_ends_a_process_that_does_not_leave(tmp_path: Path) -> None:
    async with actuator(tmp_path) as made:
        handle = await made.start(spec("stubborn"))
        await facts(tmp_path)
        await handle.stop(timeout_s=0.05)
        assert (await handle.wait()).reason == "ended by SIGKILL"


@pytest.mark.asyncio
async def test_exit_names_the_problem_and_whether_a_restart_helps(tmp_path: Path) -> None:
    async with actuator(tmp_path) as made:
        end = await (await made.start(spec("fail"))).wait()
        assert end.reason == "exit code 2: there is no model"
        assert end.is_final
        assert not (await (await made.start(spec("crash"))).wait()).is_final


@pytest.mark.asyncio
async def test_close_ends_what_is_left(tmp_path: Path) -> None:
    made = ProcessActuator(tmp_path / "run", tmp_path / "log", PROGRAM)
    await made.open()
    handle = await made.start(spec("stubborn"))
    await made.close()
    assert not handle.is_alive
    assert process_start(handle.pid) is None


def test_commands_name_the_role_only_where_there_is_a_choice() -> None:
    config = load_config(environ={})
    for kind in ProcessKind:
        made = command_of(ProcessSpec("x-0", kind, config, "r:1"), Path("c"), MODULES[kind])
        assert ("--role" in made) == (kind in (ProcessKind.DECODE, ProcessKind.MIXED))
        assert ("--instance-id" in made) == (kind.role is not None)
        assert ("--gateway-id" in made) == (kind is ProcessKind.GATEWAY)
        assert ("--router-id" in made) == (kind is ProcessKind.ROUTER)


@pytest.mark.asyncio
async def test_child_dies_with_a_killed_parent(tmp_path: Path) -> None:
    program = (
        "import os, subprocess, sys, time\n"
        f"args = [sys.executable, '-I', '-S', {LAUNCH!r}, str(os.getpid()), '-']\n"
        "child = subprocess.Popen([*args, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert process_start(child) is not None
        parent.send_signal(signal.SIGKILL)
        await poll_until(lambda: process_start(child) is None)
    finally:
        parent.kill()
        parent.communicate()


def test_signals_are_named(tmp_path: Path) -> None:
    assert describe_exit(-9, tmp_path / "none").reason == "ended by SIGKILL"
    assert describe_exit(0, tmp_path / "none").reason == "exit code 0"
    assert describe_exit(1, tmp_path / "none").reason == "exit code 1"
