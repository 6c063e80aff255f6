"""A breaker per instance epoch: failures in a row take it out of the choice for a while.

::

    CLOSED ──failures in a row──▶ OPEN ──open_ms──▶ HALF_OPEN ──probe succeeds──▶ CLOSED
                                    ▲───────────────────┘ probe fails

While HALF_OPEN one request at a time may probe. A probe that ends without saying anything about
the instance (client gone, reservation expired) gives its place back, so a breaker cannot stay open
because of clients. Times are monotonic nanoseconds.
"""

from __future__ import annotations

from enum import Enum

from isthmus.common.clock import NS_PER_MS
from isthmus.common.ids import DecisionId
from isthmus.common.state_machine import Transitions


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


BREAKER_TRANSITIONS: Transitions[BreakerState] = Transitions(
    {
        BreakerState.CLOSED: frozenset({BreakerState.OPEN}),
        BreakerState.OPEN: frozenset({BreakerState.HALF_OPEN, BreakerState.CLOSED}),
        BreakerState.HALF_OPEN: frozenset({BreakerState.CLOSED, BreakerState.OPEN}),
    }
)


class Breaker:
    def __init__(self, max_failures: int, open_ms: int) -> None:
        self._max_failures = max_failures
        self._open_ns = open_ms * NS_PER_MS
        self._state = BreakerState.CLOSED
        self.is_closed = True  # read for every instance and decision, so a plain attribute
        self._failures = 0
        self._reopens_ns = 0
        self._probe: DecisionId | None = None

    def state(self, now_ns: int) -> BreakerState:
        if self._state is BreakerState.OPEN and now_ns >= self._reopens_ns:
            self._move(BreakerState.HALF_OPEN)
            self._probe = None
        return self._state

    def allows(self, now_ns: int) -> bool:
        state = self.state(now_ns)
        if state is BreakerState.HALF_OPEN:
            return self._probe is None
        return state is BreakerState.CLOSED

    def wait_ms(self, now_ns: int) -> int:
        """Time until the next probe is allowed by the clock."""
        if self.state(now_ns) is not BreakerState.OPEN:
            return 0
        return -(-(self._reopens_ns - now_ns) // NS_PER_MS)

    def dispatched(self, decision_id: DecisionId, now_ns: int) -> None:
        if self.state(now_ns) is BreakerState.HALF_OPEN:
            self._probe = decision_id

    def succeeded(self, now_ns: int) -> None:
        self._failures = 0
        if self.state(now_ns) is not BreakerState.CLOSED:
            self._move(BreakerState.CLOSED)
            self._probe = None

    def failed(self, now_ns: int) -> None:
        self._failures += 1
        state = self.state(now_ns)
        is_over = state is BreakerState.CLOSED and self._failures >= self._max_failures
        if is_over or state is BreakerState.HALF_OPEN:
            self._move(BreakerState.OPEN)
            self._reopens_ns = now_ns + self._open_ns
            self._probe = None

    def released(self, decision_id: DecisionId) -> None:
        """The request ended and proved nothing."""
        if self._probe == decision_id:
            self._probe = None

    def _move(self, new: BreakerState) -> None:
        self._state = BREAKER_TRANSITIONS.check(self._state, new)
        self.is_closed = new is BreakerState.CLOSED
