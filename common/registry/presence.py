"""A process shows itself: one key, for as long as the process lives and no longer."""

from __future__ import annotations

import asyncio

from isthmus.common.errors import IsthmusError
from isthmus.common.logging import get_logger
from isthmus.common.registry.base import Registry
from isthmus.common.registry.lease import KeptLease

LEASE_MS = 3_000
_log = get_logger("presence")


class Presence:
    """``value`` under ``key``, under a lease that is kept alive; a lease that has ended, or a
    registry that has forgotten it, is replaced. ``start``, then ``close``, which takes it back."""

    def __init__(
        self, registry: Registry, key: str, value: bytes, lease_ms: int = LEASE_MS
    ) -> None:
        self._key = key
        self._value = value
        self._lease = KeptLease(registry, lease_ms)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="presence")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._lease.give_back()

    async def _run(self) -> None:
        while True:
            try:
                await self._lease.keep()
                await self._lease.write(self._key, self._value)
            except IsthmusError:
                pass  # out of reach: the lease may outlive that
            except Exception:  # noqa: BLE001  # a process must not vanish from view for one bug
                _log.exception("could not be shown", key=self._key)
            await asyncio.sleep(self._lease.beat_s())
