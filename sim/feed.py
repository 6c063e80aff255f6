"""What instances tell the router, and when: as ``router.feed`` would bring it.

A busy instance reports every interval, an idle one once a second, a changed one at once unless the
interval since its last report is not over. KV events are told when a step ends.

A report is no event here. Nobody sees it before the router decides something or hears of a request
(``tell``), and what it says follows from the instance for as long as that does not change
(``before_change``): so it is made then, for the time at which it was due, and of several that say
the same only the last one. The router is told what it would be told otherwise, at the same times.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from isthmus.common.clock import NS_PER_MS, NS_PER_S
from isthmus.common.ids import InstanceId
from isthmus.common.kv_events import KvEvent, KvEventBatch
from isthmus.router import RouterState
from isthmus.sim.events import EventQueue
from isthmus.sim.listener import AnyInstance

HEARTBEAT_NS = NS_PER_S


class _Stream:
    """One instance epoch's. ``due_ns``: when its next report is, as was planned at
    ``planned_ns``."""

    __slots__ = ("due_ns", "instance", "is_open", "next_seq", "planned_ns", "sent_ns")

    def __init__(self, instance: AnyInstance, now_ns: int) -> None:
        self.instance = instance
        self.is_open = True
        self.next_seq = 0
        self.sent_ns = now_ns - HEARTBEAT_NS
        self.due_ns = self.planned_ns = now_ns


class SimFeed:
    """``on_due`` hears when the next report of all is due earlier than it was."""

    def __init__(self, queue: EventQueue, state: RouterState, interval_ms: float) -> None:
        self.num_reports = 0  # that were due
        self.on_due: Callable[[], None] | None = None
        self._queue = queue
        self._state = state
        self._interval_ns = round(interval_ms * NS_PER_MS)
        self._streams: dict[InstanceId, _Stream] = {}
        # By time, then by when it was planned; a plan that is not its stream's last is passed over.
        self._plans: list[tuple[int, int, _Stream]] = []
        self._num_plans = 0

    def follow(self, instance: AnyInstance) -> None:
        """A new epoch: its record appears in the registry and it reports at once."""
        self._state.registered(instance.spec.info(instance.epoch))
        now_ns = self._queue.now_ns
        stream = _Stream(instance, now_ns)
        self._streams[instance.spec.instance_id] = stream
        self._tell(stream, now_ns)

    def lost(self, instance: AnyInstance, why: str) -> None:
        """The connection breaks, before what is due now has been sent."""
        stream = self._streams.pop(instance.spec.instance_id)
        if stream.due_ns < self._queue.now_ns:
            self._tell(stream, self._queue.now_ns - 1)
        stream.is_open = False
        self._state.stream_broken(instance.spec.instance_id, instance.epoch, why)

    def before_change(self, instance: AnyInstance) -> None:
        self.tell_of(instance.spec.instance_id)

    def changed(self, instance: AnyInstance) -> None:
        stream = self._streams.get(instance.spec.instance_id)
        if stream is None or stream.instance is not instance:
            return
        due_ns = max(stream.sent_ns + self._interval_ns, self._queue.now_ns)
        if due_ns < stream.due_ns:
            self._plan(stream, due_ns, self._queue.now_ns)
            if self.on_due is not None:
                self.on_due()

    def kv_events(self, instance: AnyInstance, events: list[KvEvent]) -> None:
        stream = self._streams.get(instance.spec.instance_id)
        if stream is None or stream.instance is not instance:
            return
        batch = KvEventBatch(
            instance.spec.instance_id, instance.epoch, stream.next_seq, tuple(events)
        )
        stream.next_seq = batch.next_seq
        self._state.kv_events(batch)

    # --- telling -------------------------------------------------------------------------------

    def next_due_ns(self) -> int | None:
        """When the next report of all is due."""
        plans = self._plans
        while plans:
            due_ns, _, stream = plans[0]
            if stream.due_ns == due_ns and stream.is_open:
                return due_ns
            heappop(plans)
        return None

    def tell(self, until_ns: int) -> None:
        """All that is due by then, which is past or now."""
        while (due_ns := self.next_due_ns()) is not None and due_ns <= until_ns:
            self._tell(heappop(self._plans)[2], until_ns)

    def tell_of(self, instance_id: InstanceId) -> None:
        """What is due of one instance. What is only due since just now may yet say what happens
        now."""
        stream, now_ns = self._streams.get(instance_id), self._queue.now_ns
        if stream is not None and stream.due_ns <= now_ns and stream.planned_ns < now_ns:
            self._tell(stream, now_ns)

    def _tell(self, stream: _Stream, until_ns: int) -> None:
        """Of reports that say the same the last one, unless there are prompts that the router may
        give up with each of them (``Ledger.seen``)."""
        instance, state = stream.instance, self._state
        first_ns = stream.due_ns
        gap_ns = self._interval_ns if instance.num_sequences else HEARTBEAT_NS
        repeats = (until_ns - first_ns) // gap_ns
        last_ns = first_ns + repeats * gap_ns
        self.num_reports += 1 + repeats
        stream.sent_ns = last_ns
        self._plan(stream, last_ns + gap_ns, last_ns)
        may_differ = repeats and state.ledger.may_forget(
            instance.spec.instance_id, instance.num_prompts
        )
        for at_ns in range(first_ns if may_differ else last_ns, last_ns + 1, gap_ns):
            state.reported(instance.report(at_ns), at_ns)

    def _plan(self, stream: _Stream, due_ns: int, now_ns: int) -> None:
        self._num_plans += 1
        stream.due_ns, stream.planned_ns = due_ns, now_ns
        heappush(self._plans, (due_ns, self._num_plans, stream))
