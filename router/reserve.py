"""How long may nobody be free for a prompt, with classes about that weigh more?

A prompt that is being computed cannot be interrupted. Where few instances compute prompts, two long
ones of a light class that begin together keep everybody else out for longer than a heavier class
can wait. So whoever weighs less begins only while another instance, or its own, is free again soon.

How soon, from what came of heavier classes lately: with arrivals of rate λ that can wait for S on
average, n = λ·S / m of them come to each of m other instances within that time. Nobody in time is
there for a second one with a probability of about n²/2, if nobody is free for S; for a share x of
it, if nobody is for x·S. A class may miss 1 − q, so x = 2·(1 − q) / n².

Plain data of one pool; told the time in nanoseconds of the router's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp

from isthmus.common.clock import NS_PER_MS
from isthmus.router.reservation import NO_LIMIT

MEMORY_MS = 20_000.0
LEAST_SEEN_MS = 1_000.0  # of arrivals, before which they say little of what comes
MAX_WEIGHTS = 16


@dataclass(slots=True)
class _Arrivals:
    """Of one weight: sums, decaying alike."""

    count: float = 0.0
    slack_ms: float = 0.0
    allowed: float = 0.0  # 1 − q
    at_ns: int = 0

    def decay(self, now_ns: int) -> float:
        return exp(-(now_ns - self.at_ns) / NS_PER_MS / MEMORY_MS)


@dataclass(slots=True)
class Reserve:
    _by_weight: dict[float, _Arrivals] = field(default_factory=dict)
    _first_ns: int = -1

    def offered(self, weight: float, quantile: float, slack_ms: float, now_ns: int) -> None:
        """A query with a TTFT target came: ``slack_ms`` to its latest start."""
        if self._first_ns < 0:
            self._first_ns = now_ns
        seen = self._by_weight.get(weight)
        if seen is None:
            if len(self._by_weight) >= MAX_WEIGHTS:
                return
            seen = self._by_weight[weight] = _Arrivals()
        decay = seen.decay(now_ns)
        seen.count = seen.count * decay + 1.0
        seen.slack_ms = seen.slack_ms * decay + slack_ms
        seen.allowed = seen.allowed * decay + 1.0 - quantile
        seen.at_ns = now_ns

    def has_heavier(self, weight: float) -> bool:
        """Whether any has come so far."""
        return any(other > weight for other in self._by_weight)

    def limit_ms(self, weight: float, num_others: int, now_ns: int) -> float:
        """For how long none of the ``num_others`` and the one that is chosen may be free, when
        somebody of this ``weight`` begins. Infinite with nobody heavier, and with no other."""
        count = slack_ms = allowed = 0.0
        for other, seen in self._by_weight.items():
            if other > weight:
                decay = seen.decay(now_ns)
                count += seen.count * decay
                slack_ms += seen.slack_ms * decay
                allowed += seen.allowed * decay
        if not num_others or slack_ms <= 0.0:
            return NO_LIMIT
        seen_ms = max((now_ns - self._first_ns) / NS_PER_MS, LEAST_SEEN_MS)
        # The sum of slacks over the time that it was gathered in is λ·S.
        crowd = slack_ms / (MEMORY_MS * (1.0 - exp(-seen_ms / MEMORY_MS))) / num_others
        if crowd * crowd <= 0.0:
            return NO_LIMIT
        return 2.0 * (allowed / count) * (slack_ms / count) / (crowd * crowd)
