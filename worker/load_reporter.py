"""What this instance says about its load: at once when it changes, rarely when it does not.

Under load a watcher gets a report every ``interval``; an idle instance sends one a second, which is
inside the age at which routers begin to doubt a report.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from isthmus.common.clock import Clock
from isthmus.common.cluster import LinkRate, LoadReport
from isthmus.common.types import InstanceRef
from isthmus.engine.core import EngineCore
from isthmus.worker.wakeup import Wakeup, wait_for_event

DEFAULT_INTERVAL_S = 0.1
_MIN_INTERVAL_S = 0.01
_HEARTBEAT_S = 1.0


@dataclass(frozen=True, slots=True)
class OutsideLoad:
    """What the engine does not know of: requests waiting for blocks or for a prefix (of these,
    ``prompt_seqs`` have their prompt computed here), bytes on their way, links."""

    waiting_seqs: int = 0
    waiting_tokens: int = 0
    inflight_transfer_bytes: int = 0
    links: tuple[LinkRate, ...] = ()
    prompt_seqs: int = 0


class LoadReporter:
    """Belongs to the event loop."""

    def __init__(
        self,
        engine: EngineCore,
        me: InstanceRef,
        clock: Clock,
        outside: Callable[[], OutsideLoad],
    ) -> None:
        self._engine = engine
        self._me = me
        self._clock = clock
        self._outside = outside
        self._seq = 0
        self._wakeup = Wakeup()

    def changed(self) -> None:
        self._wakeup.notify()

    def report(self) -> LoadReport:
        load = self._engine.load()
        outside = self._outside()
        self._seq += 1
        return LoadReport(
            instance_id=self._me.instance_id,
            epoch=self._me.epoch,
            seq=self._seq,
            at_ns=self._clock.now_ns(),
            waiting_seqs=load.waiting_seqs + outside.waiting_seqs,
            waiting_tokens=load.waiting_tokens + outside.waiting_tokens,
            oldest_wait_ms=load.oldest_wait_ms,
            running_seqs=load.running_seqs,
            running_context_tokens=load.running_context_tokens,
            num_blocks=load.num_blocks,
            free_blocks=load.free_blocks,
            held_blocks=load.held_blocks,
            cached_blocks=load.cached_blocks,
            inflight_transfer_bytes=outside.inflight_transfer_bytes,
            step_ms=load.step_ms,
            steps=load.steps,
            totals=load.totals,
            links=outside.links,
            prompt_seqs=load.prompt_seqs + outside.prompt_seqs,
        )

    async def follow(self, interval_ms: int) -> AsyncIterator[LoadReport]:
        """Reports for ever: on change, at most one an interval, at least one a second."""
        interval_s = max(_MIN_INTERVAL_S, interval_ms / 1000) if interval_ms else DEFAULT_INTERVAL_S
        with self._wakeup.subscribe() as changed:
            while True:
                changed.clear()
                yield self.report()
                await asyncio.sleep(interval_s)
                await wait_for_event(changed, max(interval_s, _HEARTBEAT_S - interval_s))
