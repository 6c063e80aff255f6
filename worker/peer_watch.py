"""Forgets peers that have left the registry for good.

A peer that dies and comes back under another id is never met again, but its KV store stays mapped
here, with its connector's descriptors and its channel. So an id that the registry has not listed
for the grace period is forgotten by every holder that has nothing open with it: a peer may be cut
off from the registry and well. While the registry is out of reach nobody is missed. Being forgotten
wrongly costs one more handshake.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from isthmus.common.clock import NS_PER_MS, Clock
from isthmus.common.errors import IsthmusError
from isthmus.common.ids import InstanceId
from isthmus.common.logging import get_logger
from isthmus.common.registry import Registry, instances_prefix
from isthmus.common.tasks import end_task, tell_if_broken

_LOOKS_IN_GRACE = 4

log = get_logger("peer_watch")


class PeerHolder(Protocol):
    """Whatever keeps something for each peer."""

    def idle_peers(self) -> set[InstanceId]:
        """Peers of which something is kept, and with whom nothing is open."""
        ...

    async def forget(self, instance_id: InstanceId) -> None:
        """Lets go of it. Unknown ids are no error."""
        ...


class PeerWatch:
    """Belongs to the event loop."""

    def __init__(
        self,
        registry: Registry,
        cluster: str,
        clock: Clock,
        grace_ms: int,
        holders: Sequence[PeerHolder],
    ) -> None:
        self._registry = registry
        self._prefix = instances_prefix(cluster)
        self._clock = clock
        self._grace_ms = grace_ms
        self._holders = holders
        self._missed_since_ns: dict[InstanceId, int] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="peer-watch")
        self._task.add_done_callback(tell_if_broken(log, "nobody looks after peers any more"))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._grace_ms / 1000 / _LOOKS_IN_GRACE)
            with suppress(IsthmusError):  # out of reach; the registration says so
                await self.look()

    async def look(self) -> None:
        """Compares once. Raises what the registry raises; nobody counts as missed then."""
        entries = await self._registry.get(self._prefix)
        present = {InstanceId(entry.key.removeprefix(self._prefix)) for entry in entries}
        now_ns = self._clock.monotonic_ns()
        idle = set().union(*(holder.idle_peers() for holder in self._holders)) - present
        since = self._missed_since_ns = {
            peer: self._missed_since_ns.get(peer, now_ns) for peer in idle
        }
        for peer in [p for p in idle if now_ns - since[p] >= self._grace_ms * NS_PER_MS]:
            del since[peer]
            log.info("peer forgotten, it has left the registry", peer=peer)
            for holder in self._holders:
                # What it has open with the peer it keeps, until that has ended.
                if peer in holder.idle_peers():
                    await holder.forget(peer)

    async def close(self) -> None:
        await end_task(self._task)
