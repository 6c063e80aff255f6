"""Peers that have left the registry are let go of; those that may come back or work are not."""

from __future__ import annotations

import pytest

from isthmus.common.clock import VirtualClock
from isthmus.common.errors import InstanceLostError
from isthmus.common.ids import InstanceId
from isthmus.common.registry import Entry, instance_key
from isthmus.common.registry.memory import MemoryRegistry
from isthmus.worker.peer_watch import PeerWatch

pytestmark = pytest.mark.asyncio

GONE, THERE = InstanceId("decode-0"), InstanceId("decode-1")
GRACE_MS = 1000


class Holder:
    def __init__(self, *idle: InstanceId) -> None:
        self.idle = set(idle)
        self.forgotten: list[InstanceId] = []

    def idle_peers(self) -> set[InstanceId]:
        return self.idle

    async def forget(self, instance_id: InstanceId) -> None:
        self.idle.discard(instance_id)
        self.forgotten.append(instance_id)


class Rig:
    def __init__(self, *holders: Holder) -> None:
        self.clock = VirtualClock()
        self.registry = MemoryRegistry(self.clock)
        self.watch = PeerWatch(self.registry, "c", self.clock, GRACE_MS, holders)

    async def look_after(self, ms: int) -> None:
        self.clock.advance_ms(ms)
        await self.watch.look()


async def test_a_peer_that_stays_away_is_forgotten_by_all() -> None:
    transfers, channels = Holder(GONE, THERE), Holder(GONE)
    rig = Rig(transfers, channels)
    await rig.registry.put(instance_key("c", THERE), b"")
    await rig.look_after(0)
    await rig.look_after(GRACE_MS - 1)
    assert not transfers.forgotten
    await rig.look_after(1)
    assert transfers.forgotten == channels.forgotten == [GONE]
    await rig.look_after(GRACE_MS)
    assert transfers.forgotten == [GONE]


async def test_a_peer_that_comes_back_or_works_begins_its_grace_anew() -> None:
    holder = Holder(GONE)
    rig = Rig(holder)
    await rig.look_after(0)
    await rig.registry.put(instance_key("c", GONE), b"")
    await rig.look_after(GRACE_MS - 1)
    await rig.registry.delete(instance_key("c", GONE))
    await rig.look_after(1)
    holder.idle = set()  # something is open with it
    await rig.look_after(GRACE_MS)
    holder.idle = {GONE}
    await rig.look_after(0)
    await rig.look_after(GRACE_MS - 1)
    assert not holder.forgotten


async def test_whoever_has_something_open_with_a_peer_is_not_made_to_forget_it() -> None:
    transfers, channels = Holder(), Holder(GONE)  # the call has ended, its blocks still rest
    rig = Rig(transfers, channels)
    await rig.look_after(0)
    await rig.look_after(GRACE_MS)
    assert channels.forgotten == [GONE]
    assert not transfers.forgotten
    transfers.idle = {GONE}
    await rig.look_after(0)
    await rig.look_after(GRACE_MS)
    assert transfers.forgotten == [GONE]


async def test_nobody_is_missed_while_the_registry_is_out_of_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holder = Holder(GONE)
    rig = Rig(holder)

    async def get(prefix: str) -> list[Entry]:
        raise InstanceLostError("gone", stage="registry")

    with monkeypatch.context() as patch:
        patch.setattr(rig.registry, "get", get)
        for _ in range(3):
            with pytest.raises(InstanceLostError):
                await rig.look_after(GRACE_MS)
    await rig.look_after(GRACE_MS)
    assert not holder.forgotten
