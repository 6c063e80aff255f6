"""This instance's record in the registry: an epoch at the start, then a key under a lease.

The registry is never on the data path. While it cannot be reached the worker serves on and keeps
trying, with jitter; when the lease has run out meanwhile the record is written again, unless a
newer epoch of this instance exists: then this process is a leftover and must not come back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from isthmus.common.backoff import Backoff
from isthmus.common.cluster import InstanceInfo
from isthmus.common.errors import InstanceLostError, InternalError, IsthmusError
from isthmus.common.logging import RateLimitedLog, get_logger
from isthmus.common.registry import Entry, KeptLease, Registry, epoch_key, instance_key
from isthmus.common.tasks import end_task, tell_if_broken
from isthmus.protos.convert.instances import info_to_pb
from isthmus.worker.wakeup import wait_for_event

log = get_logger("registration")


async def claim_epoch(registry: Registry, cluster: str, instance_id: str, timeout_s: float) -> int:
    """One more than any epoch this instance had. Raises InstanceLostError without a registry."""
    key = epoch_key(cluster, instance_id)
    backoff = Backoff()
    problem: IsthmusError | None = None
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    entry = await _entry(registry, key)
                    epoch = (int(entry.value) if entry else 0) + 1
                    revision = entry.revision if entry else 0
                    if await registry.compare_and_swap(key, revision, str(epoch).encode()):
                        return epoch
                except IsthmusError as error:
                    problem = error
                await asyncio.sleep(backoff.next_s())
    reason = problem.message if problem else "its epoch key keeps changing"
    raise InstanceLostError(f"no epoch from the registry: {reason}", stage="start")


async def _entry(registry: Registry, key: str) -> Entry | None:
    return next((entry for entry in await registry.get(key) if entry.key == key), None)


class Registration:
    """Keeps the record true until closed. ``on_superseded`` is called when a newer epoch exists."""

    def __init__(
        self,
        registry: Registry,
        cluster: str,
        info: InstanceInfo,
        lease_ms: int,
        on_superseded: Callable[[], None],
    ) -> None:
        self._registry = registry
        self._cluster = cluster
        self._key = instance_key(cluster, info.instance_id)
        self._wanted = info
        self._record = _record_of(info)
        self._lease_ms = lease_ms
        self._lease = KeptLease(registry, lease_ms)
        self._on_superseded = on_superseded
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._warnings = RateLimitedLog(log)

    @property
    def info(self) -> InstanceInfo:
        return self._wanted

    @property
    def is_current(self) -> bool:
        """True while the registry is known to hold what was last asked for."""
        return self._lease.has_written(self._key, self._record)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="registration")
        self._task.add_done_callback(tell_if_broken(log, "the registration broke"))

    def update(self, info: InstanceInfo) -> None:
        """Publishes a new record as soon as the registry can be reached. Raises InternalError for
        another role or epoch: both last for as long as the process does, and whoever follows the
        registry relies on it."""
        if (info.role, info.epoch) != (self._wanted.role, self._wanted.epoch):
            text = f"{info.instance_id} cannot become {info.role.value} of epoch {info.epoch}"
            raise InternalError(text, stage="registration")
        self._wanted, self._record = info, _record_of(info)
        self._changed.set()

    async def _run(self) -> None:
        backoff = Backoff(cap_s=self._lease_ms / 3000)
        while True:
            try:
                await self._sync()
                backoff.reset()
                wait_s = self._lease.beat_s()
            except IsthmusError as error:
                self._warnings.warning("sync", "registry out of reach", problem=error.message)
                wait_s = backoff.next_s()
            await wait_for_event(self._changed, wait_s)

    async def _sync(self) -> None:
        if not await self._lease.keep() and not await self._is_newest():
            self._on_superseded()
            return
        await self._lease.write(self._key, self._record)

    async def _is_newest(self) -> bool:
        """False when a newer epoch was given out. A registry that forgot ours is reminded."""
        key = epoch_key(self._cluster, self._wanted.instance_id)
        entry = await _entry(self._registry, key)
        if entry is not None and int(entry.value) > self._wanted.epoch:
            return False
        if entry is None or int(entry.value) < self._wanted.epoch:
            revision = entry.revision if entry else 0
            value = str(self._wanted.epoch).encode()
            if not await self._registry.compare_and_swap(key, revision, value):
                raise InstanceLostError("the epoch key changed meanwhile", stage="registration")
        return True

    async def close(self) -> None:
        """Removes the record, as far as the registry can be reached."""
        await end_task(self._task)
        await self._lease.give_back()


def _record_of(info: InstanceInfo) -> bytes:
    return info_to_pb(info).SerializeToString()
