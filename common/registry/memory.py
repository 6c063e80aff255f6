"""The registry's data and rules, in one process and on one event loop.

Owns entries, leases and watchers. Nothing expires by being looked at: ``expire_leases`` does it,
driven by ``run_expiry`` (a task of the owner) or by a test that moves a virtual clock. So a
keep-alive that was under way while this process was stopped still counts, and ``run_expiry`` gives
every lease back the time that the process itself lost.

Revisions start at the unix time in milliseconds and lease ids at a random number: a client that
outlives a restart of the registry meets neither an old revision nor somebody else's lease.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from isthmus.common.clock import NS_PER_MS, Clock, SystemClock
from isthmus.common.errors import InstanceLostError, StaleEpochError
from isthmus.common.registry.base import Entry, Listing, WatchEvent

WATCH_QUEUE_EVENTS = 10_000


@dataclass(slots=True)
class _Lease:
    ttl_ns: int
    expires_ns: int  # monotonic
    keys: set[str] = field(default_factory=set)


class _Watcher:
    """One open watch, and the reader's end of it. A None in the queue is the last thing read."""

    def __init__(self, prefix: str, owner: set[_Watcher]) -> None:
        self.prefix = prefix
        self._owner = owner
        self._queue: asyncio.Queue[WatchEvent | None] = asyncio.Queue()
        self._is_ended = False
        owner.add(self)

    def push(self, event: WatchEvent) -> None:
        if self._queue.qsize() >= WATCH_QUEUE_EVENTS:
            self.end()  # a reader that is this far behind lists again
        if not self._is_ended:
            self._queue.put_nowait(event)

    def end(self) -> None:
        if not self._is_ended:
            self._is_ended = True
            self._queue.put_nowait(None)

    def __aiter__(self) -> _Watcher:
        return self

    async def __anext__(self) -> WatchEvent:
        event = await self._queue.get()
        if event is None:
            self._queue.put_nowait(None)
            await self.aclose()
            raise InstanceLostError("the registry ended this watch", stage="registry")
        return event

    async def aclose(self) -> None:
        self._owner.discard(self)
        self.end()


class MemoryRegistry:
    """Implements ``Registry``. Not thread-safe: all calls come from one event loop."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._entries: dict[str, Entry] = {}
        self._lease_by_key: dict[str, int] = {}
        self._leases: dict[int, _Lease] = {}
        self._watchers: set[_Watcher] = set()
        self._revision = self._clock.now_ns() // NS_PER_MS
        self._next_lease = secrets.randbits(61) + 1
        self._is_closed = False

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    async def get(self, prefix: str) -> list[Entry]:
        return self._list(prefix)

    async def put(self, key: str, value: bytes, lease_id: int = 0) -> int:
        """Raises StaleEpochError when the lease has expired: register again under a new one."""
        lease = self._live_lease(key, lease_id)
        self._detach(key)
        self._attach(key, lease_id, lease)
        return self._write(key, value)

    async def compare_and_swap(
        self, key: str, expected_revision: int, value: bytes, lease_id: int = 0
    ) -> bool:
        """Raises StaleEpochError when the lease has expired."""
        lease = self._live_lease(key, lease_id)
        entry = self._entries.get(key)
        if (entry.revision if entry else 0) != expected_revision:
            return False
        if lease is not None:
            self._detach(key)
            self._attach(key, lease_id, lease)
        self._write(key, value)
        return True

    async def delete(self, key: str) -> None:
        self._remove(key)

    async def grant_lease(self, ttl_ms: int) -> int:
        lease_id = self._next_lease
        self._next_lease += 1
        ttl_ns = ttl_ms * NS_PER_MS
        self._leases[lease_id] = _Lease(ttl_ns, self._clock.monotonic_ns() + ttl_ns)
        return lease_id

    async def keep_alive(self, lease_id: int) -> bool:
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        lease.expires_ns = self._clock.monotonic_ns() + lease.ttl_ns
        return True

    async def revoke_lease(self, lease_id: int) -> None:
        lease = self._leases.pop(lease_id, None)
        for key in sorted(lease.keys) if lease else ():
            self._remove(key)

    async def watch(self, prefix: str) -> AsyncGenerator[WatchEvent, None]:
        listing = await self.list_and_watch(prefix)
        try:
            for entry in listing.entries:
                yield WatchEvent(entry.key, entry, entry.revision)
            async for event in listing.changes:
                yield event
        finally:
            await listing.changes.aclose()

    async def list_and_watch(self, prefix: str) -> Listing:
        if self._is_closed:
            raise InstanceLostError("the registry is closed", stage="registry")
        watcher = _Watcher(prefix, self._watchers)
        return Listing(tuple(self._list(prefix)), watcher)

    def expire_leases(self) -> int:
        """Ends every lease whose time is over, with its keys; returns how many."""
        now_ns = self._clock.monotonic_ns()
        due = [lease_id for lease_id, lease in self._leases.items() if lease.expires_ns <= now_ns]
        for lease_id in due:
            for key in sorted(self._leases.pop(lease_id).keys):
                self._remove(key)
        return len(due)

    async def run_expiry(self, period_s: float = 0.1) -> None:
        """Expires leases until cancelled.

        A wake-up that comes far too late means that this process was stopped or starved, and so
        could hear no keep-alive: every lease gets that time back instead of all ending at once.
        """
        last_ns = self._clock.monotonic_ns()
        while True:
            await asyncio.sleep(period_s)
            now_ns = self._clock.monotonic_ns()
            late_ns = now_ns - last_ns - int(period_s * 1e9)
            last_ns = now_ns
            if late_ns > 2 * period_s * 1e9:
                for lease in self._leases.values():
                    lease.expires_ns += late_ns
            self.expire_leases()

    def close(self) -> None:
        """Ends every watch with InstanceLostError; no new one can be opened."""
        self._is_closed = True
        for watcher in self._watchers:
            watcher.end()

    def _list(self, prefix: str) -> list[Entry]:
        return [self._entries[key] for key in sorted(self._entries) if key.startswith(prefix)]

    def _write(self, key: str, value: bytes) -> int:
        self._revision += 1
        entry = Entry(key, value, self._revision)
        self._entries[key] = entry
        self._publish(WatchEvent(key, entry, self._revision))
        return self._revision

    def _remove(self, key: str) -> None:
        self._detach(key)
        if self._entries.pop(key, None) is not None:
            self._revision += 1
            self._publish(WatchEvent(key, None, self._revision))

    def _live_lease(self, key: str, lease_id: int) -> _Lease | None:
        if not lease_id:
            return None
        lease = self._leases.get(lease_id)
        if lease is None:
            raise StaleEpochError(f"lease of {key} has expired", stage="registry")
        return lease

    def _attach(self, key: str, lease_id: int, lease: _Lease | None) -> None:
        if lease is not None:
            lease.keys.add(key)
            self._lease_by_key[key] = lease_id

    def _detach(self, key: str) -> None:
        lease = self._leases.get(self._lease_by_key.pop(key, 0))
        if lease is not None:
            lease.keys.discard(key)

    def _publish(self, event: WatchEvent) -> None:
        for watcher in self._watchers:
            if event.key.startswith(watcher.prefix):
                watcher.push(event)
