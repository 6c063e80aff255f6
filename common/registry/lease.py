"""A lease that its holder keeps, and what it has written under it.

``keep`` and ``write`` are called again and again, a beat apart, and raise while the registry is out
of reach: what was true stays true then, for the lease may outlive that. A lease that has ended, or
that the registry has forgotten, took with it what was written under it.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

from isthmus.common.errors import IsthmusError, StaleEpochError
from isthmus.common.logging import get_logger
from isthmus.common.registry.base import Registry

_NO_LEASE = 0
_GIVE_BACK_S = 1.0

_log = get_logger("registry")


class KeptLease:
    """Belongs to one task, which ends before ``give_back`` is called."""

    def __init__(self, registry: Registry, lease_ms: int) -> None:
        self._registry = registry
        self._lease_ms = lease_ms
        self._lease_id = _NO_LEASE
        self._written: dict[str, bytes] = {}

    def beat_s(self) -> float:
        """How long to wait until the next ``keep``: a third of the lease leaves two more tries;
        jitter keeps a fleet out of step."""
        return self._lease_ms / 3000 * random.uniform(0.8, 1.0)

    def has_written(self, key: str, value: bytes) -> bool:
        """As far as is known, the registry holds it."""
        return self._written.get(key) == value

    async def keep(self) -> bool:
        """False when there is none, or none any more. Raises IsthmusError."""
        if not self._lease_id:
            return False
        if await self._registry.keep_alive(self._lease_id):
            return True
        _log.warning("a lease has ended", keys=sorted(self._written))
        self._forget()
        return False

    async def held(self) -> int:
        """Its id; a new one is granted where there is none. Raises IsthmusError."""
        if not self._lease_id:
            self._lease_id = await self._registry.grant_lease(self._lease_ms)
        return self._lease_id

    async def write(self, key: str, value: bytes) -> None:
        """Unless the registry holds it already. Raises IsthmusError."""
        if self.has_written(key, value):
            return
        try:
            await self._registry.put(key, value, await self.held())
        except StaleEpochError:  # the lease ended between two calls
            self._forget()
            raise
        self._written[key] = value

    async def give_back(self) -> None:
        """Takes back what was written. Waits a second at most: a lease ends by itself as well."""
        lease_id = self._lease_id
        self._forget()
        if lease_id:
            with suppress(IsthmusError, TimeoutError):
                async with asyncio.timeout(_GIVE_BACK_S):
                    await self._registry.revoke_lease(lease_id)

    def _forget(self) -> None:
        self._lease_id = _NO_LEASE
        self._written.clear()
