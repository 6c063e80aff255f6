"""The gRPC registry under loss: deadlines, ends of watches, and coming back."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Iterator

import grpc.aio
import pytest

from isthmus.common.backoff import Backoff
from isthmus.common.errors import DeadlineError, InstanceLostError
from isthmus.common.registry import Listing, MemoryRegistry, WatchEvent, resume_watch
from isthmus.common.registry.embedded import EmbeddedRegistryClient, RegistryServer
from tests.support.poll import poll_until

WAIT_S = 10.0


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """Takes connections (into its backlog) and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        yield f"{host}:{port}"


@pytest.mark.asyncio
async def test_call_without_an_answer_ends_at_its_deadline() -> None:
    with silent_server() as address:
        client = EmbeddedRegistryClient(address, timeout_s=0.2)
        with pytest.raises(DeadlineError):
            await client.get("/")
        with pytest.raises(DeadlineError):
            await client.list_and_watch("/")
        await client.close()


@pytest.mark.asyncio
async def test_call_with_nobody_there_is_instance_lost() -> None:
    server = RegistryServer()
    address = await server.start("127.0.0.1", 0)
    await server.stop()
    client = EmbeddedRegistryClient(address)
    with pytest.raises(InstanceLostError):
        await client.put("/k", b"")
    with pytest.raises(InstanceLostError):
        await client.list_and_watch("/")
    await client.close()


@pytest.mark.asyncio
async def test_closing_a_watch_frees_it_on_the_server() -> None:
    server = RegistryServer()
    client = EmbeddedRegistryClient(await server.start("127.0.0.1", 0))
    listing = await client.list_and_watch("/")
    assert server.registry.num_watchers == 1
    await listing.changes.aclose()
    await poll_until(lambda: server.registry.num_watchers == 0, WAIT_S)
    await client.close()
    await server.stop()


@pytest.mark.asyncio
async def test_resumed_watch_tells_what_changed_while_the_registry_was_away(
    free_port: int,
) -> None:
    server = RegistryServer()
    address = await server.start("127.0.0.1", free_port)
    for key in ("gone", "same", "changed"):
        await server.registry.put(f"/i/{key}", b"1")
    client = EmbeddedRegistryClient(address)
    connected: list[bool] = []
    watch = resume_watch(client, "/i/", on_connected=connected.append, backoff=Backoff(0.01, 0.05))
    events: list[WatchEvent] = [await asyncio.wait_for(anext(watch), WAIT_S) for _ in range(3)]
    assert {event.key for event in events} == {"/i/gone", "/i/same", "/i/changed"}

    pending = asyncio.create_task(anext(watch))
    await server.stop()
    restarted = RegistryServer()
    await restarted.registry.put("/i/same", b"1")
    await restarted.registry.put("/i/changed", b"2")
    await restarted.start("127.0.0.1", free_port)
    gone = await asyncio.wait_for(pending, WAIT_S)
    changed = await asyncio.wait_for(anext(watch), WAIT_S)
    assert (gone.key, gone.entry) == ("/i/gone", None)
    assert changed.key == "/i/changed"
    assert changed.entry is not None
    assert changed.entry.value == b"2"
    await watch.aclose()
    assert connected[0] is True
    assert False in connected
    await client.close()
    await restarted.stop()


class BreakingRegistry(MemoryRegistry):
    """Lists what there is, and ends every watch behind that."""

    async def list_and_watch(self, prefix: str) -> Listing:
        return Listing((await super().list_and_watch(prefix)).entries, _broken())


async def _broken() -> AsyncGenerator[WatchEvent, None]:
    raise InstanceLostError("the watch ended", stage="registry")
    yield


class Waits(Backoff):
    def __init__(self) -> None:
        super().__init__(0.001, 0.008, lambda _, high: high)
        self.taken: list[float] = []

    def next_s(self) -> float:
        self.taken.append(super().next_s())
        return self.taken[-1]


@pytest.mark.asyncio
async def test_a_registry_whose_watches_break_at_once_is_not_asked_ever_again_at_once() -> None:
    waits = Waits()
    watch = resume_watch(BreakingRegistry(), "/i/", backoff=waits)
    pending = asyncio.create_task(anext(watch))
    await poll_until(lambda: len(waits.taken) >= 5)
    pending.cancel()
    await asyncio.gather(pending, return_exceptions=True)
    assert waits.taken[:5] == [0.001, 0.002, 0.004, 0.008, 0.008]


def test_what_held_for_the_longest_wait_is_tried_again_soon() -> None:
    backoff = Backoff(0.1, 2.0, lambda _, high: high)
    assert [backoff.next_s(), backoff.next_s()] == [0.1, 0.2]
    backoff.lasted(1.9)
    assert backoff.next_s() == 0.4
    backoff.lasted(2.0)
    assert backoff.next_s() == 0.1


@pytest.mark.asyncio
async def test_two_hundred_clients_register_at_once() -> None:
    server = RegistryServer()
    client = EmbeddedRegistryClient(await server.start("127.0.0.1", 0), timeout_s=20)

    async def register(index: int) -> bool:
        lease = await client.grant_lease(5_000)
        await client.put(f"/i/{index}", b"x", lease)
        return await client.keep_alive(lease)

    assert all(await asyncio.gather(*(register(index) for index in range(200))))
    assert len(await client.get("/i/")) == 200
    await client.close()
    await server.stop()


def test_waits_are_jittered_growing_and_bounded() -> None:
    ceilings = Backoff(0.1, 1.0, uniform=lambda low, high: high)
    assert [ceilings.next_s() for _ in range(6)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
    ceilings.reset()
    assert ceilings.next_s() == pytest.approx(0.1)
    spread = {Backoff(1.0, 1.0).next_s() for _ in range(20)}
    assert len(spread) > 10
    assert all(0.5 <= wait <= 1.0 for wait in spread)


@pytest.mark.asyncio
async def test_server_can_be_stopped_twice_and_before_it_started() -> None:
    server = RegistryServer()
    await server.stop()
    other = RegistryServer()
    address = await other.start("127.0.0.1", 0)
    await other.stop()
    await other.stop()
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(channel.channel_ready(), 0.3)
    assert isinstance(other.registry, MemoryRegistry)
