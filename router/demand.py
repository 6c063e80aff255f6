"""May work that has time take a worker away from work that has none?

Nothing that is being computed can be interrupted, and a prompt may take minutes. So what can wait
is begun only while the workers that are left do what arrives with a target: with m workers, of
which k are taken by such work, and arrivals that need D workers on average, work of w ms more
leaves the others short of max(0, D·``MARGIN`` − (m − k − 1)) workers for w ms. What that delays
them must be small beside the time that they have.

Few workers are never spare by that: one that is busy for a fifth of the time would do nothing else.
So work that is short, of which who comes meanwhile waits half on average (``SHORT_SLACKS``), may
also take the time that the others leave idle, m − D·``MARGIN`` workers, as much as there was of it.

Plain data of one pool; told the time in nanoseconds of the router's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import exp

from isthmus.common.clock import NS_PER_MS

MEMORY_SLACKS = 4.0  # mean slacks that arrivals are remembered for …
MEMORY_MS = (1_000.0, 20_000.0)  # … within these bounds
LEAST_SEEN_MS = 1_000.0  # of arrivals, before which they say little of what comes
MARGIN = 1.2
SLACK_SHARE = 0.1  # of the time that those with a target have
SHORT_SLACKS = 2.0


@dataclass(slots=True)
class Demand:
    """``_work_ms``, ``_slack_ms`` and ``_count`` are sums over arrivals, decaying alike."""

    _work_ms: float = 0.0
    _slack_ms: float = 0.0
    _count: float = 0.0
    _first_ns: int = -1
    _at_ns: int = 0
    _ends_ns: list[int] = field(default_factory=list)  # of work that had time and was begun
    _owed_ms: float = 0.0  # of a worker, that such work has had beyond what was idle …
    _owed_at_ns: int = 0  # … then

    def offered(self, work_ms: float, slack_ms: float, now_ns: int) -> None:
        """A query with a target came: ``work_ms`` on one worker, ``slack_ms`` to its latest
        start."""
        if self._first_ns < 0:
            self._first_ns = now_ns
        decay = self._decay(now_ns)
        self._work_ms = self._work_ms * decay + work_ms
        self._slack_ms = self._slack_ms * decay + slack_ms
        self._count = self._count * decay + 1.0
        self._at_ns = now_ns

    def begun(self, busy_ms: float, now_ns: int) -> None:
        """Work that had time occupies a worker for so long."""
        heappush(self._ends_ns, now_ns + int(busy_ms * NS_PER_MS))
        self._owed_ms += busy_ms

    def workers(self, now_ns: int) -> float:
        """That those who have a target keep busy on average."""
        if self._first_ns < 0:
            return 0.0
        seen_ms = max((now_ns - self._first_ns) / NS_PER_MS, LEAST_SEEN_MS)
        memory_ms = self._memory_ms
        remembered_ms = memory_ms * (1.0 - exp(-seen_ms / memory_ms))
        return self._work_ms * self._decay(now_ns) / remembered_ms

    @property
    def mean_work_ms(self) -> float:
        """Of those who came with a target; 0 before the first."""
        return self._work_ms / self._count if self._count else 0.0

    def spares(self, work_ms: float, num_workers: float, now_ns: int) -> bool:
        """Whether one worker of so many can do ``work_ms`` that has time."""
        while self._ends_ns and self._ends_ns[0] <= now_ns:
            heappop(self._ends_ns)
        wanted = self.workers(now_ns) * MARGIN
        idle_ms = max(0.0, num_workers - wanted) * (now_ns - self._owed_at_ns) / NS_PER_MS
        self._owed_ms = max(0.0, self._owed_ms - idle_ms)  # none is saved up
        self._owed_at_ns = now_ns
        if self._count * self._decay(now_ns) < 1e-3:
            return True
        missing = max(0.0, wanted - (num_workers - len(self._ends_ns) - 1))
        delay_ms = missing * work_ms / max(1.0, num_workers)
        slack_ms = self._slack_ms / self._count
        if delay_ms <= SLACK_SHARE * slack_ms:
            return True
        return work_ms <= SHORT_SLACKS * slack_ms and not self._owed_ms

    @property
    def _memory_ms(self) -> float:
        """What nobody has the time to wait for need not be foreseen for long."""
        low, high = MEMORY_MS
        slack_ms = self._slack_ms / self._count if self._count else 0.0
        return min(max(MEMORY_SLACKS * slack_ms, low), high)

    def _decay(self, now_ns: int) -> float:
        return exp(-(now_ns - self._at_ns) / NS_PER_MS / self._memory_ms)
