"""Time as a dependency, so that the simulator and the tests run the same policies on virtual time.

``now_ns`` is wall-clock time (unix nanoseconds, comparable between processes of one machine and,
as far as NTP goes, between machines). ``monotonic_ns`` never goes back: use it for durations.
"""

from __future__ import annotations

import time
from typing import Protocol

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


class Clock(Protocol):
    def now_ns(self) -> int: ...

    def monotonic_ns(self) -> int: ...


class SystemClock:
    def now_ns(self) -> int:
        return time.time_ns()

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()


class VirtualClock:
    """Advances only when told to."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        return self._now_ns

    def monotonic_ns(self) -> int:
        return self._now_ns

    def advance_ms(self, milliseconds: float) -> None:
        self._now_ns += int(milliseconds * NS_PER_MS)

    def advance_to(self, now_ns: int) -> None:
        """To an instant that is not before the present one."""
        assert now_ns >= self._now_ns, "time does not go back"
        self._now_ns = now_ns
