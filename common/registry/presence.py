"""A process shows itself: one key, for as long as the process lives and no longer."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from isthmus.common.errors import IsthmusError
from isthmus.common.logging import get_logger
from isthmus.common.registry.base import Registry

LEASE_MS = 3_000
_NO_LEASE = 0
_log = get_logger("presence")


class Presence:
    """``value`` under ``key``, under a lease that is kept alive; a lease that has ended, or a
    registry that has forgotten it, is replaced. ``start``, then ``close``, which takes it back."""

    def __init__(
        self, registry: Registry, key: str, value: bytes, lease_ms: int = LEASE_MS
    ) -> None:
        self._registry = registry
        self._key = key
        self._value = value
        self._lease_ms = lease_ms
        self._lease_id = _NO_LEASE
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="presence")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        lease_id, self._lease_id = self._lease_id, _NO_LEASE
        if lease_id:
            with suppress(IsthmusError):
                await self._registry.revoke_lease(lease_id)

    async def _run(self) -> None:
        while True:
            try:
                await self._show()
            except IsthmusError:
                pass  # out of reach: the lease may outlive that
            except Exception:  # noqa: BLE001  # a process must not vanish from view for one bug
                _log.exception("could not be shown", key=self._key)
            await asyncio.sleep(self._lease_ms / 3000)

    async def _show(self) -> None:
        if self._lease_id and await self._registry.keep_alive(self._lease_id):
            return
        lease_id = await self._registry.grant_lease(self._lease_ms)
        await self._registry.put(self._key, self._value, lease_id)
        self._lease_id = lease_id
