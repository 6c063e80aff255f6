"""One leads, and another takes its place: in order, by death, and not while nobody can know."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from isthmus.common.clock import VirtualClock
from isthmus.common.errors import InstanceLostError
from isthmus.common.registry import Candidate, MemoryRegistry, leader_key
from tests.support.poll import poll_until

KEY = leader_key("c", "router")
LEASE_MS = 60  # real pauses between its renewals are a third of it


class Flaky(MemoryRegistry):
    """Answers nobody while ``is_away``."""

    is_away = False
    num_refused = 0

    async def keep_alive(self, lease_id: int) -> bool:
        if self.is_away:
            self.num_refused += 1
            raise InstanceLostError("away", stage="registry")
        return await super().keep_alive(lease_id)


@asynccontextmanager
async def running(candidate: Candidate) -> AsyncIterator[Callable[[], None]]:
    """Yields what kills it: nothing of it is given back."""
    task = asyncio.create_task(candidate.run())
    try:
        yield task.cancel
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def holder(registry: MemoryRegistry) -> bytes | None:
    entry = registry._entries.get(KEY)
    return entry.value if entry else None


@pytest.mark.asyncio
async def test_one_of_several_leads_and_the_next_follows_one_that_resigns() -> None:
    registry = MemoryRegistry(VirtualClock())
    changes: list[tuple[str, bool]] = []
    a = Candidate(
        registry, KEY, b"a", LEASE_MS, on_change=lambda leads: changes.append(("a", leads))
    )
    b = Candidate(
        registry, KEY, b"b", LEASE_MS, on_change=lambda leads: changes.append(("b", leads))
    )
    async with running(a) as kill:
        await poll_until(lambda: a.is_leading)
        async with running(b):
            await poll_until(lambda: b._holder == b"a")
            assert not b.is_leading
            kill()
            await a.resign()
            await poll_until(lambda: b.is_leading)
            assert holder(registry) == b"b"
            assert changes == [("a", True), ("a", False), ("b", True)]


@pytest.mark.asyncio
async def test_one_that_dies_is_followed_when_its_lease_ends_and_not_before() -> None:
    clock = VirtualClock()
    registry = MemoryRegistry(clock)
    a, b = (Candidate(registry, KEY, name, LEASE_MS) for name in (b"a", b"b"))
    async with running(a) as kill:
        await poll_until(lambda: a.is_leading)
        async with running(b):
            kill()
            await poll_until(lambda: b._holder == b"a")
            clock.advance_ms(LEASE_MS - 1)
            registry.expire_leases()
            assert holder(registry) == b"a"
            clock.advance_ms(1)
            registry.expire_leases()
            await poll_until(lambda: b.is_leading)
            assert holder(registry) == b"b"


@pytest.mark.asyncio
async def test_a_leader_whose_lease_ended_leads_no_more_until_it_wins_again() -> None:
    clock = VirtualClock()
    registry = MemoryRegistry(clock)
    changes: list[bool] = []
    candidate = Candidate(registry, KEY, b"a", LEASE_MS, on_change=changes.append)
    async with running(candidate):
        await poll_until(lambda: candidate.is_leading)
        clock.advance_ms(LEASE_MS)
        registry.expire_leases()
        await poll_until(lambda: changes == [True, False, True])


@pytest.mark.asyncio
async def test_a_leader_goes_on_while_the_registry_is_away() -> None:
    registry = Flaky(VirtualClock())
    changes: list[bool] = []
    candidate = Candidate(registry, KEY, b"a", LEASE_MS, on_change=changes.append)
    async with running(candidate):
        await poll_until(lambda: candidate.is_leading)
        registry.is_away = True
        await poll_until(lambda: registry.num_refused >= 2)
        assert candidate.is_leading
        registry.is_away = False
    assert changes == [True]
    await candidate.resign()
    assert holder(registry) is None


@pytest.mark.asyncio
async def test_one_that_is_begun_anew_follows_nobody_who_left_meanwhile() -> None:
    registry = MemoryRegistry(VirtualClock())
    a, b = (Candidate(registry, KEY, name, LEASE_MS) for name in (b"a", b"b"))
    async with running(a) as kill:
        await poll_until(lambda: a.is_leading)
        async with running(b):
            await poll_until(lambda: b._holder == b"a")
        await b.resign()
        kill()
        await a.resign()
    async with running(b):
        await poll_until(lambda: b.is_leading)
        assert holder(registry) == b"b"
