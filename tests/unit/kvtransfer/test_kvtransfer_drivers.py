"""Several connectors as one: threads only for those in use, one sweep of all of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from isthmus.common.clock import SystemClock
from isthmus.common.config import ConnectorName, TransferConfig
from isthmus.common.errors import HandshakeError, IsthmusError, TransferError
from isthmus.common.ids import BlockId, InstanceId, RequestId, new_transfer_id
from isthmus.common.shared_memory import create_shared_memory
from isthmus.common.transfer import TransferTicket
from isthmus.common.types import InstanceRef
from isthmus.kvtransfer.connectors.local import LocalConnector, LocalFabric
from isthmus.kvtransfer.connectors.registry import create_connectors
from isthmus.kvtransfer.drivers import Drivers
from isthmus.kvtransfer.interface import CopyOp, MemoryRegion
from isthmus.kvtransfer.manager import TransferManager
from isthmus.kvtransfer.rank_port import LocalPort
from isthmus.kvtransfer.receive_session import ReceiveState
from isthmus.kvtransfer.writes import Outcome, Write
from tests.support.transfer_pair import LAYOUT, NUM_BLOCKS

pytestmark = pytest.mark.asyncio

TIMEOUT_S = 20.0


class Owner:
    is_open = True
    num_bytes_left = 64

    def write_ended(self, write: Write, outcome: Outcome, error: IsthmusError | None) -> None:
        raise AssertionError("telling the owner is the manager's part")


class RenamedConnector(LocalConnector):
    def __init__(self, kind: str, fabric: LocalFabric) -> None:
        super().__init__(f"{kind}-agent", fabric)
        self.name = kind
        self.is_closed = False

    def close(self) -> None:
        super().close()
        self.is_closed = True


def transfer_threads() -> int:
    return sum(thread.name == "kvtransfer" for thread in threading.enumerate())


async def test_only_a_connector_with_a_peer_has_a_thread_and_all_are_closed() -> None:
    fabrics = LocalFabric(), LocalFabric()
    memory = np.arange(64, dtype=np.uint8)
    region = MemoryRegion(memory.ctypes.data, 64)
    connectors = [
        RenamedConnector(kind, fabric) for kind, fabric in zip("ab", fabrics, strict=True)
    ]
    before = transfer_threads()
    drivers = Drivers(connectors, region, SystemClock())
    assert [offer.name for offer in drivers.offers] == ["a", "b"]
    assert transfer_threads() == before
    assert (await drivers.sweep(0.01)).is_empty
    peer = LocalConnector("peer", fabrics[1])
    target = np.zeros(64, dtype=np.uint8)
    peer.register(MemoryRegion(target.ctypes.data, 64))
    offer = drivers.offers[1]
    theirs = type(offer)("b", peer.metadata(), offer.domain)
    name = await drivers.add_peer(theirs, MemoryRegion(target.ctypes.data, 64), TIMEOUT_S)
    assert transfer_threads() == before + 1
    drivers.submit(Write(name, (CopyOp(0, 0, 64),), b"n", 2**62, Owner()))
    assert (drivers.num_open_writes, drivers.open_bytes) == (1, 64)
    sweep = await drivers.sweep(TIMEOUT_S)
    assert [outcome for _, outcome, _ in sweep.ended] == [Outcome.DONE]
    assert (drivers.num_open_writes, drivers.open_bytes) == (0, 0)
    assert (target == memory).all()
    await drivers.remove_peer(name, TIMEOUT_S)
    assert drivers.bytes_per_s(name) is None
    drivers.submit(Write(name, (CopyOp(0, 0, 64),), b"n", 2**62, Owner()))  # it came too late
    sweep = await drivers.sweep(TIMEOUT_S)
    assert [outcome for _, outcome, _ in sweep.ended] == [Outcome.NOT_POSTED]
    assert await drivers.close(TIMEOUT_S)
    assert all(connector.is_closed for connector in connectors)
    peer.close()


async def test_connector_that_cannot_register_leaves_none_open() -> None:
    fabric = LocalFabric()
    taken = LocalConnector("b-agent", fabric)
    taken.register(MemoryRegion(0, 1))
    first = RenamedConnector("a", LocalFabric())
    with pytest.raises(TransferError, match="named b-agent"):
        Drivers([first, RenamedConnector("b", fabric)], MemoryRegion(0, 1), SystemClock())
    assert first.is_closed
    taken.close()


class Unable(RenamedConnector):
    def register(self, region: MemoryRegion) -> None:
        raise TransferError("no such device", stage="register")


async def test_connector_that_cannot_register_and_need_not_is_left_out() -> None:
    able, unable = RenamedConnector("a", LocalFabric()), Unable("b", LocalFabric())
    drivers = Drivers([unable, able], MemoryRegion(0, 1), SystemClock(), must_have_all=False)
    assert [offer.name for offer in drivers.offers] == ["a"]
    assert (able.is_closed, unable.is_closed) == (False, True)
    assert await drivers.close(TIMEOUT_S)
    assert able.is_closed
    with pytest.raises(TransferError, match="nothing can move KV here: b: no such device"):
        Drivers([unable], MemoryRegion(0, 1), SystemClock(), must_have_all=False)


async def test_idle_sweep_ends_when_woken() -> None:
    drivers = Drivers([RenamedConnector("a", LocalFabric())], MemoryRegion(0, 1), SystemClock())
    sweep = asyncio.ensure_future(drivers.sweep(TIMEOUT_S * 10))
    await asyncio.sleep(0)
    drivers.wake()
    assert (await asyncio.wait_for(sweep, TIMEOUT_S)).is_empty
    await drivers.close(TIMEOUT_S)


class Node:
    """A manager as a worker has it, with real connectors."""

    def __init__(self, instance_id: str, names: Sequence[ConnectorName]) -> None:
        num_bytes = NUM_BLOCKS * LAYOUT.block_bytes
        mapping, self.fd = create_shared_memory(num_bytes)
        self.memory = np.frombuffer(mapping, dtype=np.uint8).reshape(NUM_BLOCKS, -1)
        self.memory[:] = np.random.default_rng(len(instance_id)).integers(0, 256, (NUM_BLOCKS, 1))
        self.ref = InstanceRef(InstanceId(instance_id), 1, "127.0.0.1:1")
        region = MemoryRegion(self.memory.ctypes.data, num_bytes, fd=self.fd)
        config = TransferConfig(connector=list(names), quarantine_ms=100)
        connectors = create_connectors(config, self.ref, region, LAYOUT.block_bytes)
        port = LocalPort(LAYOUT, region, NUM_BLOCKS, connectors, config, SystemClock())
        self.manager = TransferManager(self.ref, [port], config, SystemClock())
        self.manager.start()


@asynccontextmanager
async def nodes(*described: tuple[str, Sequence[ConnectorName]]) -> AsyncIterator[list[Node]]:
    made = [Node(instance_id, names) for instance_id, names in described]
    try:
        yield made
    finally:
        for node in made:
            await node.manager.close()


async def meet(one: Node, other: Node) -> None:
    await one.manager.complete(await other.manager.answer(one.manager.offer()))


async def move(prefill: Node, decode: Node) -> None:
    targets, sources = [5, 9, 2, 30], [1, 2, 3, 4]
    ticket = TransferTicket(
        transfer_id=new_transfer_id(),
        request_id=RequestId("r"),
        source=prefill.ref,
        target=decode.ref,
        first_block=0,
        target_block_ids=tuple(BlockId(block) for block in targets),
        num_tokens=len(targets) * LAYOUT.block_size,
        layout_hash=LAYOUT.compat_hash,
        deadline_ns=SystemClock().now_ns() + int(TIMEOUT_S * 1e9),
        checksum=decode.manager.checksum_with(prefill.ref),
    )
    receive = decode.manager.open_receive(ticket)
    send = prefill.manager.open_send(ticket)
    send.push(0, [BlockId(block) for block in sources], True)
    await asyncio.wait_for(receive.wait_complete(), TIMEOUT_S)
    assert receive.state is ReceiveState.COMPLETE
    assert (decode.memory[targets] == prefill.memory[sources]).all()


async def test_one_instance_speaks_to_each_peer_over_what_both_have() -> None:
    async with nodes(
        ("prefill", ["shm", "collective"]), ("near-decode", ["collective", "shm"]),
        ("far-off-decode", ["collective"]),
    ) as (prefill, near, far):  # fmt: skip
        await meet(near, prefill)
        await meet(far, prefill)
        expected = {near.ref.instance_id: "shm", far.ref.instance_id: "collective"}
        assert prefill.manager.connectors_by_peer() == expected
        assert near.manager.connectors_by_peer() == {prefill.ref.instance_id: "shm"}
        for _ in range(2):
            await asyncio.gather(move(prefill, near), move(prefill, far))


async def test_pair_without_a_common_connector_is_refused_on_either_side() -> None:
    async with nodes(("prefill", ["shm"]), ("decode", ["collective"])) as (prefill, decode):
        with pytest.raises(HandshakeError, match="collective here, shm at prefill"):
            await decode.manager.complete(prefill.manager.offer())
        with pytest.raises(HandshakeError, match="shm here, collective at decode"):
            await prefill.manager.answer(decode.manager.offer())
        assert prefill.manager.connectors_by_peer() == {}
