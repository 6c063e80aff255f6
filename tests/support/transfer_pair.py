"""A prefill and a decode manager in one process, on virtual time and with scripted faults.

Nothing runs by itself: ``drive`` sweeps both sides, ``clock`` moves only when told to.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from isthmus.common.clock import NS_PER_MS, VirtualClock
from isthmus.common.config import TransferConfig
from isthmus.common.ids import BlockId, InstanceId, RequestId, new_transfer_id
from isthmus.common.kv_layout import KvLayout
from isthmus.common.transfer import TransferTicket
from isthmus.common.types import InstanceRef
from isthmus.kvtransfer.connectors.fake import FakeConnector, parse_script
from isthmus.kvtransfer.connectors.local import LocalConnector, LocalFabric
from isthmus.kvtransfer.interface import MemoryRegion
from isthmus.kvtransfer.manager import TransferManager
from isthmus.kvtransfer.observer import Side
from isthmus.kvtransfer.receive_session import Ignored, ReceiveSession
from isthmus.kvtransfer.send_session import SendSession

LAYOUT = KvLayout("model", num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")
NUM_BLOCKS = 32
CONFIG = TransferConfig(connector="fake", deadline_ms=1000, quarantine_ms=300, checksum="none")
CHECKED = CONFIG.model_copy(update={"checksum": "xxh3"})


@dataclass
class RecordingObserver:
    ended: list[tuple[Side, str, int]] = field(default_factory=list)
    ignored: list[Ignored] = field(default_factory=list)
    num_corrupt: int = 0

    def session_ended(self, side: Side, state: str, num_bytes: int, seconds: float) -> None:
        self.ended.append((side, state, num_bytes))

    def notification_ignored(self, reason: Ignored) -> None:
        self.ignored.append(reason)

    def blocks_corrupt(self, num_blocks: int) -> None:
        self.num_corrupt += num_blocks


class TransferEnd:
    """One manager, its memory and what it reported."""

    def __init__(
        self,
        instance_id: str,
        epoch: int,
        fabric: LocalFabric,
        clock: VirtualClock,
        script: str = "",
        layout: KvLayout = LAYOUT,
        config: TransferConfig = CONFIG,
    ) -> None:
        seed = sum(instance_id.encode()) + epoch
        self.ref = InstanceRef(InstanceId(instance_id), epoch, "127.0.0.1:1")
        self.layout = layout
        self.memory: npt.NDArray[np.uint8] = np.random.default_rng(seed).integers(
            0, 256, NUM_BLOCKS * layout.block_bytes, dtype=np.uint8
        )
        self.observer = RecordingObserver()
        local = LocalConnector(f"{instance_id}@{epoch}", fabric)
        self.connector = FakeConnector(local, parse_script(script)[1])
        self.manager = TransferManager(
            self.ref,
            layout,
            MemoryRegion(self.memory.ctypes.data, self.memory.nbytes),
            NUM_BLOCKS,
            self.connector,
            config,
            clock,
            self.observer,
        )

    def blocks(self, block_ids: Sequence[BlockId]) -> npt.NDArray[np.uint8]:
        return self.memory.reshape(NUM_BLOCKS, -1)[list(block_ids)]


@dataclass
class TransferPair:
    prefill: TransferEnd
    decode: TransferEnd
    clock: VirtualClock
    fabric: LocalFabric

    def ticket(
        self,
        target_block_ids: Sequence[int],
        first_block: int = 0,
        timeout_ms: int = 1000,
        num_tokens: int | None = None,
    ) -> TransferTicket:
        """``num_tokens``: all that the blocks hold, if it is not given."""
        num_blocks = first_block + len(target_block_ids)
        layout = self.decode.layout
        return TransferTicket(
            transfer_id=new_transfer_id(),
            request_id=RequestId("request"),
            source=self.prefill.ref,
            target=self.decode.ref,
            first_block=first_block,
            target_block_ids=tuple(BlockId(block) for block in target_block_ids),
            num_tokens=num_tokens or num_blocks * layout.block_size,
            layout_hash=layout.compat_hash,
            deadline_ns=self.clock.now_ns() + timeout_ms * NS_PER_MS,
            checksum=self.decode.manager.checksum_with(self.prefill.ref),
        )

    def open(
        self,
        target_block_ids: Sequence[int],
        timeout_ms: int = 1000,
        num_tokens: int | None = None,
    ) -> tuple[SendSession, ReceiveSession]:
        ticket = self.ticket(target_block_ids, timeout_ms=timeout_ms, num_tokens=num_tokens)
        receive = self.decode.manager.open_receive(ticket)
        return self.prefill.manager.open_send(ticket), receive

    async def drive(self, sweeps: int = 4) -> None:
        for _ in range(sweeps):
            await self.prefill.manager.sweep_once()
            await self.decode.manager.sweep_once()

    async def rest(self, milliseconds: int) -> None:
        """Lets time pass while the decode side keeps driving its connector."""
        for _ in range(milliseconds // 50):
            self.clock.advance_ms(50)
            await self.decode.manager.sweep_once()

    def check_integrity(self) -> None:
        self.prefill.manager.check_integrity()
        self.decode.manager.check_integrity()

    def assert_idle(self) -> None:
        self.check_integrity()
        for end in (self.prefill, self.decode):
            assert end.manager.sessions_by_state() == {}
            assert end.manager.inflight_bytes == 0


def blocks(*block_ids: int) -> list[BlockId]:
    return [BlockId(block) for block in block_ids]


@asynccontextmanager
async def transfer_pair(
    script: str = "",
    config: TransferConfig = CONFIG,
    source: KvLayout = LAYOUT,
    target: KvLayout = LAYOUT,
) -> AsyncIterator[TransferPair]:
    """``script``: faults of the prefill side's writes. Both sides have shaken hands."""
    clock, fabric = VirtualClock(10**18), LocalFabric()
    pair = TransferPair(
        TransferEnd("prefill-0", 1, fabric, clock, script, source, config),
        TransferEnd("decode-0", 1, fabric, clock, "", target, config),
        clock,
        fabric,
    )
    try:
        answer = await pair.prefill.manager.answer(pair.decode.manager.offer())
        await pair.decode.manager.complete(answer)
        yield pair
        pair.check_integrity()
    finally:
        await pair.prefill.manager.close()
        await pair.decode.manager.close()
