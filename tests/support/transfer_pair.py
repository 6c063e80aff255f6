"""A prefill and a decode manager in one process, on virtual time and with scripted faults.

Nothing runs by itself: ``drive`` sweeps both sides, ``clock`` moves only when told to.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from isthmus.common.clock import NS_PER_MS, VirtualClock
from isthmus.common.config import TransferConfig
from isthmus.common.ids import BlockId, InstanceId, RequestId, new_transfer_id
from isthmus.common.kv_layout import KvLayout, head_ranges
from isthmus.common.transfer import TransferTicket
from isthmus.common.types import InstanceRef
from isthmus.kernels import reference
from isthmus.kvtransfer.connectors.fake import FakeConnector, parse_script
from isthmus.kvtransfer.connectors.local import LocalConnector, LocalFabric
from isthmus.kvtransfer.interface import MemoryRegion
from isthmus.kvtransfer.manager import TransferManager
from isthmus.kvtransfer.observer import Side
from isthmus.kvtransfer.rank_port import LocalPort, RankPort
from isthmus.kvtransfer.receive_session import Ignored, ReceiveSession
from isthmus.kvtransfer.send_session import SendSession
from isthmus.kvtransfer.staging import Converter

LAYOUT = KvLayout("model", num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")
NUM_BLOCKS = 32
CONFIG = TransferConfig(connector="fake", deadline_ms=1000, quarantine_ms=300, checksum="none")
CHECKED = CONFIG.model_copy(update={"checksum": "xxh3"})


@dataclass
class RecordingObserver:
    ended: list[tuple[Side, str, int]] = field(default_factory=list)
    ignored: list[Ignored] = field(default_factory=list)
    num_corrupt: int = 0
    num_hopeless: int = 0
    bytes_per_s: Mapping[InstanceId, float] = field(default_factory=dict)

    def session_ended(
        self, side: Side, state: str, connector: str, num_bytes: int, seconds: float
    ) -> None:
        self.ended.append((side, state, num_bytes))

    def notification_ignored(self, reason: Ignored) -> None:
        self.ignored.append(reason)

    def links_measured(
        self, bytes_per_s: Mapping[InstanceId, float], connectors: Mapping[InstanceId, str]
    ) -> None:
        self.bytes_per_s = bytes_per_s

    def hopeless(self, connector: str) -> None:
        self.num_hopeless += 1

    def blocks_corrupt(self, num_blocks: int, connector: str) -> None:
        self.num_corrupt += num_blocks


def ranked(layout: KvLayout, num_heads: int, tp_size: int) -> tuple[KvLayout, ...]:
    """``layout`` as each of ``tp_size`` ranks has it, of a model with ``num_heads`` KV heads."""
    like = replace(layout, total_kv_heads=num_heads, tp_size=tp_size)
    return tuple(
        replace(like, num_kv_heads=len(heads), tp_rank=rank)
        for rank, heads in enumerate(head_ranges(num_heads, tp_size))
    )


class RankStores:
    """The memory of every rank of one instance, and a port to each in this process. Ranks with
    copies of a head begin with the same KV."""

    def __init__(
        self,
        instance_id: str,
        epoch: int,
        fabric: LocalFabric,
        clock: VirtualClock,
        layouts: Sequence[KvLayout],
        script: str = "",
        config: TransferConfig = CONFIG,
        staging_bytes: int = 0,
    ) -> None:
        """``script`` is each rank's. ``staging_bytes``: of memory behind the blocks, in which KV is
        converted."""
        self.layouts = tuple(layouts)
        random = np.random.default_rng(sum(instance_id.encode()) + epoch)
        heads = self.layouts[0].model_kv_heads
        whole = random.integers(0, 256, _shape(self.layouts[0], heads), dtype=np.uint8)
        self.memories: list[npt.NDArray[np.uint8]] = [
            whole[:, :, :, layout.heads.start : layout.heads.stop].flatten()
            for layout in self.layouts
        ]
        for index, (layout, memory) in enumerate(zip(self.layouts, self.memories, strict=True)):
            missing = NUM_BLOCKS * layout.block_bytes + staging_bytes - memory.nbytes
            if missing:  # what is behind the blocks, and scales
                behind = random.integers(0, 256, missing, dtype=np.uint8)
                self.memories[index] = np.concatenate((memory, behind))
        self.converters = [
            Converter(torch.from_numpy(memory), layout, NUM_BLOCKS, reference.quantise_kv)
            if staging_bytes
            else None
            for layout, memory in zip(self.layouts, self.memories, strict=True)
        ]
        name = f"{instance_id}@{epoch}"
        self.connectors = [
            FakeConnector(
                LocalConnector(f"{name}/{rank}" if rank else name, fabric), parse_script(script)[1]
            )
            for rank in range(len(self.layouts))
        ]
        self.ports = [
            LocalPort(
                layout,
                MemoryRegion(memory.ctypes.data, memory.nbytes),
                NUM_BLOCKS,
                (connector,),
                config,
                clock,
                converter,
            )
            for layout, memory, connector, converter in zip(
                self.layouts, self.memories, self.connectors, self.converters, strict=True
            )
        ]

    def tokens(self, block_ids: Sequence[BlockId], num_tokens: int) -> npt.NDArray[np.uint8]:
        """[L, P, heads of the model, tokens, D·bytes]: what these blocks hold on all ranks."""
        by_head: dict[int, npt.NDArray[np.uint8]] = {}
        for layout, memory in zip(self.layouts, self.memories, strict=True):
            store = memory.reshape(_shape(layout, layout.num_kv_heads))
            held = np.concatenate([store[block] for block in block_ids], axis=3)
            for index, head in enumerate(layout.heads):
                own = held[:, :, index, :num_tokens]
                assert (by_head.setdefault(head, own) == own).all(), f"copies of {head} differ"
        return np.stack([by_head[head] for head in sorted(by_head)], axis=2)


def _shape(layout: KvLayout, num_heads: int) -> tuple[int, ...]:
    return (
        NUM_BLOCKS,
        layout.num_layers,
        layout.num_planes,
        num_heads,
        layout.block_size,
        layout.vector_bytes,
    )


class TransferEnd:
    """One manager, the memory of its ranks and what it reported. ``memory``, ``layout`` and
    ``connector`` are the leader's."""

    def __init__(
        self,
        instance_id: str,
        epoch: int,
        fabric: LocalFabric,
        clock: VirtualClock,
        script: str = "",
        layout: KvLayout = LAYOUT,
        config: TransferConfig = CONFIG,
        stores: RankStores | None = None,
        ports: Sequence[RankPort] | None = None,
        staging_bytes: int = 0,
    ) -> None:
        """``stores`` are of several ranks, ``ports`` the manager's where they are not these."""
        self.ref = InstanceRef(InstanceId(instance_id), epoch, "127.0.0.1:1")
        self.stores = stores or RankStores(
            instance_id, epoch, fabric, clock, [layout], script, config, staging_bytes
        )
        self.converter = self.stores.converters[0]
        self.layout = self.stores.layouts[0]
        self.memory = self.stores.memories[0]
        self.connector = self.stores.connectors[0]
        self.observer = RecordingObserver()
        self.manager = TransferManager(
            self.ref, ports or self.stores.ports, config, clock, self.observer
        )

    def blocks(self, block_ids: Sequence[BlockId]) -> npt.NDArray[np.uint8]:
        num_bytes = NUM_BLOCKS * self.layout.block_bytes
        return self.memory[:num_bytes].reshape(NUM_BLOCKS, -1)[list(block_ids)]


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
    staging_bytes: int = 0,
) -> AsyncIterator[TransferPair]:
    """``script``: faults of the prefill side's writes. Both sides have shaken hands."""
    clock, fabric = VirtualClock(10**18), LocalFabric()
    pair = TransferPair(
        TransferEnd(
            "prefill-0", 1, fabric, clock, script, source, config, staging_bytes=staging_bytes
        ),
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
