"""The feed against fake instances over real gRPC: joins, losses, restarts, gaps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest
from structlog.testing import capture_logs

from isthmus.common.clock import SystemClock, VirtualClock
from isthmus.common.cluster import InstanceState, Role
from isthmus.common.config import RouterConfig
from isthmus.common.errors import NoInstanceError
from isthmus.common.ids import BlockHash, InstanceId
from isthmus.common.registry import MemoryRegistry, instance_key
from isthmus.protos.convert.instances import info_to_pb
from isthmus.router import Router
from isthmus.router.feed import ClusterFeed
from tests.support.fake_instance import FakeInstance
from tests.support.poll import poll_until
from tests.support.router_cluster import make_info, make_query

HASHES = tuple(BlockHash(bytes([index]) * 16) for index in range(8))


@dataclass
class Bed:
    registry: MemoryRegistry
    router: Router
    feed: ClusterFeed
    instances: dict[str, FakeInstance]

    async def join(
        self,
        name: str,
        role: Role,
        epoch: int = 1,
        lease_id: int = 0,
        port: int = 0,
    ) -> FakeInstance:
        instance = FakeInstance(make_info(name, role, epoch=epoch))
        await instance.start(port)
        self.instances[f"{name}@{epoch}"] = instance
        await instance.register(self.registry, lease_id=lease_id)
        return instance

    async def until_heard(self, name: str, epoch: int = 1) -> None:
        await poll_until(lambda: self._load_epoch(name) == epoch)

    def _load_epoch(self, name: str) -> int:
        view = self.router.cluster.get(InstanceId(name))
        return view.load.epoch if view is not None and view.load is not None else 0

    def state_of(self, name: str) -> InstanceState | None:
        view = self.router.cluster.get(InstanceId(name))
        return view.info.state if view is not None else None

    def is_suspect(self, name: str) -> bool:
        view = self.router.cluster.get(InstanceId(name))
        return view is not None and view.is_suspect

    def cached(self, name: str) -> int:
        return self.router.state.index.match((HASHES,)).get(InstanceId(name), 0)


@asynccontextmanager
async def open_bed(**config: int) -> AsyncIterator[Bed]:
    router_config = RouterConfig(**config)
    registry = MemoryRegistry(VirtualClock())
    router = Router(router_config, SystemClock())
    feed = ClusterFeed(registry, "c", router.state, router_config)
    feed.start()
    bed = Bed(registry, router, feed, {})
    try:
        yield bed
        router.state.index.check_integrity()
        router.state.ledger.check_integrity()
    finally:
        await feed.close()
        for instance in bed.instances.values():
            await instance.stop()
        registry.close()


@pytest.mark.asyncio
async def test_instances_join_with_load_and_cached_blocks() -> None:
    async with open_bed() as bed:
        prefill = await bed.join("p0", Role.PREFILL)
        decode = await bed.join("d0", Role.DECODE)
        decode.load["running_seqs"] = 3
        await prefill.store(*HASHES[:3])
        await bed.until_heard("p0")
        await bed.until_heard("d0")
        await poll_until(lambda: bed.cached("p0") == 3)
        decision = bed.router.route(make_query())
        assert decision.prefill == prefill.info.ref
        assert decision.decode == decode.info.ref
        await prefill.remove(HASHES[2])
        await poll_until(lambda: bed.cached("p0") == 2)
        await prefill.clear()
        await poll_until(lambda: bed.cached("p0") == 0)


@pytest.mark.asyncio
async def test_dead_instance_in_the_registry_delays_nothing() -> None:
    async with open_bed() as bed:
        gone = await bed.join("d0", Role.DECODE)
        await gone.stop()
        await bed.join("d1", Role.DECODE)
        start = time.monotonic()
        assert await bed.feed.wait_listed(5)
        await bed.until_heard("d1")
        await poll_until(lambda: bed.is_suspect("d0"))
        assert time.monotonic() - start < 5
        decisions = [bed.router.route(make_query()) for _ in range(4)]
        assert {d.decode.instance_id for d in decisions if d.decode} == {"d1"}


@pytest.mark.asyncio
async def test_wait_listed_is_bounded_without_a_registry() -> None:
    config = RouterConfig()
    registry = MemoryRegistry()
    registry.close()
    router = Router(config, SystemClock())
    feed = ClusterFeed(registry, "c", router.state, config)
    feed.start()
    assert not await feed.wait_listed(0.2)
    with pytest.raises(NoInstanceError):
        router.route(make_query())
    await feed.close()


@pytest.mark.asyncio
async def test_killed_instance_is_out_at_once_and_lost_with_its_lease() -> None:
    async with open_bed() as bed:
        lease = await bed.registry.grant_lease(5_000)
        decode = await bed.join("d0", Role.DECODE, lease_id=lease)
        await decode.store(*HASHES)
        await bed.until_heard("d0")
        await poll_until(lambda: bed.cached("d0") == 8)
        killed = time.monotonic()
        await decode.stop()
        await poll_until(lambda: bed.is_suspect("d0"))
        assert time.monotonic() - killed < 1
        with pytest.raises(NoInstanceError) as caught:
            bed.router.route(make_query())
        assert caught.value.retry_after_ms >= 1_000
        assert bed.cached("d0") == 8  # it may come back
        await bed.registry.revoke_lease(lease)
        await poll_until(lambda: bed.router.cluster.get(InstanceId("d0")) is None)
        assert bed.cached("d0") == 0
        assert [lost.instance_id for lost in bed.router.snapshot().lost] == ["d0"]


@pytest.mark.asyncio
async def test_suspect_instance_returns_with_its_stream(free_port: int) -> None:
    async with open_bed() as bed:
        decode = await bed.join("d0", Role.DECODE, port=free_port)
        await bed.until_heard("d0")
        await decode.stop()
        await poll_until(lambda: bed.is_suspect("d0"))
        changes: list[bool] = []
        bed.router.state.on_change = lambda: changes.append(bed.is_suspect("d0"))
        await decode.start(free_port)
        await poll_until(lambda: not bed.is_suspect("d0"))
        assert changes[-1] is False
        assert bed.router.route(make_query()).decode == decode.info.ref


@pytest.mark.asyncio
async def test_silent_instance_becomes_suspect_and_returns() -> None:
    async with open_bed(stale_load_ms=100) as bed:
        decode = await bed.join("d0", Role.DECODE)
        await bed.until_heard("d0")
        decode.is_silent = True
        await poll_until(lambda: bed.is_suspect("d0"))
        decode.is_silent = False
        await poll_until(lambda: not bed.is_suspect("d0"))


@pytest.mark.asyncio
async def test_an_instance_that_starts_need_not_answer_yet(free_port: int) -> None:
    """That is no fault, but ready it is not chosen before it was heard; dead, it goes."""
    async with open_bed(stale_load_ms=60_000) as bed:  # no slow report is taken for silence
        with capture_logs() as logs:
            starting = FakeInstance(make_info("d0", Role.DECODE, state=InstanceState.STARTING))
            bed.instances["d0@1"] = starting
            await starting.start(free_port)
            await starting.stop()
            await starting.register(bed.registry)
            await poll_until(lambda: bed.is_suspect("d0"))
            starting.info = replace(starting.info, state=InstanceState.READY)
            await starting.register(bed.registry)
            await poll_until(lambda: bed.state_of("d0") is InstanceState.READY)
            with pytest.raises(NoInstanceError):
                bed.router.route(make_query())
            await starting.start(free_port)
            await bed.until_heard("d0")
            assert bed.router.route(make_query()).decode == starting.info.ref
        events = [entry["event"] for entry in logs]
        assert events == ["registry connected", "instance joined"]
        await starting.stop()
        await bed.registry.delete(instance_key("c", "d0"))
        await poll_until(lambda: bed.router.cluster.get(InstanceId("d0")) is None)


@pytest.mark.asyncio
async def test_vanished_record_alone_does_not_stop_routing() -> None:
    async with open_bed() as bed:
        decode = await bed.join("d0", Role.DECODE)
        await bed.until_heard("d0")
        await bed.registry.delete(instance_key("c", "d0"))
        await poll_until(lambda: not bed.router.cluster.views[InstanceId("d0")].is_registered)
        assert bed.router.route(make_query()).decode == decode.info.ref
        await decode.stop()
        await poll_until(lambda: bed.router.cluster.get(InstanceId("d0")) is None)
        await decode.start()
        await decode.register(bed.registry)
        await bed.until_heard("d0")


@pytest.mark.asyncio
async def test_registry_loss_keeps_the_last_view() -> None:
    async with open_bed() as bed:
        decode = await bed.join("d0", Role.DECODE)
        await bed.until_heard("d0")
        await poll_until(lambda: bed.router.snapshot().is_registry_connected)
        bed.registry.close()
        await poll_until(lambda: not bed.router.snapshot().is_registry_connected)
        assert bed.router.route(make_query()).decode == decode.info.ref


@pytest.mark.asyncio
async def test_restarted_instance_starts_clean() -> None:
    async with open_bed() as bed:
        old = await bed.join("d0", Role.DECODE)
        await old.store(*HASHES)
        await poll_until(lambda: bed.cached("d0") == 8)
        await bed.until_heard("d0")
        bed.router.cluster.views[InstanceId("d0")].prefill_factor = 3.0
        new = await bed.join("d0", Role.DECODE, epoch=2)
        await bed.until_heard("d0", epoch=2)
        assert bed.cached("d0") == 0
        view = bed.router.cluster.views[InstanceId("d0")]
        assert (view.info.ref, view.prefill_factor) == (new.info.ref, 1.0)
        await new.store(*HASHES[:2])
        await poll_until(lambda: bed.cached("d0") == 2)
        await old.store(*HASHES[:5])  # the leftover of the old epoch is not believed
        await new.store(HASHES[2])
        await poll_until(lambda: bed.cached("d0") == 3)


@pytest.mark.asyncio
async def test_lost_kv_events_are_asked_for_once() -> None:
    async with open_bed() as bed:
        decode = await bed.join("d0", Role.DECODE)
        await poll_until(lambda: len(decode.kv_requests) == 1)
        await decode.store(HASHES[0])
        await poll_until(lambda: bed.cached("d0") == 1)
        decode.num_to_lose = 2
        for block_hash in HASHES[1:5]:
            await decode.store(block_hash)
        await poll_until(lambda: bed.cached("d0") == 5)
        assert decode.kv_requests == [(1, 0), (1, 2)]
        assert bed.router.snapshot().index_resyncs == 1


@pytest.mark.asyncio
async def test_unreadable_record_harms_nobody() -> None:
    async with open_bed() as bed:
        await bed.registry.put(instance_key("c", "bad"), b"\xff\xff\xff")
        await bed.registry.put(instance_key("c", "empty"), b"")
        unknown = info_to_pb(make_info("new", Role.DECODE))
        unknown.role = 99  # type: ignore[assignment]
        await bed.registry.put(instance_key("c", "new-role"), unknown.SerializeToString())
        unknown = info_to_pb(make_info("new", Role.DECODE))
        unknown.kv_layout.dtype = "fp4"
        await bed.registry.put(instance_key("c", "new-dtype"), unknown.SerializeToString())
        await bed.join("d0", Role.DECODE)
        await bed.until_heard("d0")
        assert [i.instance_id for i in bed.router.snapshot().instances] == ["d0"]


@pytest.mark.asyncio
async def test_draining_instance_gets_no_more_requests() -> None:
    async with open_bed() as bed:
        decode = await bed.join("d0", Role.DECODE)
        await bed.until_heard("d0")
        decode.info = replace(decode.info, state=type(decode.info.state).DRAINING)
        await decode.register(bed.registry)
        await poll_until(lambda: not bed.router.snapshot().is_ready)
        with pytest.raises(NoInstanceError, match="not_ready"):
            bed.router.route(make_query())
        assert decode.num_load_streams == 1


@pytest.mark.asyncio
async def test_close_ends_every_task() -> None:
    before = asyncio.all_tasks()
    async with open_bed() as bed:
        for index in range(3):
            await bed.join(f"d{index}", Role.DECODE)
            await bed.until_heard(f"d{index}")
        await bed.feed.close()
        await bed.feed.close()
        left = {task for task in asyncio.all_tasks() - before if "follow" in task.get_name()}
        assert not left
