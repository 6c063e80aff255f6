from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from isthmus.common.cluster import InstanceInfo, InstanceState, Role
from isthmus.common.errors import InstanceLostError, InternalError
from isthmus.common.registry import MemoryRegistry, epoch_key, instance_key
from isthmus.protos.convert.instances import info_from_pb
from isthmus.protos.v1 import common_pb2
from isthmus.worker.registration import Registration, claim_epoch
from tests.support.poll import poll_until
from tests.support.router_cluster import make_info

pytestmark = pytest.mark.asyncio

KEY = instance_key("c", "d")
EPOCH_KEY = epoch_key("c", "d")


class BrokenRegistry(MemoryRegistry):
    """A registry that can be out of reach."""

    def __init__(self) -> None:
        super().__init__()
        self.is_broken = False
        self.num_calls = 0
        self.lease_id = 0

    def _check(self) -> None:
        self.num_calls += 1
        if self.is_broken:
            raise InstanceLostError("registry: down", stage="registry")

    async def get(self, prefix):  # type: ignore[no-untyped-def]
        self._check()
        return await super().get(prefix)

    async def put(self, key, value, lease_id=0):  # type: ignore[no-untyped-def]
        self._check()
        return await super().put(key, value, lease_id)

    async def keep_alive(self, lease_id):  # type: ignore[no-untyped-def]
        self._check()
        return await super().keep_alive(lease_id)

    async def grant_lease(self, ttl_ms):  # type: ignore[no-untyped-def]
        self._check()
        self.lease_id = await super().grant_lease(ttl_ms)
        return self.lease_id


class Superseded:
    def __init__(self) -> None:
        self.is_set = False

    def __call__(self) -> None:
        self.is_set = True


def info(epoch: int = 1, state: InstanceState = InstanceState.READY) -> InstanceInfo:
    return replace(make_info("d", Role.DECODE), epoch=epoch, state=state)


async def record(registry: MemoryRegistry) -> InstanceInfo | None:
    entries = await MemoryRegistry.get(registry, KEY)
    if not entries:
        return None
    return info_from_pb(common_pb2.InstanceInfo.FromString(entries[0].value))


def register(
    registry: MemoryRegistry, epoch: int = 1, lease_ms: int = 300
) -> tuple[Registration, Superseded]:
    superseded = Superseded()
    registration = Registration(registry, "c", info(epoch), lease_ms, superseded)
    registration.start()
    return registration, superseded


async def test_epochs_grow_with_every_start() -> None:
    registry = MemoryRegistry()
    assert [await claim_epoch(registry, "c", "d", 1) for _ in range(3)] == [1, 2, 3]
    assert await claim_epoch(registry, "c", "d1", 1) == 1


async def test_concurrent_claims_get_unlike_epochs() -> None:
    registry = MemoryRegistry()
    epochs = await asyncio.gather(*(claim_epoch(registry, "c", "d", 5) for _ in range(8)))
    assert sorted(epochs) == list(range(1, 9))


async def test_no_registry_is_an_error_in_time() -> None:
    registry = BrokenRegistry()
    registry.is_broken = True
    with pytest.raises(InstanceLostError, match="registry: down"):
        await claim_epoch(registry, "c", "d", 0.2)


async def test_the_record_follows_the_state_and_goes_with_the_worker() -> None:
    registry = MemoryRegistry()
    registration, _ = register(registry)
    await poll_until(lambda: registration.is_current)
    registration.update(info(state=InstanceState.DRAINING))
    await poll_until(lambda: registration.is_current)
    found = await record(registry)
    assert found is not None
    assert found.state is InstanceState.DRAINING
    await registration.close()
    assert await record(registry) is None


async def test_role_and_epoch_last_as_long_as_the_process() -> None:
    registry = MemoryRegistry()
    registration, _ = register(registry)
    for other in (info(epoch=2), replace(info(), role=Role.PREFILL)):
        with pytest.raises(InternalError, match="d cannot become"):
            registration.update(other)
    await poll_until(lambda: registration.is_current)
    assert await record(registry) == info()
    await registration.close()


async def test_a_lost_lease_is_taken_again_after_trouble() -> None:
    registry = BrokenRegistry()
    registration, superseded = register(registry, lease_ms=150)
    await poll_until(lambda: registration.is_current)
    registry.is_broken = True
    registration.update(info(state=InstanceState.DRAINING))  # the worker lives on meanwhile
    calls = registry.num_calls
    await poll_until(lambda: registry.num_calls > calls + 3)
    await registry.revoke_lease(registry.lease_id)
    registry.is_broken = False
    await poll_until(lambda: registration.is_current)
    found = await record(registry)
    assert found is not None
    assert found.state is InstanceState.DRAINING
    assert not superseded.is_set
    await registration.close()


async def test_a_leftover_of_an_older_epoch_does_not_come_back() -> None:
    registry = BrokenRegistry()
    epoch = await claim_epoch(registry, "c", "d", 1)
    registration, superseded = register(registry, epoch)
    await poll_until(lambda: registration.is_current)
    assert await claim_epoch(registry, "c", "d", 1) == epoch + 1
    await registry.put(KEY, b"of the new process")
    await registry.revoke_lease(registry.lease_id)
    await poll_until(lambda: superseded.is_set)
    await registration.close()
    assert [entry.value for entry in await registry.get(KEY)] == [b"of the new process"]


async def test_a_registry_that_forgot_everything_is_reminded_of_the_epoch() -> None:
    registry = MemoryRegistry()
    registration, _ = register(registry, epoch=5)
    await poll_until(lambda: registration.is_current)
    assert [entry.value for entry in await registry.get(EPOCH_KEY)] == [b"5"]
    assert await claim_epoch(registry, "c", "d", 1) == 6
    await registration.close()
