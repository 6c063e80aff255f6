"""How fast one link is, learnt from the writes that have ended on it. No I/O: time comes in.

::

    delivered bytes   ─────┬────────────────────┬─────▶
                      write posted         write ended
                           └─ one sample: bytes delivered in between / time in between

This is BBR's delivery-rate sample (Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM
Queue 14(5), 2016): what other writes delivered meanwhile counts too, so writes side by side do not
make a link look slow. Samples go into a moving average. A small one is more latency than transfer:
it proves that the link is at least that fast, and nothing else.

While bytes are in flight and none of them ends, the link cannot be faster than those bytes over
that time, whatever was measured before. An estimate judges for a while only: if it were believed
for ever, a link found slow once would carry nothing that could prove the contrary.
"""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.common.clock import NS_PER_MS, NS_PER_S

# What is in flight lands within this time, so no more can land after a deadline. It is a tenth of
# the default transfer.quarantine_ms: a link may become ten times slower in the middle of a write.
LANDING_NS = 500 * NS_PER_MS
INITIAL_WINDOW_BYTES = 4 * 2**20  # nothing measured yet
LEAST_WINDOW_BYTES = 2**20
MOST_WINDOW_BYTES = 64 * 2**20
# Writes of a quarter window keep a link busy while one of them is seen to have ended.
WRITES_IN_WINDOW = 4

LEAST_SAMPLE_BYTES = 256 * 2**10
_SAMPLE_WEIGHT = 0.25
_JUDGES_NS = 10 * NS_PER_S
# The end of a write is seen up to one pause of the driver late, and pauses double.
_DOUBT = 2.0
# No gap between two looks counts for more: while this process was stopped, nothing could be seen.
_MAX_STALL_STEP_NS = 100 * NS_PER_MS


@dataclass(frozen=True, slots=True)
class Departure:
    """When a write was posted, in time and in bytes delivered."""

    at_ns: int
    num_delivered: int


def window_bytes(bytes_per_ns: float) -> int:
    """Most bytes in flight on a link that was measured to be so fast."""
    return min(max(int(bytes_per_ns * LANDING_NS), LEAST_WINDOW_BYTES), MOST_WINDOW_BYTES)


@dataclass(frozen=True, slots=True)
class ToldEstimate:
    """Another process's estimate, as it last told; ``told_ns``: when that came."""

    bytes_per_s: float
    told_ns: int

    @property
    def max_write_bytes(self) -> int:
        return window_bytes(self.bytes_per_s / NS_PER_S) // WRITES_IN_WINDOW

    def is_too_slow(self, num_bytes: int, now_ns: int, deadline_ns: int) -> bool:
        """As ``LinkEstimate.is_too_slow``."""
        if now_ns - self.told_ns > _JUDGES_NS:
            return False
        return _is_surely_late(num_bytes, self.bytes_per_s / NS_PER_S, deadline_ns - now_ns)


def _is_surely_late(num_bytes: int, bytes_per_ns: float, left_ns: int) -> bool:
    return num_bytes > _DOUBT * bytes_per_ns * max(0, left_ns)


class LinkEstimate:
    """Written by the connector's thread; ``bytes_per_s`` may be read by others. Times are
    monotonic."""

    def __init__(self) -> None:
        self._num_delivered = 0
        self._bytes_per_ns = 0.0
        self._is_measured = False  # else it is a lower bound only
        self._sampled_ns = 0
        self._looked_ns = 0
        self._delivered_when_looked = 0
        self._stalled_ns = 0
        self._num_open_bytes = 0

    @property
    def bytes_per_s(self) -> float | None:
        """None until a write has ended that was large enough to tell."""
        return self._bytes_per_ns * NS_PER_S if self._is_measured else None

    @property
    def window_bytes(self) -> int:
        """Most bytes in flight."""
        if not self._is_measured:
            return INITIAL_WINDOW_BYTES
        return window_bytes(self._rate())

    @property
    def max_write_bytes(self) -> int:
        """How large a write should be at most: a window is several."""
        return self.window_bytes // WRITES_IN_WINDOW

    def departs(self, now_ns: int) -> Departure:
        """A write is about to be posted."""
        return Departure(now_ns, self._num_delivered)

    def arrived(self, departure: Departure, num_bytes: int, now_ns: int) -> None:
        """All of that write's bytes are in the peer's memory."""
        self._num_delivered += num_bytes
        num_sampled = self._num_delivered - departure.num_delivered
        elapsed_ns = now_ns - departure.at_ns
        if elapsed_ns > 0:
            self._learn(num_sampled, num_sampled / elapsed_ns)
            self._sampled_ns = now_ns

    def looked(self, num_open_bytes: int, now_ns: int) -> None:
        """The driver has polled what is in flight: so many bytes that somebody still wants."""
        has_moved = self._num_delivered != self._delivered_when_looked
        if has_moved or not num_open_bytes or not self._num_open_bytes:
            self._stalled_ns = 0
        else:
            self._stalled_ns += min(now_ns - self._looked_ns, _MAX_STALL_STEP_NS)
        self._num_open_bytes = num_open_bytes
        self._delivered_when_looked = self._num_delivered
        self._looked_ns = now_ns

    def is_too_slow(self, num_bytes: int, now_ns: int, deadline_ns: int) -> bool:
        """Whether so many bytes surely cannot be there by the deadline. False when in doubt."""
        last_sign_ns = max(self._sampled_ns, self._looked_ns if self._stalled_ns else 0)
        if not self._is_measured or now_ns - last_sign_ns > _JUDGES_NS:
            return False
        return _is_surely_late(num_bytes, self._rate(), deadline_ns - now_ns)

    def _learn(self, num_bytes: int, rate: float) -> None:
        if num_bytes < LEAST_SAMPLE_BYTES:
            self._bytes_per_ns = max(self._bytes_per_ns, rate)
        elif self._is_measured:
            self._bytes_per_ns += _SAMPLE_WEIGHT * (rate - self._bytes_per_ns)
        else:
            self._bytes_per_ns = rate
            self._is_measured = True

    def _rate(self) -> float:
        if not self._stalled_ns:
            return self._bytes_per_ns
        return min(self._bytes_per_ns, self._num_open_bytes / self._stalled_ns)
