"""Who starts now, who waits, who is refused: late binding over the holding queue.

A query is bound to a pair only when somebody can start on it, so instances' own queues stay about
one step deep and order, cancels and news of the cluster count until the last moment. While it waits
it is in one lane of ``holding``; every ``tick`` gives up whoever cannot be in time any more
(overload, by Moore and Hodgson's rule), then binds in order as far as there is room. Pure: told the
time, returns what was settled. See ``verdict`` for the life of a query.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from isthmus.common import metrics
from isthmus.common.clock import NS_PER_MS
from isthmus.common.errors import IsthmusError, SloShedError
from isthmus.common.ids import RequestId
from isthmus.common.types import RouteAction, RouteDecision
from isthmus.router import refusals
from isthmus.router.binder import LEAST_WAIT_MS, LONGEST_WAIT_MS, Binder
from isthmus.router.holding import HeldQuery, HoldingQueue, earlier
from isthmus.router.placement import Look
from isthmus.router.places import Places
from isthmus.router.pools import Pools
from isthmus.router.types import RouteQuery
from isthmus.router.verdict import Held, Rejected, Settled, Verdict
from isthmus.router.weighed import RESERVED

PLAN_MS = 10  # between two looks at who must be left out


class Intake:
    """Owns the queue. ``commit`` books a decision; ``refuse`` notes a refusal, and finds out why
    nobody can take a query when it is given no error."""

    def __init__(
        self,
        queue: HoldingQueue,
        places: Places,
        commit: Callable[[RouteQuery, Look, RouteAction, int], RouteDecision],
        refuse: Callable[[RouteQuery, IsthmusError | None, int], IsthmusError],
        ageing_ms: float,
    ) -> None:
        self._queue = queue
        self._places = places
        self._refuse = refuse
        self._pools = Pools(queue)
        self._binder = Binder(queue, self._pools, places, commit, self._give_up, ageing_ms)
        self._next_tick_ns: int | None = None
        self._untold: list[Settled] = []  # of a tick that broke off

    @property
    def queue(self) -> HoldingQueue:
        return self._queue

    def submit(self, query: RouteQuery, deadline_ns: int | None, now_ns: int) -> Verdict:
        """``deadline_ns``: by the same clock as ``now_ns``."""
        if query.request_id in self._queue:
            return Rejected(refusals.duplicate(query.request_id))
        look = self._places.look(query, now_ns, press=self._pools.press(query.model))
        if look is None:
            return self._rejected(query, None, now_ns)
        slo, weighed = query.slo, look.weighed
        if look.is_infeasible and slo.is_strict:
            return self._rejected(query, refusals.infeasible(query, look), now_ns)
        pool = self._pools.remember(query.model, look)
        latest_ns = None if look.is_infeasible else look.latest_start_ns
        has_last_chance = False
        if latest_ns is not None and latest_ns < now_ns:
            chance = self._last_chance(query, now_ns)
            if chance is None and slo.is_strict:
                error = self._shed(query, weighed.floor_quantile_ms)
                return self._rejected(query, error, now_ns)
            has_last_chance = chance is not None
            look, latest_ns = chance or look, chance.latest_start_ns if chance else None
        work_ms = weighed.work_ms
        if latest_ns is not None:
            slack_ms = (latest_ns - now_ns) / NS_PER_MS
            pool.demand.offered(work_ms, slack_ms, now_ns)
            pool.reserve.offered(slo.weight, slo.quantile, slack_ms, now_ns)
        elif slo.ttft_ms is not None:
            late_look = self._places.look(query, now_ns, is_on_time=False)
            look = late_look or look
        may_start = latest_ns is not None or pool.demand.spares(work_ms, pool.num_workers, now_ns)
        may_start = may_start and not self._queue.num_held(query.model)
        is_reserved = may_start and self._binder.reserved_ms(query, look, now_ns) > 0
        if may_start and look.weighed.candidates and not is_reserved:
            self._queue.shares.served(query.tenant, None, weighed.work_ms, now_ns)
            is_late = latest_ns is None and slo.ttft_ms is not None
            is_degraded = is_late or look.is_infeasible
            action = RouteAction.DEGRADE if is_degraded else RouteAction.ADMIT
            return self._binder.admitted(query, look, action, now_ns, has_time=latest_ns is None)
        if self._queue.is_full:
            full = refusals.queue_full(len(self._queue), self._pools.backlog_ms(query.model))
            return self._rejected(query, full, now_ns)
        held_for = RESERVED if is_reserved else look.weighed.obstacle or "in_line"
        query = replace(query, held_for=held_for)
        held = self._queue.enter(query, weighed.work_ms, latest_ns, now_ns, deadline_ns)
        held.has_last_chance = has_last_chance
        self._next_tick_ns = self._tick_after_entry(query.model, now_ns)
        metrics.HOLDS.labels(reason=held_for).inc()
        return Held(query.request_id, latest_ns)

    def cancel(self, request_id: RequestId) -> bool:
        """False when it does not wait (any more)."""
        return self._queue.remove(request_id) is not None

    def tick(self, now_ns: int) -> list[Settled]:
        """Whoever was settled before an exception is told by the next call."""
        if not self._untold:
            self._next_tick_ns = now_ns + LONGEST_WAIT_MS * NS_PER_MS  # should this one break off
            self._settle(now_ns, self._untold)
        else:
            self._next_tick_ns = now_ns
        settled, self._untold = self._untold, []
        return settled

    def next_tick_ns(self) -> int | None:
        return self._next_tick_ns

    def _settle(self, now_ns: int, settled: list[Settled]) -> None:
        if not len(self._queue):
            self._next_tick_ns = None
            return
        for held in self._queue.expired(now_ns):
            waited_ms = (now_ns - held.since_ns) / NS_PER_MS
            self._give_up(held, refusals.expired(waited_ms), now_ns, settled)
        wait_ms = float(LONGEST_WAIT_MS)
        for model in self._queue.models():
            self._leave_out(model, now_ns, settled)
            wait_ms = min(wait_ms, self._binder.bind(model, now_ns, settled))
        self._next_tick_ns = self._next(now_ns, wait_ms)

    def _leave_out(self, model: str, now_ns: int, settled: list[Settled]) -> None:
        pool = self._pools.get(model)
        if pool is None or now_ns < pool.plans_ns or not self._queue.has_on_time(model):
            return
        pool.plans_ns = now_ns + PLAN_MS * NS_PER_MS
        capacity = self._places.capacity(model, now_ns)
        pool.ready_ms, speed = capacity.first_ms, pool.speed(now_ns)
        capacity = replace(capacity, helpers=max(0.0, speed - pool.num_workers))
        hope = max(capacity.helpers, self._places.hope(model, now_ns))
        hoped = replace(capacity, helpers=hope)
        left_out = self._queue.left_out(model, now_ns, capacity, hoped)
        asked = dict.fromkeys(held for held, _ in left_out)  # in order: each changes what is next
        num_put_off = sum(self._is_put_off(held, now_ns) for held in asked)
        if num_put_off:
            again = self._queue.left_out(model, now_ns, capacity, hoped)
            # A strict one that is named only now has not been asked yet: the next plan does.
            left_out = [one for one in again if one[0] in asked or not one[0].query.slo.is_strict]
        for held, before_ms in left_out:
            self._places.missed(held.query, held.obstacle, now_ns)
            if held.query.slo.is_strict:
                first_ms = held.work_ms + pool.ready_ms + before_ms / speed
                error = self._shed(held.query, first_ms)
                self._give_up(held, error, now_ns, settled)
            else:
                self._queue.demote(held)

    def _is_put_off(self, held: HeldQuery, now_ns: int) -> bool:
        """Once: it has more time, and what is planned holds no more."""
        chance = None if held.has_last_chance else self._last_chance(held.query, now_ns)
        if chance is None or chance.latest_start_ns is None:
            return False
        self._queue.put_off(held, chance.latest_start_ns)
        return True

    def _last_chance(self, query: RouteQuery, now_ns: int) -> Look | None:
        """How a query that would be refused might still be in time, more likely than not: its
        class's quantile is what it was promised by, and it is lost for sure when it is refused."""
        if not query.slo.is_strict:
            return None  # late is better than never, and not in anybody's way
        press = self._pools.press(query.model)
        look = self._places.look(query, now_ns, is_last_chance=True, press=press)
        if look is None or look.latest_start_ns is None or look.latest_start_ns < now_ns:
            return None
        return look

    def _shed(self, query: RouteQuery, first_ms: float) -> SloShedError:
        """``first_ms``: until its first token, from now."""
        predicted_ms = first_ms + self._places.elapsed_ms(query)
        return refusals.shed(query, predicted_ms, self._pools.backlog_ms(query.model))

    def _rejected(self, query: RouteQuery, error: IsthmusError | None, now_ns: int) -> Rejected:
        return Rejected(self._refuse(query, error, now_ns))

    def _give_up(
        self, held: HeldQuery, error: IsthmusError | None, now_ns: int, settled: list[Settled]
    ) -> None:
        # First what may break off: a query that is in no line any more must have been told why.
        rejected = self._rejected(held.query, error, now_ns)
        self._queue.remove(held.query.request_id)
        settled.append(Settled(held.query.request_id, rejected))

    def _tick_after_entry(self, model: str, now_ns: int) -> int | None:
        """At once where somebody could begin, or must perhaps be given up for who has come. Else a
        tick would find nothing to do: of many that come together, each would cost one."""
        soonest_ms = self._places.soonest_start_ms(model, now_ns)
        if not 0 < soonest_ms < float("inf"):
            return now_ns
        next_ns = self._next(now_ns, min(LONGEST_WAIT_MS, soonest_ms))
        if self._queue.has_on_time(model):
            next_ns = earlier(next_ns, max(now_ns, self._pools[model].plans_ns))
        return earlier(self._next_tick_ns, next_ns)

    def _next(self, now_ns: int, wait_ms: float) -> int | None:
        if not len(self._queue):
            return None
        # Never at once: a tick that found nothing to do would find nothing for ever.
        next_ns = now_ns + int(max(LEAST_WAIT_MS, wait_ms) * NS_PER_MS)
        change_ns = self._queue.next_change_ns()
        if change_ns is not None:
            next_ns = min(next_ns, max(change_ns, now_ns + NS_PER_MS))
        return next_ns
