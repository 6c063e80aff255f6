"""Who leads, of several that could: one key under a lease, taken by compare-and-swap.

::

    FOLLOWING ── key absent, swap won ──▶ LEADING ── lease gone, or ``resign`` ──▶ FOLLOWING
        ▲───────────── swap lost ─────────────┘

The key's value says where the leader answers. All that could lead show themselves under keys of
their own, under the same lease. Who dies loses the key when its lease ends, within
``lease_ms`` and the registry's own tick; who leaves in order gives the lease back and is followed
at once. While the registry is out of reach nobody can take the key, so a leader goes on: the last
view stays in force, as it does for everything else that the registry tells.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from enum import Enum

from isthmus.common.backoff import Backoff
from isthmus.common.errors import IsthmusError
from isthmus.common.logging import get_logger
from isthmus.common.registry.base import Registry
from isthmus.common.registry.lease import KeptLease
from isthmus.common.registry.resume import resume_watch
from isthmus.common.state_machine import Transitions

LEASE_MS = 1_000
_log = get_logger("election")


class CandidateState(Enum):
    FOLLOWING = "following"
    LEADING = "leading"


CANDIDATE_TRANSITIONS: Transitions[CandidateState] = Transitions(
    {
        CandidateState.FOLLOWING: frozenset({CandidateState.LEADING}),
        CandidateState.LEADING: frozenset({CandidateState.FOLLOWING}),
    }
)


def _ignore(_: bool) -> None:
    pass


class Candidate:
    """One that could lead. ``run`` until cancelled, then ``resign``. ``value`` is this process's
    alone: one that comes back under an old value would take the old leader for itself."""

    def __init__(
        self,
        registry: Registry,
        key: str,
        value: bytes,
        lease_ms: int = LEASE_MS,
        presence_key: str = "",
        on_change: Callable[[bool], None] = _ignore,
    ) -> None:
        self.state = CandidateState.FOLLOWING
        self._registry = registry
        self._key = key
        self._value = value
        self._presence_key = presence_key
        self._on_change = on_change
        self._lease = KeptLease(registry, lease_ms)
        self._holder: bytes | None = None
        self._revision = 0  # of what is known of the key; older news change nothing
        self._news = asyncio.Event()

    @property
    def is_leading(self) -> bool:
        return self.state is CandidateState.LEADING

    async def run(self) -> None:
        # A new watch says nothing of a key that went before it began.
        self._holder, self._revision = None, 0
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(), name="election-watch")
            group.create_task(self._campaign(), name="election-campaign")

    async def resign(self) -> None:
        """Gives the key back, if it can be reached. Call when ``run`` has been cancelled."""
        await self._lease.give_back()
        self._set_leading(False)

    async def _watch(self) -> None:
        watch = resume_watch(self._registry, self._key, backoff=Backoff(cap_s=0.5))
        try:
            async for event in watch:
                is_news = event.revision == 0 or event.revision > self._revision
                if event.key == self._key and is_news:
                    self._revision = event.revision
                    self._holder = event.entry.value if event.entry is not None else None
                    self._news.set()
        finally:
            await watch.aclose()

    async def _campaign(self) -> None:
        """Keeps the lease alive and takes the key whenever it is free."""
        while True:
            with suppress(IsthmusError):  # out of reach: what was true stays true
                await self._keep_or_renew()
                if self._holder is None:
                    await self._take()
                self._set_leading(self._holder == self._value)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._lease.beat_s()):
                    await self._news.wait()
            self._news.clear()

    async def _keep_or_renew(self) -> None:
        if not await self._lease.keep():
            if self._holder == self._value:  # it went with the lease
                self._holder = None
            self._set_leading(False)
        if self._presence_key:
            await self._lease.write(self._presence_key, self._value)

    async def _take(self) -> None:
        """The swap is the judge, whatever the watch has told so far."""
        lease_id = await self._lease.held()
        if await self._registry.compare_and_swap(self._key, 0, self._value, lease_id):
            self._holder = self._value
            self._set_leading(True)
            for entry in await self._registry.get(self._key):
                self._revision = max(self._revision, entry.revision)

    def _set_leading(self, is_leading: bool) -> None:
        new = CandidateState.LEADING if is_leading else CandidateState.FOLLOWING
        if new is self.state:
            return
        self.state = CANDIDATE_TRANSITIONS.check(self.state, new)
        _log.info("leads" if is_leading else "does not lead", key=self._key)
        self._on_change(is_leading)
