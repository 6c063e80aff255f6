"""Queries that wait in the router: in which order they go, and whom overload leaves out.

Two lanes for each model. ON_TIME holds queries whose first token can still be in time, by their
latest start; LATE_OK holds those without such a target, and those of best-effort classes that can
not meet theirs any more, in the order of fair shares. ON_TIME goes first, but LATE_OK is never
starved: it goes when ON_TIME has slack for it, and when its head has waited for ``ageing_ms`` it
gets a small share of the work, and of one worker's time, whatever ON_TIME has. A long one may take
more than that at once; it is paid back before the next one goes first.

::

    enter ──▶ ON_TIME ──▶ left out ──▶ LATE_OK (best effort) | gone (strict)
    enter ──▶ LATE_OK

Whom the plan of ON_TIME has no time for, but for whom there might be some if more instances helped
out than it reckons with, *stands by*: behind the others of ON_TIME, until the next plan.

The queue owns its entries: each is in exactly one lane until it is removed, once. Plain data, no
clock of its own: every method is told the time (router's monotonic nanoseconds).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from math import isclose

import numpy as np

from isthmus.common.clock import NS_PER_MS
from isthmus.common.ids import RequestId
from isthmus.router.capacity import Capacity
from isthmus.router.shares import TenantShares
from isthmus.router.shedding import NEVER_LATE, Job, Plan, leave_out
from isthmus.router.types import RouteQuery

PATIENCE = 2.0  # times ``ageing_ms``, that aged heads of LATE_OK give way to heavier classes
AGED_SHARE = 0.1  # of the work started, or of the time, that aged heads of LATE_OK get at least


class Lane(Enum):
    ON_TIME = "on_time"
    LATE_OK = "late_ok"


@dataclass(eq=False, slots=True)
class HeldQuery:
    """``latest_start_ns`` orders ON_TIME, ``tag`` LATE_OK; ``work_ms`` = predicted prefill.
    ``has_last_chance``: that start is the latest that is in time more likely than not."""

    query: RouteQuery
    since_ns: int
    expires_ns: int | None  # its deadline
    work_ms: float
    latest_start_ns: int | None
    lane: Lane
    place: int  # of its entry: settles ties, first come first
    tag: float = 0.0
    obstacle: str = ""  # what was in its way when it was last looked at …
    news: int = -1  # … after so much that may have made room (``Places.num_news``) …
    looks_ns: int = 0  # … and when it is worth another look without more
    has_last_chance: bool = False

    @property
    def key(self) -> tuple[float, int]:
        if self.lane is Lane.ON_TIME:
            assert self.latest_start_ns is not None
            return self.latest_start_ns, self.place
        return self.tag, self.place


@dataclass(frozen=True, slots=True)
class _Planned:
    """For what ON_TIME was planned."""

    at_ns: int
    capacity: Capacity
    slack_ms: float

    def slack_left_ms(self, now_ns: int, capacity: Capacity) -> float:
        """Less than none when the plan may hold no more."""
        return self.slack_ms - self.capacity.lost_ms(capacity, (now_ns - self.at_ns) / NS_PER_MS)


@dataclass(slots=True)
class _Line:
    """The two lanes of one model, each in order."""

    on_time: list[HeldQuery] = field(default_factory=list)
    late_ok: list[HeldQuery] = field(default_factory=list)
    work_ms: float = 0.0  # of all in both lanes …
    on_time_ms: float = 0.0  # … and in ON_TIME …
    stand_by: set[HeldQuery] = field(default_factory=set)  # … of which these stand by
    stand_by_ms: float = 0.0
    slack_ms: float = NEVER_LATE  # work that ON_TIME had time for, when it was last planned
    planned: _Planned | None = None  # when that left nobody out, and nobody came or went since
    debt_ms: float = 0.0  # work that LATE_OK has had beyond its share; none is saved up …
    paid_ns: int | None = None  # … and time has paid for it until then
    late_began_ns: int = 0  # when one of LATE_OK was begun last

    def lane(self, lane: Lane) -> list[HeldQuery]:
        return self.on_time if lane is Lane.ON_TIME else self.late_ok

    def let_stand_by(self, stand_by: set[HeldQuery]) -> None:
        self.stand_by = stand_by
        self.stand_by_ms = sum(held.work_ms for held in stand_by)

    def pay(self, now_ns: int) -> None:
        """Where little comes with a target, a share of that is nothing: a share of the time is
        not."""
        if self.paid_ns is not None:
            share_ms = AGED_SHARE * (now_ns - self.paid_ns) / NS_PER_MS
            self.debt_ms = max(0.0, self.debt_ms - share_ms)
        self.paid_ns = now_ns


class HoldingQueue:
    def __init__(self, shares: TenantShares, ageing_ms: float, max_held: int) -> None:
        self.shares = shares
        self._ageing_ns = int(ageing_ms * NS_PER_MS)
        self._max_held = max_held
        self._lines: dict[str, _Line] = {}
        self._held: dict[RequestId, HeldQuery] = {}
        self._num_entered = 0
        self._next_expiry_ns: int | None = None  # none of the held ends before

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._held

    @property
    def is_full(self) -> bool:
        return len(self._held) >= self._max_held

    def models(self) -> list[str]:
        return list(self._lines)

    def num_held(self, model: str) -> int:
        line = self._lines.get(model)
        return len(line.on_time) + len(line.late_ok) if line is not None else 0

    def work_ms(self, model: str) -> float:
        """Predicted prefill work of all who wait."""
        line = self._lines.get(model)
        return max(0.0, line.work_ms) if line is not None else 0.0

    def on_time_ms(self, model: str) -> float:
        """Predicted prefill work of those in ON_TIME that do not only stand by."""
        line = self._lines.get(model)
        return max(0.0, line.on_time_ms - line.stand_by_ms) if line is not None else 0.0

    def has_on_time(self, model: str) -> bool:
        """Whether somebody waits who could come too late."""
        line = self._lines.get(model)
        return line is not None and bool(line.on_time)

    def enter(
        self,
        query: RouteQuery,
        work_ms: float,
        latest_start_ns: int | None,
        now_ns: int,
        expires_ns: int | None,
    ) -> HeldQuery:
        """``latest_start_ns`` None: nothing that could be missed."""
        assert query.request_id not in self._held
        lane = Lane.LATE_OK if latest_start_ns is None else Lane.ON_TIME
        held = HeldQuery(
            query, now_ns, expires_ns, work_ms, latest_start_ns, lane, self._num_entered
        )
        self._num_entered += 1
        self._held[query.request_id] = held
        self._insert(held)
        self._next_expiry_ns = earlier(self._next_expiry_ns, expires_ns)
        return held

    def remove(self, request_id: RequestId) -> HeldQuery | None:
        """Unserved. None when it is not here (any more)."""
        held = self._held.get(request_id)
        if held is not None:
            if held.lane is Lane.LATE_OK:
                self.shares.withdrawn(held.query.tenant, held.tag, held.work_ms)
            self._forget(held)
        return held

    def started(self, held: HeldQuery, now_ns: int) -> None:
        """Removes ``held``: it was dispatched, and its tenant has had its work."""
        line = self._lines[held.query.model]
        line.pay(now_ns)
        had_ms = held.work_ms if held.lane is Lane.LATE_OK else 0.0
        line.debt_ms = max(0.0, line.debt_ms + had_ms - AGED_SHARE * held.work_ms)
        if held.lane is Lane.LATE_OK:
            line.late_began_ns = now_ns
        tag = held.tag if held.lane is Lane.LATE_OK else None
        self.shares.served(held.query.tenant, tag, held.work_ms, now_ns)
        self._forget(held)

    def put_off(self, held: HeldQuery, latest_start_ns: int) -> None:
        """It would be refused, and may start later than was thought, as its last chance."""
        assert held.lane is Lane.ON_TIME
        self._take_out(held)
        held.latest_start_ns, held.has_last_chance, held.looks_ns = latest_start_ns, True, 0
        self._insert(held)

    def demote(self, held: HeldQuery) -> None:
        """From ON_TIME to LATE_OK: it will be late, and its class would rather be late than not
        be served."""
        assert held.lane is Lane.ON_TIME
        self._take_out(held)
        held.lane, held.latest_start_ns, held.looks_ns = Lane.LATE_OK, None, 0
        self._insert(held)

    def in_order(
        self, model: str, now_ns: int, is_spare: Callable[[float], bool]
    ) -> Iterator[HeldQuery]:
        """Who goes first, second, …, as things stand. ``is_spare(work_ms)``: whether so much work
        may take a worker away from who comes with a target; if it may not, no more may either."""
        line = self._lines.get(model)
        if line is None:
            return
        on_time, late_ok = list(line.on_time), list(line.late_ok)
        if line.stand_by:
            on_time.sort(key=line.stand_by.__contains__)  # behind the others, in their order
        if late_ok and self._goes_first(late_ok[0], line, now_ns, is_spare):
            yield late_ok.pop(0)
        yield from on_time
        too_much_ms = float("inf")  # thousands may wait here, and none of them be spare
        for held in late_ok:
            if held.work_ms >= too_much_ms:
                continue
            if is_spare(held.work_ms):
                yield held
            else:
                too_much_ms = held.work_ms

    def is_starving(self, held: HeldQuery, now_ns: int) -> bool:
        """It has given way for long enough, and so have all of LATE_OK."""
        if held.lane is not Lane.LATE_OK:
            return False
        since_ns = max(held.since_ns, self._lines[held.query.model].late_began_ns)
        return now_ns - since_ns >= PATIENCE * self._ageing_ns

    def has_turn(
        self, request_id: RequestId, now_ns: int, is_spare: Callable[[float], bool]
    ) -> bool:
        """Whether ``in_order`` names it now; False also of one that is not here (any more)."""
        held = self._held.get(request_id)
        if held is None:
            return False
        if held.lane is Lane.ON_TIME or is_spare(held.work_ms):
            return True
        line = self._lines[held.query.model]
        return line.late_ok[0] is held and self._goes_first(held, line, now_ns, is_spare)

    def expired(self, now_ns: int) -> list[HeldQuery]:
        """Whose deadline has come: again and again, until they are removed."""
        if self._next_expiry_ns is None or now_ns < self._next_expiry_ns:
            return []
        ended: list[HeldQuery] = []
        self._next_expiry_ns = None
        for held in self._held.values():
            if held.expires_ns is not None and held.expires_ns <= now_ns:
                ended.append(held)
            self._next_expiry_ns = earlier(self._next_expiry_ns, held.expires_ns)
        return ended

    def left_out(
        self, model: str, now_ns: int, capacity: Capacity, hope: Capacity | None = None
    ) -> list[tuple[HeldQuery, float]]:
        """Those of ON_TIME to be given up so that the others are in time, each with the work of
        the others that goes before it; nobody is moved. ``hope``: what the pool might do at most:
        whom that leaves time for stands by instead.

        What goes before a job must be done by its latest start: with all work on one machine that
        is done with one unit in one unit, its due time is what ``capacity`` does by then, and
        itself.
        """
        line = self._lines.get(model)
        if line is None or not line.on_time:
            return []
        if line.planned is not None:
            slack_ms = line.planned.slack_left_ms(now_ns, capacity)
            if slack_ms >= 0.0:
                line.slack_ms = slack_ms
                return []
        plan = self._plan(line, now_ns, capacity)
        stand_by: set[int] = set()
        line.slack_ms = plan.slack_ms
        if not plan.left_out:
            line.planned = _Planned(now_ns, capacity, plan.slack_ms)
        elif hope is not None:
            stand_by = set(plan.left_out).difference(self._plan(line, now_ns, hope).left_out)
            if stand_by:
                line.slack_ms = 0.0  # it is theirs
        line.let_stand_by({line.on_time[place] for place in stand_by})
        out, left_out, before_ms = set(plan.left_out) - stand_by, [], 0.0
        for place, held in enumerate(line.on_time):
            if place in out:
                left_out.append((held, before_ms))
            elif place not in stand_by:
                before_ms += held.work_ms
        return left_out

    def next_change_ns(self) -> int | None:
        """When the first of them passes its latest start or its deadline."""
        first = self._next_expiry_ns
        for line in self._lines.values():
            if line.on_time:
                first = earlier(first, line.on_time[0].latest_start_ns)
        return first

    def check_integrity(self) -> None:
        """AssertionError when the lanes and the set disagree."""
        found = [held for line in self._lines.values() for held in self._all(line)]
        assert len(found) == len(self._held)
        assert {id(held) for held in found} == {id(held) for held in self._held.values()}
        for line in self._lines.values():
            assert line.on_time or line.late_ok, "an empty line has no entry"
            total_ms = sum(held.work_ms for held in self._all(line))
            assert isclose(line.work_ms, total_ms, rel_tol=1e-6, abs_tol=1e-3)
            assert line.stand_by <= set(line.on_time)
            stand_by_ms = sum(held.work_ms for held in line.stand_by)
            assert isclose(line.stand_by_ms, stand_by_ms, rel_tol=1e-6, abs_tol=1e-3)
            on_time_ms = sum(held.work_ms for held in line.on_time)
            assert isclose(line.on_time_ms, on_time_ms, rel_tol=1e-6, abs_tol=1e-3)
            for lane in Lane:
                entries = line.lane(lane)
                assert all(held.lane is lane for held in entries)
                assert [held.key for held in entries] == sorted(held.key for held in entries)

    def _plan(self, line: _Line, now_ns: int, capacity: Capacity) -> Plan:
        factor = self.shares.factors([held.query.tenant for held in line.on_time], now_ns)
        starts = [(held.latest_start_ns or 0) - now_ns for held in line.on_time]
        before = capacity.by(np.array(starts) / NS_PER_MS)
        jobs = [
            Job(
                float(done_ms) + held.work_ms,
                held.work_ms,
                held.query.slo.weight * factor[held.query.tenant],
            )
            for held, done_ms in zip(line.on_time, before, strict=True)
        ]
        return leave_out(jobs)

    def _goes_first(
        self, head: HeldQuery, line: _Line, now_ns: int, is_spare: Callable[[float], bool]
    ) -> bool:
        """LATE_OK's head before ON_TIME: nobody is late for it, or it has waited too long."""
        if (not line.on_time or line.slack_ms >= head.work_ms) and is_spare(head.work_ms):
            return True
        line.pay(now_ns)
        if now_ns - head.since_ns < self._ageing_ns or line.debt_ms:
            return False
        weight = head.query.slo.weight
        heavier = any(held.query.slo.weight > weight for held in line.on_time)
        return not heavier or self.is_starving(head, now_ns)

    def _insert(self, held: HeldQuery) -> None:
        line = self._lines.setdefault(held.query.model, _Line())
        if held.lane is Lane.LATE_OK:
            held.tag = self.shares.tag(held.query.tenant, held.work_ms)
        line.work_ms += held.work_ms
        line.on_time_ms += held.work_ms if held.lane is Lane.ON_TIME else 0.0
        line.planned = None
        insort(line.lane(held.lane), held, key=lambda item: item.key)

    def _take_out(self, held: HeldQuery) -> None:
        line = self._lines[held.query.model]
        entries = line.lane(held.lane)
        place = bisect_left(entries, held.key, key=lambda item: item.key)
        assert entries[place] is held
        del entries[place]
        if held in line.stand_by:
            line.stand_by.remove(held)
            line.stand_by_ms -= held.work_ms
        line.work_ms -= held.work_ms
        line.on_time_ms -= held.work_ms if held.lane is Lane.ON_TIME else 0.0
        line.planned = None

    def _forget(self, held: HeldQuery) -> None:
        del self._held[held.query.request_id]
        self._take_out(held)
        line = self._lines[held.query.model]
        if not line.on_time and not line.late_ok:
            del self._lines[held.query.model]

    def _all(self, line: _Line) -> list[HeldQuery]:
        return [*line.on_time, *line.late_ok]


def earlier(one: int | None, other: int | None) -> int | None:
    """None = never."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)
