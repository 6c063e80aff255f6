"""The control process: what `isthmus up` runs in the foreground, and detached by itself.

The first SIGINT, SIGTERM or SIGHUP stops the cluster in order, the second ends it at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from isthmus.common.clock import Clock, SystemClock
from isthmus.common.config import ClusterConfig
from isthmus.common.errors import ConfigError, IsthmusError
from isthmus.common.logging import configure_logging, get_logger
from isthmus.controlplane import preflight
from isthmus.controlplane.actuators.base import Actuator
from isthmus.controlplane.actuators.process import ProcessActuator
from isthmus.controlplane.actuators.ray_environment import prepare_environment
from isthmus.controlplane.cluster import Cluster
from isthmus.controlplane.progress import Progress, ReadyCluster, Report, Stage
from isthmus.controlplane.state_file import find_running, log_folder, state_folder

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_KILLED_EXIT_CODE = 130


def run_cluster(
    config: ClusterConfig, report: Report, on_ready: Callable[[ReadyCluster], None]
) -> None:
    """Brings a cluster up and stays with it until it is told to stop.

    Raises IsthmusError in one sentence when it cannot be brought up; nothing is left behind.
    """
    check_not_running(config)
    report(Progress(Stage.CHECK, "checking model, memory and ports"))
    config = preflight.check(config)
    run_dir = Path(tempfile.mkdtemp(prefix="isthmus-run-"))
    try:
        asyncio.run(_run(config, run_dir, report, on_ready))
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)


def check_not_running(config: ClusterConfig) -> None:
    state = find_running(state_folder(config), config.name)
    if state is not None:
        message = (
            f"cluster {state.cluster} is already running at {state.gateway_url} (pid {state.pid}); "
            f"stop it with `isthmus down --name {state.cluster}`, or give this one another name "
            "with --name"
        )
        raise ConfigError(message, stage="start")


async def _run(
    config: ClusterConfig,
    run_dir: Path,
    report: Report,
    on_ready: Callable[[ReadyCluster], None],
) -> None:
    clock = SystemClock()
    log_dir = log_folder(config)
    _forget_logs(log_dir)
    children = ProcessActuator(run_dir, log_dir)
    actuator = _ray_actuator(config, log_dir, clock) if _wants_ray(config) else children
    cluster = Cluster(config, actuator, children, clock, report)
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if cluster.is_stopping:
            cluster.kill_now()
            shutil.rmtree(run_dir, ignore_errors=True)
            os._exit(_KILLED_EXIT_CODE)
        cluster.request_stop(number.name)

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    await cluster.run(on_ready)


def _wants_ray(config: ClusterConfig) -> bool:
    return config.lifecycle.actuator == "ray"


def _ray_actuator(config: ClusterConfig, log_dir: Path, clock: Clock) -> Actuator:
    prepare_environment(config.lifecycle.ray_address)
    # Imported here: Ray and torch are not needed to run plain processes.
    from isthmus.controlplane.actuators.ray import RayActuator

    return RayActuator(config.name, config.lifecycle.ray_address, log_dir, clock)


def _forget_logs(log_dir: Path) -> None:
    """Logs are of one run: the last one's go when the next one starts."""
    with suppress(OSError):
        for file in log_dir.glob("*.log"):
            if file.name != "control.log":
                file.unlink()


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a cluster that nobody watches: progress goes to the log on stderr."""
    parser = argparse.ArgumentParser(description="The control process of an Isthmus cluster")
    parser.add_argument("--config-json", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(argv)
    config = ClusterConfig.model_validate_json(options.config_json.read_text(encoding="utf-8"))
    configure_logging(config.logging, role="control")
    log = get_logger("control")
    try:
        run_cluster(
            config,
            lambda progress: log.info(progress.message, stage=progress.stage.value),
            lambda ready: log.info("ready", url=ready.url, model=ready.model),
        )
    except IsthmusError as error:
        log.error("cannot start", code=error.code, problem=error.message)
        sys.exit(1)
    sys.exit(0)


if __name__ == "__main__":
    main()
