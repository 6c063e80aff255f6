from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from isthmus.common.clock import VirtualClock
from isthmus.common.cluster import Role
from isthmus.common.config import ClusterConfig, load_config
from isthmus.common.errors import DrainingError
from isthmus.controlplane.reconciler import Reconciler
from tests.support.fake_actuator import FakeActuator, FakeHandle
from tests.support.poll import poll_until


@asynccontextmanager
async def reconciled(
    config: ClusterConfig, clock: VirtualClock | None = None
) -> AsyncIterator[tuple[Reconciler, FakeActuator]]:
    actuator = FakeActuator()
    reconciler = Reconciler(config, actuator, clock or VirtualClock(), "127.0.0.1:1", cores=(0, 1))
    await reconciler.reconcile()
    try:
        yield reconciler, actuator
    finally:
        await reconciler.stop_all()


def pools(prefill: int = 0, decode: int = 0, mixed: int = 0) -> ClusterConfig:
    sizes = {"prefill": prefill, "decode": decode, "mixed": mixed}
    tree = {role: {"replicas": count} for role, count in sizes.items()}
    return load_config(overrides=tree, environ={})


async def alive(actuator: FakeActuator, *names: str) -> None:
    await poll_until(lambda: actuator.alive() == sorted(names))


@pytest.mark.asyncio
async def test_starts_what_the_configuration_asks_for() -> None:
    async with reconciled(pools(prefill=1, decode=2)) as (_, actuator):
        await alive(actuator, "prefill-0", "decode-0", "decode-1")
        spec = actuator.last("prefill-0").spec
        assert spec.registry_address == "127.0.0.1:1"
        assert spec.kind.role is Role.PREFILL


@pytest.mark.asyncio
async def test_scaling_down_by_one_ends_exactly_one() -> None:
    async with reconciled(pools(decode=3)) as (reconciler, actuator):
        await alive(actuator, "decode-0", "decode-1", "decode-2")
        kept = [actuator.last("decode-0"), actuator.last("decode-1")]
        assert await reconciler.scale(Role.DECODE, 2) == 3
        assert actuator.alive() == ["decode-0", "decode-1"]
        assert all(handle.is_alive and handle.stop_timeout_s is None for handle in kept)
        assert not actuator.last("decode-2").was_killed


@pytest.mark.asyncio
async def test_scaling_up_starts_only_the_new_ones() -> None:
    async with reconciled(pools(decode=1)) as (reconciler, actuator):
        await alive(actuator, "decode-0")
        await reconciler.scale(Role.PREFILL, 2)
        await alive(actuator, "decode-0", "prefill-0", "prefill-1")
        assert len(actuator.handles) == 3


@pytest.mark.asyncio
async def test_two_scalings_at_once_end_in_the_last_one() -> None:
    async with reconciled(pools(decode=1)) as (reconciler, actuator):
        await asyncio.gather(reconciler.scale(Role.DECODE, 3), reconciler.scale(Role.DECODE, 2))
        await alive(actuator, "decode-0", "decode-1")


@pytest.mark.asyncio
async def test_a_scaling_is_seen_through_when_whoever_asked_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_asked, may_end, stop = asyncio.Event(), asyncio.Event(), FakeHandle.stop

    async def drain(handle: FakeHandle, timeout_s: float) -> None:
        is_asked.set()
        await may_end.wait()
        await stop(handle, timeout_s)

    monkeypatch.setattr(FakeHandle, "stop", drain)
    async with reconciled(pools(decode=2)) as (reconciler, actuator):
        await alive(actuator, "decode-0", "decode-1")
        asking = asyncio.create_task(reconciler.scale(Role.DECODE, 1))
        await is_asked.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        may_end.set()
        await alive(actuator, "decode-0")
        assert await reconciler.scale(Role.DECODE, 2) == 1
        await alive(actuator, "decode-0", "decode-1")


@pytest.mark.asyncio
async def test_pinned_cores_reach_the_process_and_its_configuration() -> None:
    async with reconciled(pools(prefill=1, decode=1)) as (_, actuator):
        await alive(actuator, "decode-0", "prefill-0")
        prefill, decode = actuator.last("prefill-0").spec, actuator.last("decode-0").spec
        assert {prefill.cpus, decode.cpus} == {(0,), (1,)}
        assert prefill.config.prefill.cpus == list(prefill.cpus)


@pytest.mark.asyncio
async def test_worker_that_left_the_registry_is_replaced_after_the_limit() -> None:
    clock = VirtualClock()
    config = pools(decode=2)
    async with reconciled(config, clock) as (reconciler, actuator):
        await alive(actuator, "decode-0", "decode-1")
        assert reconciler.check_seen(["decode-1"]) == []
        clock.advance_ms(config.lifecycle.ready_timeout_ms + 1)
        assert reconciler.check_seen(["decode-1"]) == ["decode-0"]
        assert actuator.last("decode-0").was_killed
        assert not actuator.last("decode-1").was_killed
        await poll_until(lambda: len(actuator.handles) == 3)  # started again
        assert reconciler.check_seen(["decode-1"]) == []  # with its own time to appear


@pytest.mark.asyncio
async def test_stop_all_leaves_nothing() -> None:
    async with reconciled(pools(prefill=2, decode=2)) as (reconciler, actuator):
        await poll_until(lambda: len(actuator.alive()) == 4)
        await reconciler.stop_all()
        assert actuator.alive() == []
        assert reconciler.processes == {}


@pytest.mark.asyncio
async def test_nothing_starts_once_everything_is_being_stopped() -> None:
    async with reconciled(pools(decode=1)) as (reconciler, actuator):
        await alive(actuator, "decode-0")
        stopping = asyncio.create_task(reconciler.stop_all())
        await asyncio.sleep(0)  # it has begun, and holds the turn
        waiting = asyncio.create_task(reconciler.reconcile())
        await asyncio.gather(stopping, waiting)
        with pytest.raises(DrainingError):
            await reconciler.scale(Role.PREFILL, 2)
        assert actuator.alive() == []
        assert len(actuator.handles) == 1
