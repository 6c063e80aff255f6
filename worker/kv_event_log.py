"""The numbered record of what the prefix cache gained and lost, for routers to follow.

::

    seq     1 … first_kept−1 │ first_kept … next_seq−1 │ next_seq …
            forgotten        │ the ring: replayed      │ not happened yet

A reader asks for ``from_seq``. Inside the ring it gets the events from there; before it (0 means
"I know nothing"), or after ``next_seq`` (a number of another epoch), it gets a snapshot. Replaying
an event that a snapshot already contains changes nothing, so the engine may go on meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator

from isthmus.common.ids import InstanceId
from isthmus.common.kv_events import BlocksStored, CacheCleared, KvEvent, KvEventBatch
from isthmus.engine.core import EngineCore
from isthmus.worker.wakeup import Wakeup, wait_for_event

_MAX_HASHES = (
    65_536  # 1 MiB of hashes: a reader that is further behind is better off with a snapshot
)
_HEARTBEAT_S = 60.0


class KvEventLog:
    """Bounded by the number of hashes it keeps. Belongs to the event loop."""

    def __init__(
        self,
        engine: EngineCore,
        instance_id: InstanceId,
        epoch: int,
        max_hashes: int = _MAX_HASHES,
    ) -> None:
        self._engine = engine
        self._instance_id = instance_id
        self._epoch = epoch
        self._max_hashes = max_hashes
        self._ring: deque[KvEvent] = deque()
        self._ring_hashes = 0
        self._next_seq = 1
        self._wakeup = Wakeup()

    @property
    def next_seq(self) -> int:
        return self._next_seq

    def collect(self) -> None:
        """Takes what the engine has to report, after each step and each change of the cache."""
        events = self._engine.take_kv_events()
        if not events:
            return
        for event in events:
            self._ring.append(event)
            self._ring_hashes += _num_hashes(event)
        self._next_seq += len(events)
        while self._ring and self._ring_hashes > self._max_hashes:
            self._ring_hashes -= _num_hashes(self._ring.popleft())
        self._wakeup.notify()

    def since(self, from_seq: int) -> KvEventBatch:
        """Events from ``from_seq`` on (maybe none), or a snapshot when they are not all here."""
        self.collect()
        first_kept = self._next_seq - len(self._ring)
        if from_seq < first_kept or from_seq > self._next_seq:
            return self._snapshot()
        events = tuple(self._ring)[from_seq - first_kept :]
        return KvEventBatch(self._instance_id, self._epoch, from_seq, events)

    def _snapshot(self) -> KvEventBatch:
        stored = BlocksStored(tuple(self._engine.cached_hashes()))
        return KvEventBatch(
            self._instance_id, self._epoch, self._next_seq - 1, (stored,), is_snapshot=True
        )

    async def follow(self, epoch: int, from_seq: int) -> AsyncIterator[KvEventBatch]:
        """Batches for ever. A reader of another epoch starts with a snapshot."""
        next_seq = from_seq if epoch == self._epoch else 0
        with self._wakeup.subscribe() as changed:
            while True:
                batch = self.since(next_seq)
                if batch.events:
                    yield batch
                    next_seq = batch.next_seq
                await wait_for_event(changed, _HEARTBEAT_S)


def _num_hashes(event: KvEvent) -> int:
    return 1 if isinstance(event, CacheCleared) else max(1, len(event.hashes))
