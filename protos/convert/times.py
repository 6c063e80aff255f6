"""Instants, which become time left, or time gone by, on the way out and instants on the way in.

So two clocks that disagree cannot shorten or lengthen a deadline.
"""

from __future__ import annotations

import time

from isthmus.common.clock import NS_PER_MS


def ms_left(deadline_ns: int) -> int:
    """Time from now to a unix instant, milliseconds, at least 0."""
    return max(0, (deadline_ns - time.time_ns()) // NS_PER_MS)


def ms_since(instant_ns: int) -> int:
    """Time from a unix instant to now, milliseconds, at least 0."""
    return max(0, (time.time_ns() - instant_ns) // NS_PER_MS)


def instant_after(ms: int) -> int:
    return time.time_ns() + ms * NS_PER_MS


def instant_before(ms: int) -> int:
    return time.time_ns() - ms * NS_PER_MS
