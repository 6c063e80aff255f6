"""The command line and the signals of a worker process.

SIGTERM or SIGINT drains; a second one exits at once. The configuration comes whole, as JSON, from
the process that starts the worker: it was validated there and is not merged with anything here.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pydantic import ValidationError

from isthmus.common.cluster import Role
from isthmus.common.config import ClusterConfig
from isthmus.common.errors import ConfigError
from isthmus.common.ids import InstanceId
from isthmus.common.logging import configure_logging, get_logger
from isthmus.worker.lifecycle import ExitCode, StopRequest
from isthmus.worker.pool import prepare_process
from isthmus.worker.process import RoleFactory, pool_of, run_worker
from isthmus.worker.role import WorkerArgs

CONFIG_VARIABLE = "ISTHMUS_PROCESS_CONFIG"
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

log = get_logger("entry")


def parse_args(argv: Sequence[str] | None, roles: Sequence[Role]) -> WorkerArgs:
    """Exits with a usage error, or raises ConfigError for a configuration that is not one."""
    parser = argparse.ArgumentParser(description="One worker of an Isthmus cluster")
    parser.add_argument("--instance-id", required=True)
    parser.add_argument("--registry", required=True, metavar="HOST:PORT")
    parser.add_argument("--config-json", type=Path, metavar="FILE", help=f"else ${CONFIG_VARIABLE}")
    parser.add_argument("--role", choices=[role.value for role in roles], default=roles[0].value)
    options = parser.parse_args(argv)
    return WorkerArgs(
        config=_read_config(options.config_json),
        role=Role(options.role),
        instance_id=InstanceId(options.instance_id),
        registry=options.registry,
    )


def _read_config(file: Path | None) -> ClusterConfig:
    text = file.read_text(encoding="utf-8") if file else os.environ.get(CONFIG_VARIABLE, "{}")
    try:
        return ClusterConfig.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(f"the configuration is not valid: {error}", stage="start") from error


def main(roles: Sequence[Role], build_role: RoleFactory, argv: Sequence[str] | None) -> NoReturn:
    """Runs the worker and ends the process; the exit code is an ``ExitCode``."""
    try:
        args = parse_args(argv, roles)
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(ExitCode.CONFIG)
    configure_logging(args.config.logging, role=args.role.value, instance=args.instance_id)
    prepare_process(pool_of(args))
    code = asyncio.run(_run_with_signals(args, build_role))
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is closed; native threads (the engine's after a fault, a connector's) must not get
    # the chance to hold up or crash the interpreter's own end.
    os._exit(code)


async def _run_with_signals(args: WorkerArgs, build_role: RoleFactory) -> ExitCode:
    loop = asyncio.get_running_loop()
    stop = StopRequest()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set:
            os._exit(128 + number)
        stop.drain(number.name)

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    return await run_worker(args, build_role, stop)
