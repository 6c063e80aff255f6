"""Starting a control process that outlives its starter, and waiting until its cluster is ready."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from isthmus.common.config import ClusterConfig
from isthmus.common.errors import DeadlineError, InstanceError
from isthmus.controlplane.client import cluster_status
from isthmus.controlplane.logs import last_problem, log_file
from isthmus.controlplane.main import check_not_running
from isthmus.controlplane.preflight import check
from isthmus.controlplane.progress import Progress, ReadyCluster, ReadyInstance, Report, Stage
from isthmus.controlplane.state_file import ClusterState, find_running, log_folder, state_folder

MODULE = "isthmus.controlplane.main"
_PERIOD_S = 0.1
_MARGIN_S = 30.0  # over the cluster's own limit, for Ray to start and to be stopped again


def start_detached(config: ClusterConfig, report: Report) -> ReadyCluster:
    """Returns once the cluster is ready. Raises IsthmusError with what the control log says."""
    check_not_running(config)
    report(Progress(Stage.CHECK, "checking model, memory and ports"))
    config = check(config)
    log_dir = log_folder(config)
    log_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    log = log_file(log_dir, "control")
    started = time.monotonic()
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as config_file:
        config_file.write(config.model_dump_json())
        config_file.flush()
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", MODULE, "--config-json", config_file.name],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=os.path.sep,
            )
        report(Progress(Stage.START, f"control process {process.pid}, its log: {log}"))
        limit_s = config.lifecycle.ready_timeout_ms / 1000 + _MARGIN_S
        state = _wait_ready(config, process, log, started + limit_s)
    return _describe(config, state, time.monotonic() - started)


def _wait_ready(
    config: ClusterConfig, process: subprocess.Popen[bytes], log: Path, deadline: float
) -> ClusterState:
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise InstanceError(last_problem(log) or f"see {log}", stage="start")
        state = find_running(state_folder(config), config.name)
        if state is not None and state.is_ready:
            return state
        time.sleep(_PERIOD_S)
    process.terminate()
    raise DeadlineError(f"the cluster did not become ready; see {log}", stage="start")


def _describe(config: ClusterConfig, state: ClusterState, seconds: float) -> ReadyCluster:
    status = asyncio.run(cluster_status(state.control_address))
    return ReadyCluster(
        cluster=state.cluster,
        url=state.gateway_url,
        model=state.model,
        pid=state.pid,
        log_dir=state.log_dir,
        state_dir=str(state_folder(config)),
        seconds=seconds,
        instances=tuple(
            ReadyInstance(
                instance_id=item.instance_id,
                role=item.role.value,
                address=item.info.address,
                metrics_address=item.info.metrics_address,
                pid=item.info.pid,
                epoch=item.info.epoch,
            )
            for item in status.instances
            if item.info is not None
        ),
        other_urls=state.other_urls,
    )
