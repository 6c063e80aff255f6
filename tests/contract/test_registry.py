"""What every Registry promises, checked against each implementation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from isthmus.common.clock import VirtualClock
from isthmus.common.errors import InstanceLostError, StaleEpochError
from isthmus.common.registry import MemoryRegistry, Registry, WatchEvent, resume_watch
from isthmus.common.registry.embedded import EmbeddedRegistryClient, RegistryServer

SHORT_S = 60.0
OpenRegistry = Callable[[VirtualClock], "asynccontextmanager[tuple[Registry, MemoryRegistry]]"]


@asynccontextmanager
async def open_memory(clock: VirtualClock) -> AsyncIterator[tuple[Registry, MemoryRegistry]]:
    registry = MemoryRegistry(clock)
    yield registry, registry
    registry.close()


@asynccontextmanager
async def open_embedded(clock: VirtualClock) -> AsyncIterator[tuple[Registry, MemoryRegistry]]:
    server = RegistryServer(clock)
    client = EmbeddedRegistryClient(await server.start("127.0.0.1", 0))
    try:
        yield client, server.registry
    finally:
        await client.close()
        await server.stop()


@pytest.fixture(params=[open_memory, open_embedded], ids=["memory", "embedded"])
def opened(request: pytest.FixtureRequest) -> OpenRegistry:
    return request.param


async def soon(awaitable: Awaitable[WatchEvent]) -> WatchEvent:
    return await asyncio.wait_for(awaitable, SHORT_S)


@pytest.mark.asyncio
async def test_get_returns_entries_of_the_prefix_by_key(opened: OpenRegistry) -> None:
    async with opened(VirtualClock()) as (registry, _):
        await registry.put("/a/2", b"two")
        await registry.put("/a/1", b"one")
        await registry.put("/b/1", b"other")
        assert [(e.key, e.value) for e in await registry.get("/a/")] == [
            ("/a/1", b"one"),
            ("/a/2", b"two"),
        ]


@pytest.mark.asyncio
async def test_revisions_grow_with_every_write(opened: OpenRegistry) -> None:
    async with opened(VirtualClock()) as (registry, _):
        first = await registry.put("/k", b"1")
        second = await registry.put("/other", b"1")
        third = await registry.put("/k", b"2")
        assert first < second < third
        assert (await registry.get("/k"))[0].revision == third


@pytest.mark.asyncio
async def test_compare_and_swap_lets_one_of_two_writers_win(opened: OpenRegistry) -> None:
    async with opened(VirtualClock()) as (registry, _):
        assert await registry.compare_and_swap("/epochs/p", 0, b"1")
        assert not await registry.compare_and_swap("/epochs/p", 0, b"1")
        revision = (await registry.get("/epochs/p"))[0].revision
        outcomes = await asyncio.gather(
            registry.compare_and_swap("/epochs/p", revision, b"2"),
            registry.compare_and_swap("/epochs/p", revision, b"3"),
        )
        assert sorted(outcomes) == [False, True]


@pytest.mark.asyncio
async def test_what_was_swapped_in_under_a_lease_ends_with_it(opened: OpenRegistry) -> None:
    async with opened(VirtualClock()) as (registry, _):
        lease = await registry.grant_lease(5_000)
        assert await registry.compare_and_swap("/leaders/r", 0, b"a", lease)
        revision = (await registry.get("/leaders/r"))[0].revision
        assert await registry.compare_and_swap("/leaders/r", revision, b"b")  # keeps the lease
        await registry.revoke_lease(lease)
        assert await registry.get("/leaders/") == []
        with pytest.raises(StaleEpochError):
            await registry.compare_and_swap("/leaders/r", 0, b"a", lease)


@pytest.mark.asyncio
async def test_key_ends_with_its_lease(opened: OpenRegistry) -> None:
    clock = VirtualClock()
    async with opened(clock) as (registry, memory):
        lease = await registry.grant_lease(5_000)
        await registry.put("/i/p", b"x", lease)
        await registry.put("/epochs/p", b"1")
        clock.advance_ms(4_999)
        assert memory.expire_leases() == 0
        assert len(await registry.get("/i/")) == 1
        clock.advance_ms(1)
        memory.expire_leases()
        assert await registry.get("/i/") == []
        assert len(await registry.get("/epochs/")) == 1
        assert not await registry.keep_alive(lease)


@pytest.mark.asyncio
async def test_keep_alive_prolongs_a_lease(opened: OpenRegistry) -> None:
    clock = VirtualClock()
    async with opened(clock) as (registry, memory):
        lease = await registry.grant_lease(1_000)
        await registry.put("/i/p", b"x", lease)
        for _ in range(5):
            clock.advance_ms(900)
            assert await registry.keep_alive(lease)
            memory.expire_leases()
        assert len(await registry.get("/i/")) == 1


@pytest.mark.asyncio
async def test_put_under_an_expired_lease_is_refused(opened: OpenRegistry) -> None:
    async with opened(VirtualClock()) as (registry, _):
        lease = await registry.grant_lease(1_000)
        await registry.revoke_lease(lease)
        with pytest.raises(StaleEpochError):
            await registry.put("/i/p", b"x", lease)
        assert await registry.get("/i/") == []


@pytest.mark.asyncio
async def test_key_put_again_without_lease_survives_the_old_lease(opened: OpenRegistry) -> None:
    async with opened(VirtualClock()) as (registry, _):
        lease = await registry.grant_lease(1_000)
        await registry.put("/i/p", b"x", lease)
        await registry.put("/i/p", b"y")
        await registry.revoke_lease(lease)
        assert [e.value for e in await registry.get("/i/")] == [b"y"]


@pytest.mark.asyncio
async def test_watch_tells_present_entries_then_changes(opened: OpenRegistry) -> None:
    async with opened(VirtualClock()) as (registry, _):
        await registry.put("/i/p", b"1")
        await registry.put("/elsewhere", b"1")
        watch = registry.watch("/i/")
        first = await soon(anext(watch))
        assert first.entry is not None
        assert (first.key, first.entry.value) == ("/i/p", b"1")
        lease = await registry.grant_lease(1_000)
        await registry.put("/i/d", b"2", lease)
        await registry.revoke_lease(lease)
        added, gone = await soon(anext(watch)), await soon(anext(watch))
        assert added.key == gone.key == "/i/d"
        assert added.entry is not None
        assert added.entry.value == b"2"
        assert gone.entry is None
        assert gone.revision > added.revision > first.revision
        await watch.aclose()


@pytest.mark.asyncio
async def test_watch_ends_with_instance_lost_when_the_registry_goes(opened: OpenRegistry) -> None:
    async with opened(VirtualClock()) as (registry, memory):
        await registry.put("/i/p", b"1")
        watch = registry.watch("/i/")
        await soon(anext(watch))
        memory.close()
        with pytest.raises(InstanceLostError):
            await soon(anext(watch))


@pytest.mark.asyncio
async def test_listing_and_changes_leave_no_gap(opened: OpenRegistry) -> None:
    async with opened(VirtualClock()) as (registry, _):
        await registry.put("/i/a", b"1")
        listing = await registry.list_and_watch("/i/")
        await registry.put("/i/b", b"2")
        assert [entry.key for entry in listing.entries] == ["/i/a"]
        assert (await soon(anext(listing.changes))).key == "/i/b"
        await listing.changes.aclose()


@pytest.mark.asyncio
async def test_resumed_watch_follows_a_live_registry(opened: OpenRegistry) -> None:
    async with opened(VirtualClock()) as (registry, _):
        await registry.put("/i/a", b"1")
        watch = resume_watch(registry, "/i/")
        assert (await soon(anext(watch))).key == "/i/a"
        await registry.delete("/i/a")
        assert (await soon(anext(watch))).entry is None
        await watch.aclose()
