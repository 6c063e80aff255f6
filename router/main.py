"""The router process: decides for every gateway of a cluster while it leads, and stands by else.

SIGTERM or SIGINT gives the lead back, so that another takes it at once, and ends with code 0; a
second signal ends the process at once. What prevents a start is one sentence on stderr and code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop
from prometheus_client import start_http_server
from pydantic import ValidationError

from isthmus.common import collection
from isthmus.common.addresses import join_address
from isthmus.common.clock import SystemClock
from isthmus.common.config import ClusterConfig
from isthmus.common.errors import ConfigError, IsthmusError
from isthmus.common.logging import configure_logging, get_logger
from isthmus.common.registry.embedded import EmbeddedRegistryClient
from isthmus.router import native
from isthmus.router.feed import ClusterFeed
from isthmus.router.host import RouterHost
from isthmus.router.router import Router

LISTED_S = 2.0


@dataclass(frozen=True, slots=True)
class RouterArgs:
    config: ClusterConfig
    registry: str
    router_id: str


def parse_args(argv: Sequence[str] | None = None) -> RouterArgs:
    """Exits with a usage error; raises ConfigError for a configuration that is not one."""
    parser = argparse.ArgumentParser(description="A router of an Isthmus cluster")
    parser.add_argument("--registry", required=True, metavar="HOST:PORT")
    parser.add_argument("--router-id", default="router-0", metavar="NAME")
    parser.add_argument("--config-json", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(argv)
    file: Path = options.config_json
    try:
        config = ClusterConfig.model_validate_json(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", stage="start") from error
    except ValidationError as error:
        raise ConfigError(f"the configuration is not valid: {error}", stage="start") from error
    return RouterArgs(config, options.registry, options.router_id)


async def serve(args: RouterArgs) -> None:
    """Runs until a signal has been handled and everything is closed. Raises ConfigError or
    InternalError when it cannot listen on the configured host."""
    log = get_logger("router")
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    config, clock = args.config, SystemClock()
    try:
        server, thread = start_http_server(0, addr=config.host)
    except OSError as error:
        text = f"cannot listen on {config.host}: {error.strerror or error}"
        raise ConfigError(text, stage="start") from error
    registry = EmbeddedRegistryClient(args.registry)
    await asyncio.to_thread(native.prepare)
    router = Router(config.router, clock, tenant_weights=config.tenant_weights)
    feed = ClusterFeed(registry, config.name, router.state, config.router)
    host = RouterHost(router, registry, config, args.router_id, clock)
    feed.start()
    try:
        await feed.wait_listed(LISTED_S)  # who leads should know whom to choose from
        record = await host.start(join_address(config.host, server.server_port))
        collection.settle()
        log.info("router answers", address=record.address, metrics=record.metrics_address)
        await stop.wait()
    finally:
        await host.close()
        await feed.close()
        await registry.close()
        server.shutdown()
        server.server_close()
        thread.join()


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = parse_args(argv)
        configure_logging(args.config.logging, role="router", instance=args.router_id)
        uvloop.run(serve(args))
    except IsthmusError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
