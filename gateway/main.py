"""The gateway process: configuration in, HTTP out, until a signal.

SIGTERM or SIGINT stops listening, lets open streams finish for ``lifecycle.drain_ms`` and ends with
code 0; a second signal ends the process at once. What prevents a start is one sentence on stderr
and code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import uvloop
from pydantic import ValidationError

from isthmus.common import collection
from isthmus.common.addresses import join_address
from isthmus.common.clock import SystemClock
from isthmus.common.config import ClusterConfig
from isthmus.common.errors import ConfigError, IsthmusError
from isthmus.common.logging import configure_logging, get_logger
from isthmus.common.model_files import locate_model
from isthmus.common.registry.embedded import EmbeddedRegistryClient
from isthmus.gateway.app import ModelIdentity, build_gateway, create_app
from isthmus.gateway.routing import Routing
from isthmus.gateway.server import HttpServer, bind_sockets
from isthmus.gateway.tokenizer import load_tokenizer
from isthmus.router import native

CONFIG_VARIABLE = "ISTHMUS_PROCESS_CONFIG"
MS_PER_S = 1000


@dataclass(frozen=True, slots=True)
class GatewayArgs:
    config: ClusterConfig
    registry: str
    gateway_id: str = "gateway-0"


def parse_args(argv: Sequence[str] | None = None) -> GatewayArgs:
    """Exits with a usage error; raises ConfigError for a configuration that is not one."""
    parser = argparse.ArgumentParser(description="The gateway of an Isthmus cluster")
    parser.add_argument("--registry", required=True, metavar="HOST:PORT")
    parser.add_argument("--config-json", type=Path, metavar="FILE", help=f"else ${CONFIG_VARIABLE}")
    parser.add_argument("--gateway-id", default="gateway-0", metavar="NAME")
    options = parser.parse_args(argv)
    file: Path | None = options.config_json
    try:
        text = file.read_text("utf-8") if file else os.environ.get(CONFIG_VARIABLE, "{}")
        config = ClusterConfig.model_validate_json(text)
        return GatewayArgs(config, options.registry, options.gateway_id)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", stage="start") from error
    except ValidationError as error:
        raise ConfigError(f"the configuration is not valid: {error}", stage="start") from error


async def serve(
    args: GatewayArgs, model: ModelIdentity, listeners: Sequence[socket.socket]
) -> None:
    """Runs until a signal has been handled and everything is closed. The first of ``listeners`` is
    this gateway's own."""
    config = args.config
    async with AsyncExitStack() as stack:
        registry = EmbeddedRegistryClient(args.registry)
        stack.push_async_callback(registry.close)
        if not config.has_router_processes:
            await asyncio.to_thread(native.prepare)
        routing = Routing(args, registry)
        gateway = build_gateway(config, model, routing.router, routing.decider, SystemClock())
        server = HttpServer(create_app(gateway), config.lifecycle.drain_ms / MS_PER_S)
        collection.settle()
        _handle_signals(server)
        host, port = listeners[0].getsockname()[:2]
        get_logger("gateway").info(
            "gateway listening", address=join_address(host, port), model=model.name
        )
        state = routing.router.state
        state.on_change = lambda: gateway.decode_client.follow(gateway.router.decode_refs())
        stack.push_async_callback(routing.close)
        await routing.start()
        stack.push_async_callback(gateway.close)

        def look_away() -> None:
            state.on_change = None

        stack.callback(look_away)
        await server.serve(sockets=list(listeners))


def _handle_signals(server: HttpServer) -> None:
    def on_signal(number: int) -> None:
        if server.should_exit:
            os._exit(128 + number)
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


def main(argv: Sequence[str] | None = None) -> int:
    # One text at a time: the tokenizer's own pool of threads would only add a hop to each.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        args = parse_args(argv)
        configure_logging(args.config.logging, role="gateway", instance=args.gateway_id)
        listeners = bind_sockets(args.config.gateway)
        files = locate_model(args.config.model.path)
        model = ModelIdentity(load_tokenizer(files), files.name)
    except IsthmusError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    uvloop.run(serve(args, model, listeners))
    return 0


if __name__ == "__main__":
    sys.exit(main())
