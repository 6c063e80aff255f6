"""`isthmus doctor`: what this machine has, what is missing and what to do about it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.markup import escape

from isthmus.cli.options import Output
from isthmus.cli.output import OutputFormat, print_json, stdout, table
from isthmus.common.config import ClusterConfig, load_config
from isthmus.common.errors import ConfigError, IsthmusError
from isthmus.common.memory import available_memory
from isthmus.common.model_files import locate_model, sample_model_path
from isthmus.controlplane import preflight

_KERNELS_TIMEOUT_S = 300.0  # they may have to be compiled
_TOO_SLOW = f"do not load within {_KERNELS_TIMEOUT_S:.0f} s"
_COMPILERS = ("g++", "c++", "clang++")


class Level(Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """``advice`` says what to do; empty when all is well."""

    subject: str
    level: Level
    detail: str
    advice: str = ""


def doctor(
    kernels: Annotated[
        bool, typer.Option("--kernels", help="List which kernel computes which op, and why.")
    ] = False,
    file: Annotated[
        Path | None, typer.Argument(help="With --kernels: YAML file with the configuration.")
    ] = None,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Check this machine. Exit code 1 when a default cluster could not start."""
    if kernels:
        show_kernels(list_kernels(load_config(file)), output)
        return
    if file is not None:
        raise typer.BadParameter("a FILE goes with --kernels only")
    findings = [check() for check in CHECKS]
    if output is OutputFormat.JSON:
        print_json(findings)
    else:
        show(findings)
    if any(finding.level is Level.FAIL for finding in findings):
        raise typer.Exit(1)


def show(findings: list[Finding]) -> None:
    styles = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}
    made = table("", "what", "found", "what to do")
    for finding in findings:
        level = f"[{styles[finding.level]}]{finding.level.value}[/]"
        made.add_row(level, finding.subject, escape(finding.detail), escape(finding.advice))
    stdout.print(made)


def list_kernels(config: ClusterConfig) -> list[dict[str, Any]]:
    """What ``isthmus.kernels.report`` says of the pools' engines, each kind of engine once.

    Raises ConfigError when torch or the kernels of the configuration are not to be had."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("kernels need torch: pip install 'isthmus[worker]'", stage="config")
    engines: list[dict[str, Any]] = []
    for pool in (config.prefill, config.decode, config.mixed):
        engine = pool.engine.model_dump(include={"device", "num_threads", "kernels"})
        if engine not in engines:
            engines.append(engine)
    try:
        done = _run_python("-m", "isthmus.kernels.report", json.dumps(engines))
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"kernels {_TOO_SLOW}; is the machine busy?", stage="config") from error
    if done.returncode != 0:
        raise ConfigError(_last_line(done.stderr), stage="config", param="engine.kernels")
    listed: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return listed


def show_kernels(listed: list[dict[str, Any]], output: OutputFormat) -> None:
    if output is OutputFormat.JSON:
        print_json(listed)
        return
    for engine in listed:
        made = table("op", "implementation", "why")
        for choice in engine["ops"]:
            made.add_row(choice["op"], choice["implementation"], escape(choice["reason"]))
        stdout.print(escape(f"{engine['device']}: {engine['description']}"))
        stdout.print(made)


def check_python() -> Finding:
    number = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", Level.OK, f"{number} ({sys.executable})")


def check_package(subject: str, module: str, distribution: str, advice: str) -> Finding:
    if importlib.util.find_spec(module) is None:
        return Finding(subject, Level.FAIL, "not installed", advice)
    try:
        return Finding(subject, Level.OK, package_version(distribution))
    except PackageNotFoundError:
        return Finding(subject, Level.OK, "present")


def check_torch() -> Finding:
    return check_package("torch", "torch", "torch", "pip install 'isthmus[worker]'")


def check_nixl() -> Finding:
    advice = "pip install 'isthmus[nixl]'; without it KV goes over slower connectors"
    found = check_package("nixl", "nixl_cu13", "nixl-cu13", advice)
    return replace(found, level=Level.WARN) if found.level is Level.FAIL else found


def check_ray() -> Finding:
    advice = "pip install 'isthmus[ray]', or use --actuator process"
    return check_package("ray", "ray", "ray", advice)


def check_compiler() -> Finding:
    for name in _COMPILERS:
        if path := shutil.which(name):
            return Finding("compiler", Level.OK, path)
    advice = "install g++ for fast CPU kernels; without it torch's are used"
    return Finding("compiler", Level.WARN, "no C++ compiler", advice)


def check_kernels() -> Finding:
    """Asks another process: importing torch here would slow every other check down."""
    if importlib.util.find_spec("torch") is None:
        return Finding("kernels", Level.FAIL, "need torch", "pip install 'isthmus[worker]'")
    code = "from isthmus.kernels.registry import describe; print(describe())"
    try:
        done = _run_python("-c", code)
    except subprocess.TimeoutExpired:
        return Finding(
            "kernels",
            Level.FAIL,
            _TOO_SLOW,
            "is the machine busy? try again",
        )
    if done.returncode != 0:
        detail = _last_line(done.stderr)
        return Finding("kernels", Level.FAIL, detail, "reinstall: rm -r .venv, make serve")
    detail = done.stdout.strip().splitlines()[-1]
    if not detail.startswith("cpu"):
        return Finding("kernels", Level.WARN, detail, "install g++ for the compiled kernels")
    return Finding("kernels", Level.OK, detail)


def _run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Raises subprocess.TimeoutExpired."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=_KERNELS_TIMEOUT_S,
        check=False,
    )


def _last_line(text: str) -> str:
    lines = text.strip().splitlines() or ["no reason given"]
    return lines[-1]


def check_sample_model() -> Finding:
    try:
        path = sample_model_path()
    except IsthmusError as error:
        return Finding("sample model", Level.WARN, "not installed", error.message)
    return Finding("sample model", Level.OK, f"{path.name} ({path.stat().st_size / 1e6:.0f} MB)")


def check_memory() -> Finding:
    config = load_config()
    available = available_memory()
    detail = f"{available / preflight.GIB:.1f} GiB free"
    try:
        files = locate_model(config.model.path)
        preflight.check_memory(preflight.estimate_memory(config, files), available)
    except IsthmusError as error:
        return Finding("memory", Level.FAIL, detail, error.message)
    return Finding("memory", Level.OK, detail)


def check_cores() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    detail = f"{cores} usable, load {psutil.getloadavg()[0]:.1f}"
    if not cores or cores < 2:
        advice = "a prefill and a decode instance share one core: expect slow steps"
        return Finding("cores", Level.WARN, detail, advice)
    return Finding("cores", Level.OK, detail)


def check_port() -> Finding:
    gateway = ClusterConfig().gateway
    try:
        preflight.probe_port(gateway.host, gateway.port, "--port")
    except IsthmusError as error:
        return Finding("port", Level.WARN, f"{gateway.port} is taken", error.message)
    return Finding("port", Level.OK, f"{gateway.port} is free")


def check_shared_memory() -> Finding:
    place = Path("/dev/shm")  # noqa: S108 (looked at, not written to)
    if not place.exists():
        return Finding("shared memory", Level.OK, "not used on this system")
    free = shutil.disk_usage(place).free
    detail = f"{free / 2**20:.0f} MiB free in {place}"
    if free < 100 * 2**20:
        advice = "Ray keeps 80 MiB there: enlarge it, or use --actuator process"
        return Finding("shared memory", Level.WARN, detail, advice)
    return Finding("shared memory", Level.OK, detail)


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_torch,
    check_nixl,
    check_ray,
    check_compiler,
    check_kernels,
    check_sample_model,
    check_memory,
    check_cores,
    check_port,
    check_shared_memory,
)
