"""What an instance's processes give the transfers: each its own store, and connectors for it."""

from __future__ import annotations

import asyncio
import socket

from isthmus.common.clock import Clock, SystemClock
from isthmus.common.cluster import Role
from isthmus.common.config import ClusterConfig, TransferConfig
from isthmus.common.kv_layout import QUANTISED
from isthmus.common.logging import get_logger
from isthmus.common.types import InstanceRef
from isthmus.engine.kv_store import KvStore
from isthmus.kernels import select
from isthmus.kvtransfer.connectors.registry import create_connectors
from isthmus.kvtransfer.interface import MemoryRegion
from isthmus.kvtransfer.port_server import PortServer
from isthmus.kvtransfer.rank_port import LocalPort
from isthmus.kvtransfer.staging import Converter

log = get_logger("transfers")


def staging_bytes_of(config: ClusterConfig, role: Role) -> int:
    """Behind the blocks of each rank that sends KV, unless its dtype becomes no other."""
    is_sender = role is Role.PREFILL and config.prefill.engine.kv_dtype not in QUANTISED
    return config.transfer.staging_mib * 2**20 if is_sender else 0


def open_local_port(
    config: TransferConfig, me: InstanceRef, store: KvStore, clock: Clock
) -> LocalPort:
    """Blocks until the store is registered. Raises ConfigError and TransferError."""
    layout, device = store.layout, store.memory.device
    converter = None
    if store.num_bytes > store.num_blocks * store.block_bytes:
        quantise = select(device.type).quantise_kv
        converter = Converter(store.memory, layout, store.num_blocks, quantise)
    region = MemoryRegion(store.base_address, store.num_bytes, str(device), store.fd)
    return LocalPort(
        layout,
        region,
        store.num_blocks,
        create_connectors(config, me, region, layout.block_bytes, layout.tp_rank),
        config,
        clock,
        converter,
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
