"""The router's ticks on virtual time: what ``router.driver`` is to an event loop."""

from __future__ import annotations

from collections.abc import Callable

from isthmus.router import Router
from isthmus.router.verdict import Settled
from isthmus.sim.events import EventQueue
from isthmus.sim.feed import SimFeed


class RouterTicks:
    """``on_settled`` hears of every request whose wait in the router is over. Two ticks are
    ``gap_ns`` apart at least: one serves all that happens in between, as one turn of a gateway's
    event loop does."""

    def __init__(
        self,
        router: Router,
        queue: EventQueue,
        feed: SimFeed,
        gap_ns: int,
        on_settled: Callable[[Settled], None],
    ) -> None:
        self._router = router
        self._queue = queue
        self._feed = feed
        self._gap_ns = gap_ns
        self._on_settled = on_settled
        self._next_ns: int | None = None
        self._last_ns = 0

    def on_progress(self) -> None:
        """Something may be settled now."""
        self._plan(self._last_ns + self._gap_ns)

    def on_held(self) -> None:
        """Somebody began to wait, or still does: until a time comes, or a report."""
        next_ns = self._router.next_tick_ns()
        if next_ns is not None:
            due_ns = self._feed.next_due_ns()
            next_ns = next_ns if due_ns is None else min(next_ns, due_ns)
            self._plan(max(next_ns, self._last_ns + self._gap_ns))

    def _plan(self, when_ns: int) -> None:
        """The earlier of two plans holds."""
        when_ns = max(when_ns, self._queue.now_ns)
        if self._next_ns is None or when_ns < self._next_ns:
            self._next_ns = when_ns
            self._queue.at(when_ns, self._tick, when_ns)

    def _tick(self, planned_ns: int) -> None:
        if planned_ns != self._next_ns:
            return
        self._feed.tell(planned_ns)
        self._next_ns, self._last_ns = None, planned_ns
        for settled in self._router.tick():
            self._on_settled(settled)
        self.on_held()
