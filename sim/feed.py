"""What instances tell the router, and when: as ``router.feed`` would bring it.

A busy instance reports every interval, an idle one once a second, a changed one at once unless the
interval since its last report is not over. KV events are told when a step ends.
"""

from __future__ import annotations

from isthmus.common.clock import NS_PER_MS, NS_PER_S
from isthmus.common.ids import InstanceId
from isthmus.common.kv_events import KvEvent, KvEventBatch
from isthmus.router import RouterState
from isthmus.sim.events import EventQueue
from isthmus.sim.listener import AnyInstance

HEARTBEAT_NS = NS_PER_S


class _Stream:
    """One instance epoch's."""

    __slots__ = ("due_ns", "instance", "is_open", "next_seq", "sent_ns")

    def __init__(self, instance: AnyInstance) -> None:
        self.instance = instance
        self.is_open = True
        self.next_seq = 0
        self.sent_ns = -HEARTBEAT_NS
        self.due_ns = -1


class SimFeed:
    """An idle cluster sends heartbeats for ever: whoever runs it must know when to stop."""

    def __init__(self, queue: EventQueue, state: RouterState, interval_ms: float) -> None:
        self.num_reports = 0
        self._queue = queue
        self._state = state
        self._interval_ns = round(interval_ms * NS_PER_MS)
        self._streams: dict[InstanceId, _Stream] = {}

    def follow(self, instance: AnyInstance) -> None:
        """A new epoch: its record appears in the registry and it reports at once."""
        self._state.registered(instance.spec.info(instance.epoch))
        stream = _Stream(instance)
        self._streams[instance.spec.instance_id] = stream
        self._report(stream)

    def lost(self, instance: AnyInstance, why: str) -> None:
        """The connection broke."""
        self._streams.pop(instance.spec.instance_id).is_open = False
        self._state.stream_broken(instance.spec.instance_id, instance.epoch, why)

    def changed(self, instance: AnyInstance) -> None:
        stream = self._streams.get(instance.spec.instance_id)
        if stream is not None and stream.instance is instance:
            self._schedule(stream, stream.sent_ns + self._interval_ns)

    def kv_events(self, instance: AnyInstance, events: list[KvEvent]) -> None:
        stream = self._streams.get(instance.spec.instance_id)
        if stream is None or stream.instance is not instance:
            return
        batch = KvEventBatch(
            instance.spec.instance_id, instance.epoch, stream.next_seq, tuple(events)
        )
        stream.next_seq = batch.next_seq
        self._state.kv_events(batch)

    def _schedule(self, stream: _Stream, due_ns: int) -> None:
        """The earlier of two plans holds."""
        due_ns = max(due_ns, self._queue.now_ns)
        if 0 <= stream.due_ns <= due_ns:
            return
        stream.due_ns = due_ns
        self._queue.at(due_ns, self._due, (stream, due_ns))

    def _due(self, planned: tuple[_Stream, int]) -> None:
        stream, due_ns = planned
        if stream.is_open and stream.due_ns == due_ns:
            self._report(stream)

    def _report(self, stream: _Stream) -> None:
        instance = stream.instance
        report = instance.report()
        self._state.reported(report)
        self.num_reports += 1
        now_ns = stream.sent_ns = self._queue.now_ns
        is_busy = report.running_seqs or report.waiting_seqs or instance.num_sequences
        stream.due_ns = due_ns = now_ns + (self._interval_ns if is_busy else HEARTBEAT_NS)
        self._queue.at(due_ns, self._due, (stream, due_ns))
