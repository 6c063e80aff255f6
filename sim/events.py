"""The heart of the simulator: what happens next, on virtual time.

Events at the same instant happen in the order in which they were planned, so a run is a function of
its inputs alone. An event is never taken back: whoever plans one that may be overtaken numbers its
plans and ignores those that are not the last (see ``Instance``).
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from isthmus.common.clock import VirtualClock

NO_LIMIT = 2**62


class EventQueue:
    """Owns the order of events and the clock: nobody else advances it."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.now_ns = clock.monotonic_ns()
        self.num_done = 0
        self._heap: list[tuple[int, int, Callable[[Any], None], Any]] = []
        self._order = 0
        self._is_stopped = False

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, when_ns: int, action: Callable[[Any], None], argument: Any = None) -> None:
        """``action(argument)`` at ``when_ns``; what is already past happens now."""
        self._order += 1
        when_ns = max(when_ns, self.now_ns)
        heappush(self._heap, (when_ns, self._order, action, argument))

    def after(self, wait_ns: int, action: Callable[[Any], None], argument: Any = None) -> None:
        self.at(self.now_ns + wait_ns, action, argument)

    def stop(self) -> None:
        """Ends the run in progress after the present event; what is planned stays so."""
        self._is_stopped = True

    def run(self, until_ns: int | None = None, max_events: int | None = None) -> int:
        """Runs events up to and including ``until_ns``; returns how many.

        None = until there are none left. ``max_events`` lets a caller show progress in between.
        """
        heap, advance = self._heap, self.clock.advance_to
        done = 0
        limit = NO_LIMIT if max_events is None else max_events
        self._is_stopped = False
        while heap and done < limit and not self._is_stopped:
            if until_ns is not None and heap[0][0] > until_ns:
                break
            when_ns, _, action, argument = heappop(heap)
            self.now_ns = when_ns
            advance(when_ns)
            action(argument)
            done += 1
        self.num_done += done
        return done
