"""The machine's time, which a test may set forward: deadlines pass without anybody waiting.

Only what asks the clock sees the jump. Timers of an event loop go on in the machine's own time.
"""

from __future__ import annotations

from isthmus.common.clock import NS_PER_MS, SystemClock


class MovableClock(SystemClock):
    def __init__(self) -> None:
        self._ahead_ns = 0

    def now_ns(self) -> int:
        return super().now_ns() + self._ahead_ns

    def monotonic_ns(self) -> int:
        return super().monotonic_ns() + self._ahead_ns

    def advance_ms(self, milliseconds: int) -> None:
        self._ahead_ns += milliseconds * NS_PER_MS
