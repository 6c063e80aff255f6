"""Transfers between instances of several ranks in one process: the leaders' own ports, and for
followers either local ones too or RemotePorts over real connections to servers on this event loop.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from isthmus.common.clock import Clock, VirtualClock
from isthmus.common.config import TransferConfig
from isthmus.common.ids import InstanceId
from isthmus.common.kv_layout import KvLayout
from isthmus.common.types import InstanceRef
from isthmus.kvtransfer.connectors.local import LocalFabric
from isthmus.kvtransfer.port_server import PortServer
from isthmus.kvtransfer.rank_port import LocalPort, RankPort
from isthmus.kvtransfer.remote_port import RemotePort
from tests.support.transfer_pair import CONFIG, RankStores, TransferEnd, TransferPair

ME = InstanceRef(InstanceId("me"), 1, "127.0.0.1:1")
SILENCE_S = 20.0


class Served:
    """A LocalPort behind a connection."""

    def __init__(
        self,
        port: RemotePort,
        server: PortServer,
        connection: socket.socket,
        task: asyncio.Task[None],
    ) -> None:
        self.port = port
        self.server = server
        self.connection = connection
        self.task = task

    def cut(self) -> None:
        """As the end of the follower's process does."""
        self.connection.shutdown(socket.SHUT_RDWR)


@asynccontextmanager
async def served(
    local: LocalPort, clock: Clock, silence_s: float = SILENCE_S
) -> AsyncIterator[Served]:
    here, there = socket.socketpair()
    for end in (here, there):
        end.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=there)
    server = PortServer(lambda _: local, clock)
    task = asyncio.create_task(server.serve(reader, writer))
    remote = RemotePort(
        local.endpoint.tp_rank, *await asyncio.open_connection(sock=here), clock, silence_s
    )
    try:
        yield Served(await remote.open(ME), server, there, task)
    finally:
        await remote.close(5.0)
        await asyncio.wait_for(task, 20)


@asynccontextmanager
async def rank_pair(
    source: Sequence[KvLayout],
    target: Sequence[KvLayout],
    *,
    is_remote: bool = False,
    script: str = "",
    config: TransferConfig = CONFIG,
) -> AsyncIterator[tuple[TransferPair, dict[str, list[Served]]]]:
    """``script``: faults of the prefill side's writes, of each rank's. Both have shaken hands. With
    ``is_remote`` also the connections of each side's followers, by instance id."""
    clock, fabric = VirtualClock(10**18), LocalFabric()
    links: dict[str, list[Served]] = {}
    async with AsyncExitStack() as stack:

        async def end(name: str, layouts: Sequence[KvLayout], script: str) -> TransferEnd:
            stores = RankStores(name, 1, fabric, clock, layouts, script, config)
            leader, *followers = stores.ports
            ports: list[RankPort] = [leader]
            links[name] = []
            for follower in followers:
                if is_remote:
                    link = await stack.enter_async_context(served(follower, clock))
                    links[name].append(link)
                    ports.append(link.port)
                else:
                    ports.append(follower)
            made = TransferEnd(name, 1, fabric, clock, config=config, stores=stores, ports=ports)
            stack.push_async_callback(made.manager.close)
            return made

        prefill = await end("prefill-0", source, script)
        decode = await end("decode-0", target, "")
        answer = await prefill.manager.answer(decode.manager.offer())
        await decode.manager.complete(answer)
        pair = TransferPair(prefill, decode, clock, fabric)
        yield pair, links
        pair.check_integrity()
