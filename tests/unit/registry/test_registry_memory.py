"""MemoryRegistry's own rules: leases under a stopped process, slow readers, restarts."""

from __future__ import annotations

import asyncio

import pytest

from isthmus.common.clock import VirtualClock
from isthmus.common.errors import InstanceLostError
from isthmus.common.registry import MemoryRegistry
from isthmus.common.registry import memory as memory_module


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_expiry_task_ends_leases_by_itself() -> None:
    registry = MemoryRegistry()
    lease = await registry.grant_lease(20)
    await registry.put("/i/p", b"x", lease)
    watch = registry.watch("/i/")
    await anext(watch)
    task = asyncio.create_task(registry.run_expiry(period_s=0.01))
    event = await asyncio.wait_for(anext(watch), 5)
    assert event.entry is None
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await watch.aclose()


@pytest.mark.asyncio
async def test_leases_get_back_the_time_the_registry_itself_was_stopped() -> None:
    clock = VirtualClock()
    registry = MemoryRegistry(clock)
    lease = await registry.grant_lease(5_000)
    await registry.put("/i/p", b"x", lease)
    task = asyncio.create_task(registry.run_expiry(period_s=0))
    await _turns(3)
    clock.advance_ms(60_000)  # one wake-up for a minute: the process was stopped
    await _turns(3)
    assert await registry.keep_alive(lease)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.asyncio
async def test_reader_too_far_behind_is_cut_off_and_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_module, "WATCH_QUEUE_EVENTS", 3)
    registry = MemoryRegistry(VirtualClock())
    listing = await registry.list_and_watch("/")
    for index in range(10):
        await registry.put("/k", str(index).encode())
    values = [(await anext(listing.changes)).entry.value for _ in range(3)]
    assert values == [b"0", b"1", b"2"]
    with pytest.raises(InstanceLostError):
        await anext(listing.changes)
    assert registry.num_watchers == 0


@pytest.mark.asyncio
async def test_closed_watch_is_forgotten_even_if_never_read() -> None:
    registry = MemoryRegistry(VirtualClock())
    listing = await registry.list_and_watch("/")
    assert registry.num_watchers == 1
    await listing.changes.aclose()
    assert registry.num_watchers == 0


@pytest.mark.asyncio
async def test_restarted_registry_reuses_neither_revisions_nor_leases() -> None:
    clock = VirtualClock(1_700_000_000_000_000_000)
    old = MemoryRegistry(clock)
    lease = await old.grant_lease(1_000)
    revision = await old.put("/k", b"1", lease)
    clock.advance_ms(2_000)
    new = MemoryRegistry(clock)
    assert await new.put("/k", b"1") > revision
    await new.grant_lease(1_000)
    assert not await new.keep_alive(lease)
