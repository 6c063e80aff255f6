"""All that the router knows, and how news changes it. The feed writes here, the router reads.

Owns the cluster view, the prefix index and the ledger, and keeps them in step: whatever ends an
instance epoch ends what the other two hold of it. One thread (the event loop).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from isthmus.common import metrics
from isthmus.common.clock import Clock
from isthmus.common.cluster import InstanceInfo, InstanceState, LoadReport, Role
from isthmus.common.config import RouterConfig
from isthmus.common.ids import InstanceId
from isthmus.common.kv_events import KvEventBatch
from isthmus.common.logging import get_logger
from isthmus.router.cluster_view import ClusterView, InstanceView
from isthmus.router.kv_index import ApplyResult, KvIndex
from isthmus.router.ledger import Ledger
from isthmus.router.links import Links

log = get_logger("router")
Kind = tuple[Role, InstanceState]


class RouterState:
    def __init__(self, config: RouterConfig, clock: Clock) -> None:
        self._clock = clock
        self.cluster = ClusterView(config.breaker_failures, config.breaker_open_ms)
        self.index = KvIndex(config.index_max_blocks)
        self.dirty: set[InstanceId] = set()  # views or pending loads that have changed
        self.membership_changed = True  # somebody came or went; whoever reads it clears it
        self.ledger = Ledger(config.reservation_ttl_ms, self.dirty)
        self.links = Links()
        self._counted: dict[InstanceId, Kind] = {}
        self._counts = dict.fromkeys(product(Role, InstanceState), 0)
        self._gauges = {
            (role, state): metrics.INSTANCES.labels(role=role.value, state=state.value)
            for role, state in self._counts
        }
        self.on_change: Callable[[], None] | None = None
        """Called whenever an instance came, changed, was doubted or went."""
        self.on_news: Callable[[], None] | None = None
        """Called also whenever an instance has reported: for the router alone."""

    def registry_connected(self, is_connected: bool) -> None:
        """Without a registry the last view stays in force."""
        if self.cluster.is_registry_connected != is_connected:
            self.cluster.is_registry_connected = is_connected
            if is_connected:
                log.info("registry connected")
            else:
                log.warning("registry out of reach, keeping the last view")

    def registered(self, info: InstanceInfo) -> bool:
        """A record appeared or changed; True when it begins a new instance epoch."""
        is_new = self.cluster.upsert(info)
        self.dirty.add(info.instance_id)
        if is_new:
            self.membership_changed = True
            self.index.reset(info.instance_id, info.epoch)
            self.ledger.forget(info.instance_id)
            self.links.forget(info.instance_id)
            log.info("instance joined", instance=info.instance_id, epoch=info.epoch)
        view = self.cluster.views[info.instance_id]
        if view.problem:
            log.warning("instance has no partner", instance=info.instance_id, why=view.problem)
        self._changed(info.instance_id)
        return is_new

    def deregistered(self, instance_id: InstanceId) -> None:
        """The record or its lease is gone. The instance itself may still answer."""
        view = self.cluster.get(instance_id)
        if view is not None:
            view.is_registered = False
            self._remove_if_lost(view, "left")

    def stream_broken(self, instance_id: InstanceId, epoch: int, why: str) -> bool:
        """The load stream broke; True when the instance is LOST and need not be followed."""
        view = self.cluster.at_epoch(instance_id, epoch)
        if view is None:
            return True
        # A process that loads its model answers late: no fault, but not chosen before it is heard.
        if not view.is_suspect and view.info.state is not InstanceState.STARTING:
            log.warning("instance suspect", instance=instance_id, epoch=epoch, why=why)
        view.is_suspect = True
        self.dirty.add(instance_id)
        return self._remove_if_lost(view, why)

    def reported(self, report: LoadReport, came_ns: int | None = None) -> None:
        """``came_ns``: when it came, where that is not now."""
        view = self.cluster.at_epoch(report.instance_id, report.epoch)
        was_suspect = view is not None and view.is_suspect
        was_heard = view is not None and view.load is not None
        now_ns = self._clock.monotonic_ns() if came_ns is None else came_ns
        if self.cluster.take_report(report, now_ns) is None:
            return
        if report.links:
            self._learn_links(report)
        num_seqs = report.waiting_seqs + report.running_seqs
        self.ledger.seen(report.instance_id, num_seqs, now_ns, report.prompt_seqs)
        if was_suspect:
            if was_heard:
                log.info("instance answers again", instance=report.instance_id, epoch=report.epoch)
            self._changed(report.instance_id)
        elif self.on_news is not None:
            self.on_news()

    def _learn_links(self, report: LoadReport) -> None:
        source = self.cluster.get(report.instance_id)
        for link in report.links:
            target = self.cluster.get(link.target_id)
            if source is not None and target is not None:
                self.links.reported(source.info, target.info, link.bytes_per_s / 1000)

    def kv_events(self, batch: KvEventBatch) -> ApplyResult:
        """Events of instances (or epochs) that are not in the view are stale by definition."""
        if self.cluster.at_epoch(batch.instance_id, batch.epoch) is None:
            return ApplyResult.STALE
        result = self.index.apply(batch)
        metrics.INDEX_BLOCKS.set(len(self.index))
        return result

    def _changed(self, instance_id: InstanceId) -> None:
        """An instance came, changed, was doubted or went: sets the gauges of instances by role and
        state, and passes it on."""
        view = self.cluster.get(instance_id)
        now = _kind(view) if view is not None else None
        before = self._counted.pop(instance_id, None)
        if now is not None:
            self._counted[instance_id] = now
        for kind, change in ((before, -1), (now, 1)):
            if kind is not None:
                self._counts[kind] += change
        for kind, gauge in self._gauges.items():
            gauge.set(self._counts[kind])
        if self.on_change is not None:
            self.on_change()
        if self.on_news is not None:
            self.on_news()

    def _remove_if_lost(self, view: InstanceView, why: str) -> bool:
        if view.is_registered or not view.is_suspect:
            self._changed(view.instance_id)
            return False
        log.warning("instance lost", instance=view.instance_id, epoch=view.info.epoch, why=why)
        self.cluster.remove(view.instance_id, why, self._clock.monotonic_ns())
        self.membership_changed = True
        self.index.forget(view.instance_id)
        self.ledger.forget(view.instance_id)
        self.links.forget(view.instance_id)
        self.dirty.intersection_update(self.cluster.views)  # which not every policy reads
        self._changed(view.instance_id)
        return True


def _kind(view: InstanceView) -> Kind:
    is_starting = view.info.state is InstanceState.STARTING
    is_lost = view.is_suspect and not is_starting
    return view.info.role, InstanceState.LOST if is_lost else view.info.state
