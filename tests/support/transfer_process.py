"""A TransferManager in a process of its own, running as in a worker: the parent asks."""

from __future__ import annotations

import asyncio
import sys
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from isthmus.common.clock import SystemClock
from isthmus.common.config import ConnectorName, TransferConfig
from isthmus.common.ids import BlockId, InstanceId, TransferId
from isthmus.common.kv_layout import KvLayout
from isthmus.common.shared_memory import create_shared_memory
from isthmus.common.transfer import TransferOffer, TransferTicket
from isthmus.common.types import InstanceRef
from isthmus.kvtransfer.connectors.registry import create_connectors
from isthmus.kvtransfer.interface import MemoryRegion
from isthmus.kvtransfer.manager import TransferManager
from isthmus.kvtransfer.rank_port import LocalPort
from isthmus.kvtransfer.receive_session import ReceiveSession
from isthmus.kvtransfer.send_session import SendSession
from tests.support.connector_process import ChildProcess

LAYOUT = KvLayout(
    "model", num_layers=4, num_kv_heads=2, head_dim=64, block_size=16, dtype="float32"
)
NUM_BLOCKS = 512  # of 64 KiB
Connectors = ConnectorName | list[ConnectorName]


class TransferProcess(ChildProcess):
    """The parent's handle; method names are those of ``_Served``."""

    def __init__(
        self, ref: InstanceRef, quarantine_ms: int, tls: str, connector: Connectors = "nixl"
    ) -> None:
        super().__init__("tests.support.transfer_process", tls)
        self.ref = ref
        self.call("make", ref, quarantine_ms, connector)

    @property
    def offer(self) -> TransferOffer:
        result: TransferOffer = self.call("offer")
        return result

    def status(self, transfer_id: TransferId) -> tuple[str, str, bool]:
        """(state, error, whether nothing can land any more)."""
        result: tuple[str, str, bool] = self.call("status", transfer_id)
        return result


class _Served:
    def __init__(self, ref: InstanceRef, quarantine_ms: int, connector: Connectors) -> None:
        num_bytes = NUM_BLOCKS * LAYOUT.block_bytes
        mapping, fd = create_shared_memory(num_bytes)
        self._memory = np.frombuffer(mapping, dtype=np.uint8)
        self._memory[:] = np.random.default_rng(ref.epoch).integers(0, 256, num_bytes, np.uint8)
        config = TransferConfig(connector=connector, quarantine_ms=quarantine_ms)
        region = MemoryRegion(self._memory.ctypes.data, num_bytes, fd=fd)
        port = LocalPort(
            LAYOUT,
            region,
            NUM_BLOCKS,
            create_connectors(config, ref, region, LAYOUT.block_bytes),
            config,
            SystemClock(),
        )
        self._manager = TransferManager(ref, [port], config, SystemClock())
        self._manager.start()
        self._sessions: dict[TransferId, SendSession | ReceiveSession] = {}

    async def offer(self) -> TransferOffer:
        return self._manager.offer()

    async def answer(self, offer: TransferOffer) -> TransferOffer:
        return await self._manager.answer(offer)

    async def complete(self, offer: TransferOffer) -> None:
        await self._manager.complete(offer)

    async def forget(self, instance_id: InstanceId, is_gone: bool) -> None:
        await self._manager.forget(instance_id, is_gone=is_gone)

    async def open_receive(self, ticket: TransferTicket) -> None:
        self._sessions[ticket.transfer_id] = self._manager.open_receive(ticket)

    async def open_send(self, ticket: TransferTicket) -> None:
        self._sessions[ticket.transfer_id] = self._manager.open_send(ticket)

    async def push(
        self, transfer_id: TransferId, first: int, block_ids: list[BlockId], is_last: bool
    ) -> None:
        session = self._sessions[transfer_id]
        assert isinstance(session, SendSession)
        session.push(first, block_ids, is_last)

    async def status(self, transfer_id: TransferId) -> tuple[str, str, bool]:
        session = self._sessions[transfer_id]
        is_over = session.is_quiet if isinstance(session, SendSession) else session.is_quiescent
        return session.state.value, type(session.error).__name__, is_over

    async def read(self, block_ids: list[BlockId]) -> bytes:
        return self._memory.reshape(NUM_BLOCKS, -1)[block_ids].tobytes()

    async def close(self) -> None:
        await self._manager.close()


async def _serve(pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    served: _Served | None = None
    method = ""
    while method != "close":
        try:
            method, arguments = await loop.run_in_executor(None, pipe.recv)
        except EOFError:
            return
        result: Any = None
        try:
            if served is None:
                served = _Served(*arguments)
            else:
                result = await getattr(served, method)(*arguments)
        except Exception as error:  # noqa: BLE001 - raised again in the parent
            result = error
        pipe.send(result)


if __name__ == "__main__":
    asyncio.run(_serve(Connection(int(sys.argv[1]))))
