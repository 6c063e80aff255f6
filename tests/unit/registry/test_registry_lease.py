"""A lease that is kept, and what is written under it."""

from __future__ import annotations

import pytest

from isthmus.common.clock import VirtualClock
from isthmus.common.errors import InstanceLostError, StaleEpochError
from isthmus.common.registry import KeptLease, MemoryRegistry

pytestmark = pytest.mark.asyncio

LEASE_MS = 300


class Counting(MemoryRegistry):
    """Counts writes, and fails those that it is told to."""

    def __init__(self) -> None:
        super().__init__(VirtualClock())
        self.num_writes = 0
        self.is_away = False

    async def put(self, key: str, value: bytes, lease_id: int = 0) -> int:
        if self.is_away:
            raise InstanceLostError("registry: down", stage="registry")
        self.num_writes += 1
        return await super().put(key, value, lease_id)


async def values(registry: MemoryRegistry) -> list[bytes]:
    return [entry.value for entry in await registry.get("/")]


async def test_a_value_is_written_once_and_again_when_it_changes() -> None:
    registry = Counting()
    lease = KeptLease(registry, LEASE_MS)
    for value in (b"a", b"a", b"b", b"b"):
        await lease.keep()
        await lease.write("/here", value)
    assert registry.num_writes == 2
    assert await values(registry) == [b"b"]
    await lease.give_back()
    assert await values(registry) == []


async def test_what_went_with_a_lease_is_written_again_under_the_next() -> None:
    registry = Counting()
    lease = KeptLease(registry, LEASE_MS)
    assert not await lease.keep()
    await lease.write("/here", b"a")
    await lease.write("/there", b"b")
    assert await lease.keep()
    await registry.revoke_lease(await lease.held())
    assert await values(registry) == []
    assert not await lease.keep()
    assert not lease.has_written("/here", b"a")
    await lease.write("/here", b"a")
    assert await values(registry) == [b"a"]


async def test_a_lease_that_ends_between_two_calls_is_replaced() -> None:
    registry = Counting()
    lease = KeptLease(registry, LEASE_MS)
    await lease.write("/here", b"a")
    await registry.revoke_lease(await lease.held())
    with pytest.raises(StaleEpochError):
        await lease.write("/here", b"b")
    await lease.write("/here", b"b")
    assert await values(registry) == [b"b"]


async def test_what_could_not_be_written_is_written_under_the_same_lease_later() -> None:
    registry = Counting()
    lease = KeptLease(registry, LEASE_MS)
    registry.is_away = True
    with pytest.raises(InstanceLostError):
        await lease.write("/here", b"a")
    registry.is_away = False
    held = await lease.held()
    assert await lease.keep()
    await lease.write("/here", b"a")
    assert await lease.held() == held
    assert await values(registry) == [b"a"]


async def test_a_lease_is_kept_thrice_while_it_lasts() -> None:
    beats = [KeptLease(MemoryRegistry(), 3_000).beat_s() for _ in range(100)]
    assert min(beats) >= 0.8
    assert max(beats) <= 1.0
