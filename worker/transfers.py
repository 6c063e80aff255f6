"""What an instance's processes give the transfers: each its own store, and connectors for it."""

from __future__ import annotations

import asyncio
import socket

from isthmus.common.clock import Clock, SystemClock
from isthmus.common.config import TransferConfig
from isthmus.common.logging import get_logger
from isthmus.common.types import InstanceRef
from isthmus.engine.kv_store import KvStore
from isthmus.kvtransfer.connectors.registry import create_connectors
from isthmus.kvtransfer.interface import MemoryRegion
from isthmus.kvtransfer.port_server import PortServer
from isthmus.kvtransfer.rank_port import LocalPort

log = get_logger("transfers")


def open_local_port(
    config: TransferConfig, me: InstanceRef, store: KvStore, clock: Clock
) -> LocalPort:
    """Blocks until the store is registered. Raises ConfigError and TransferError."""
    layout, device = store.layout, str(store.tensor.device)
    region = MemoryRegion(store.base_address, store.num_bytes, device, store.fd)
    return LocalPort(
        layout,
        region,
        store.num_blocks,
        create_connectors(config, me, region, layout.block_bytes, layout.tp_rank),
        config,
        clock,
    )


def serve_transfers(connection: socket.socket, config: TransferConfig, store: KvStore) -> None:
    """A follower's thread for transfers, beside the one that runs steps. Returns when the leader's
    connection has ended; when something goes wrong here, the leader hears it by that end."""
    clock = SystemClock()
    server = PortServer(lambda me: open_local_port(config, me, store, clock), clock)

    async def serve() -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        await server.serve(reader, writer)

    try:
        asyncio.run(serve())
    except Exception:
        log.exception("transfers failed")
