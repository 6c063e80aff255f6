"""What intake and binder know of each model's pool: its speed, what came to it, what waits for it.

Plain data, told the time in nanoseconds of the router's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp

from isthmus.common.clock import NS_PER_MS
from isthmus.router.demand import Demand
from isthmus.router.forecast import NO_PRESS, Press
from isthmus.router.holding import HeldQuery, HoldingQueue, Lane
from isthmus.router.placement import Look
from isthmus.router.reserve import Reserve

SPEED_MEMORY_MS = 2_000.0
SPEED_MEMORY_PROMPTS = 4.0  # at least so many mean prompts


@dataclass(slots=True)
class Pool:
    """Of one model, as it was last looked at, and how much it has been given to do lately."""

    ready_ms: float
    num_workers: int
    plans_ns: int = 0  # when to look again at who must be left out
    started_ms: float = 0.0  # work, decaying
    started_at_ns: int = 0
    demand: Demand = field(default_factory=Demand)
    reserve: Reserve = field(default_factory=Reserve)

    def started(self, work_ms: float, now_ns: int) -> None:
        """One prompt occupies one worker, however long it is."""
        self.started_ms = self._decayed(now_ns) + min(work_ms, self._memory_ms)
        self.started_at_ns = now_ns

    def speed(self, now_ns: int) -> float:
        """Work done in a time, in workers: those for prompts, or more where others help out."""
        return max(float(self.num_workers), self._decayed(now_ns) / self._memory_ms)

    @property
    def _memory_ms(self) -> float:
        return max(SPEED_MEMORY_MS, SPEED_MEMORY_PROMPTS * self.demand.mean_work_ms)

    def _decayed(self, now_ns: int) -> float:
        age_ms = (now_ns - self.started_at_ns) / NS_PER_MS
        return self.started_ms * exp(-age_ms / self._memory_ms)


class Pools:
    """By model; one is known once a query for it has been looked at."""

    def __init__(self, queue: HoldingQueue) -> None:
        self._queue = queue
        self._pools: dict[str, Pool] = {}

    def __getitem__(self, model: str) -> Pool:
        return self._pools[model]

    def get(self, model: str) -> Pool | None:
        return self._pools.get(model)

    def remember(self, model: str, look: Look) -> Pool:
        weighed = look.weighed
        pool = self._pools.get(model)
        if pool is None:
            pool = Pool(weighed.ready_ms, weighed.num_workers)
            self._pools[model] = pool
        else:
            pool.ready_ms = weighed.ready_ms
            pool.num_workers = weighed.num_workers
        return pool

    def press(self, model: str, held: HeldQuery | None = None) -> Press:
        """Of all who wait but ``held`` itself."""
        pool = self._pools.get(model)
        if pool is None:
            return NO_PRESS
        line_ms = self._queue.on_time_ms(model)
        if held is not None and held.lane is Lane.ON_TIME:
            line_ms = max(0.0, line_ms - held.work_ms)
        return Press(line_ms / pool.num_workers, pool.demand.mean_work_ms)

    def backlog_ms(self, model: str) -> float:
        """Until one that came last could begin."""
        pool = self._pools.get(model)
        if pool is None:
            return 0.0
        return pool.ready_ms + self._queue.work_ms(model) / pool.num_workers
