"""Who starts now, who waits, who is refused: late binding over the holding queue.

A query is bound to a pair only when somebody can start on it, so instances' own queues stay about
one step deep and order, cancels and news of the cluster count until the last moment. While it waits
it is in one lane of ``holding``; every ``tick`` gives up whoever cannot be in time any more
(overload, by Moore and Hodgson's rule), then binds in order as far as there is room. Pure: told the
time, returns what was settled. See ``verdict`` for the life of a query.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import exp
from typing import Protocol

from isthmus.common import metrics
from isthmus.common.backoff import retry_after_ms
from isthmus.common.clock import NS_PER_MS
from isthmus.common.errors import (
    CapacityError,
    DeadlineError,
    InfeasibleSloError,
    InvalidRequestError,
    IsthmusError,
    SloShedError,
)
from isthmus.common.ids import InstanceId, RequestId
from isthmus.common.types import RouteAction, RouteDecision
from isthmus.router.capacity import Capacity
from isthmus.router.demand import Demand
from isthmus.router.forecast import NO_PRESS, Press
from isthmus.router.holding import HeldQuery, HoldingQueue, Lane
from isthmus.router.placement import Look
from isthmus.router.reserve import Reserve
from isthmus.router.types import RouteQuery
from isthmus.router.verdict import Admitted, Held, Rejected, Settled, Verdict
from isthmus.router.weighed import DECODE_FULL, RESERVED

LAST_CHANCE = 0.25  # of the time waited so far, when no more is left
SPEED_MEMORY_MS = 2_000.0
SPEED_MEMORY_PROMPTS = 4.0  # at least so many mean prompts
PLAN_MS = 10  # between two looks at who must be left out
MAX_PASSED_OVER = 4  # queries that find no place, before the rest of a line is not asked
LONGEST_WAIT_MS = 50  # for news that does not come
LOOK_AGAIN_MS = 100.0  # at one that found no place, where nothing has made room


class Places(Protocol):
    """What the cluster offers (``placement``)."""

    def look(
        self,
        query: RouteQuery,
        now_ns: int,
        *,
        is_on_time: bool = True,
        is_aged: bool = False,
        is_last_chance: bool = False,
        left_alone: InstanceId | None = None,
        press: Press = NO_PRESS,
    ) -> Look | None: ...

    def nearest_room(self, query: RouteQuery, now_ns: int) -> InstanceId | None: ...

    def num_news(self, now_ns: int) -> int: ...

    def soonest_start_ms(self, model: str, now_ns: int) -> float: ...

    def capacity(self, model: str, now_ns: int) -> Capacity: ...

    def hope(self, model: str, now_ns: int) -> float: ...

    def others(self, model: str, now_ns: int, chosen: InstanceId) -> tuple[float, int]: ...

    def elapsed_ms(self, query: RouteQuery) -> float: ...

    def missed(self, query: RouteQuery, obstacle: str, now_ns: int) -> None: ...


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


@dataclass(frozen=True, slots=True)
class Kept:
    """A decode instance that is left alone until there is room for one query on it that has waited
    long: else those behind it take each block that would make that room. All others are theirs."""

    request_id: RequestId
    instance_id: InstanceId


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
        self._commit = commit
        self._refuse = refuse
        self._ageing_ns = int(ageing_ms * NS_PER_MS)
        self._pools: dict[str, Pool] = {}
        self._kept: dict[str, Kept] = {}  # by model
        self._next_tick_ns: int | None = None
        self._untold: list[Settled] = []  # of a tick that broke off

    @property
    def queue(self) -> HoldingQueue:
        return self._queue

    def submit(self, query: RouteQuery, deadline_ns: int | None, now_ns: int) -> Verdict:
        """``deadline_ns``: by the same clock as ``now_ns``."""
        if query.request_id in self._queue:
            return Rejected(_duplicate(query.request_id))
        look = self._places.look(query, now_ns, press=self._press(query.model))
        if look is None:
            return self._rejected(query, None, now_ns)
        slo, weighed = query.slo, look.weighed
        if look.is_infeasible and slo.is_strict:
            return self._rejected(query, _infeasible(query, look), now_ns)
        self._remember(query.model, look)
        latest_ns = None if look.is_infeasible else look.latest_start_ns
        if latest_ns is not None and latest_ns < now_ns:
            if slo.is_strict:
                shed = self._shed(query, weighed.floor_quantile_ms)
                return self._rejected(query, shed, now_ns)
            latest_ns = None
        pool, work_ms = self._pools[query.model], weighed.work_ms
        if latest_ns is not None:
            slack_ms = (latest_ns - now_ns) / NS_PER_MS
            pool.demand.offered(work_ms, slack_ms, now_ns)
            pool.reserve.offered(slo.weight, slo.quantile, slack_ms, now_ns)
        elif slo.ttft_ms is not None:
            late_look = self._places.look(query, now_ns, is_on_time=False)
            look = late_look or look
        may_start = latest_ns is not None or pool.demand.spares(work_ms, pool.num_workers, now_ns)
        may_start = may_start and not self._queue.num_held(query.model)
        may_start = may_start and not self._reserved_ms(query, look, now_ns)
        if may_start and look.weighed.candidates:
            self._queue.shares.served(query.tenant, None, weighed.work_ms, now_ns)
            is_late = latest_ns is None and slo.ttft_ms is not None
            is_degraded = is_late or look.is_infeasible
            action = RouteAction.DEGRADE if is_degraded else RouteAction.ADMIT
            return self._admitted(query, look, action, now_ns, has_time=latest_ns is None)
        if self._queue.is_full:
            error = CapacityError(
                f"{len(self._queue)} requests wait already",
                stage="route",
                reason="queue_full",
                retry_after_ms=retry_after_ms(self._backlog_ms(query.model)),
            )
            return self._rejected(query, error, now_ns)
        self._queue.enter(query, weighed.work_ms, latest_ns, now_ns, deadline_ns)
        self._next_tick_ns = self._tick_after_entry(query.model, now_ns)
        metrics.HOLDS.labels(reason=look.weighed.obstacle or "in_line").inc()
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
            message = f"the request's deadline came while it waited ({waited_ms:.0f} ms)"
            error = DeadlineError(message, stage="route")
            self._give_up(held, error, now_ns, settled)
        wait_ms = float(LONGEST_WAIT_MS)
        for model in self._queue.models():
            self._leave_out(model, now_ns, settled)
            wait_ms = min(wait_ms, self._bind(model, now_ns, settled))
        self._next_tick_ns = self._next(now_ns, wait_ms)

    # --- whom to give up -------------------------------------------------------------------------

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
        for held, before_ms in self._queue.left_out(model, now_ns, capacity, hoped):
            self._places.missed(held.query, held.obstacle, now_ns)
            if held.query.slo.is_strict:
                first_ms = held.work_ms + pool.ready_ms + before_ms / speed
                error = self._shed(held.query, first_ms)
                self._give_up(held, error, now_ns, settled)
            else:
                self._queue.demote(held)

    def _shed(self, query: RouteQuery, first_ms: float) -> SloShedError:
        """``first_ms``: until its first token, from now."""
        predicted_ms = first_ms + self._places.elapsed_ms(query)
        limit_ms = query.slo.ttft_ms
        return SloShedError(
            f"the first token would come after about {predicted_ms:.0f} ms, and the target of "
            f"class {query.slo.class_name} is {limit_ms:g} ms",
            stage="route",
            reason="overload",
            predicted_ms=predicted_ms,
            limit_ms=limit_ms,
            retry_after_ms=retry_after_ms(self._backlog_ms(query.model)),
        )

    def _press(self, model: str, held: HeldQuery | None = None) -> Press:
        """Of all who wait but ``held`` itself."""
        pool = self._pools.get(model)
        if pool is None:
            return NO_PRESS
        line_ms = self._queue.on_time_ms(model)
        if held is not None and held.lane is Lane.ON_TIME:
            line_ms = max(0.0, line_ms - held.work_ms)
        return Press(line_ms / pool.num_workers, pool.demand.mean_work_ms)

    def _backlog_ms(self, model: str) -> float:
        pool = self._pools.get(model)
        if pool is None:
            return 0.0
        return pool.ready_ms + self._queue.work_ms(model) / pool.num_workers

    # --- whom to bind ----------------------------------------------------------------------------

    def _bind(self, model: str, now_ns: int, settled: list[Settled]) -> float:
        """Binds in order as far as there is room; milliseconds until there may be more."""
        pool = self._pools[model]
        num_passed_over, wait_ms = 0, float(LONGEST_WAIT_MS)

        def is_spare(work_ms: float) -> bool:
            return pool.demand.spares(work_ms, pool.num_workers, now_ns)

        for held in self._queue.in_order(model, now_ns, is_spare):
            soonest_ms = self._places.soonest_start_ms(model, now_ns)
            if 0 < soonest_ms < float("inf"):
                return max(1.0, soonest_ms)
            if num_passed_over >= MAX_PASSED_OVER:
                break
            news = self._places.num_news(now_ns)
            if held.news == news and now_ns < held.looks_ns:
                num_passed_over += 1
                continue
            is_on_time = held.lane is Lane.ON_TIME
            is_aged = now_ns - held.since_ns >= self._ageing_ns
            look = self._places.look(
                held.query,
                now_ns,
                is_on_time=is_on_time,
                is_aged=is_aged and not is_on_time,
                is_last_chance=_is_last_chance(held, now_ns),
                left_alone=self._kept_from(held, now_ns, is_spare),
                press=self._press(model, held),
            )
            if look is None:
                self._give_up(held, None, now_ns, settled)
                continue
            reserved_ms = 0.0
            if not self._queue.is_starving(held, now_ns):
                reserved_ms = self._reserved_ms(held.query, look, now_ns)
            if look.weighed.candidates and not reserved_ms:
                self._begin(held, look, now_ns, settled)
            else:
                num_passed_over += 1
                wait_ms = min(wait_ms, self._pass_over(held, look, reserved_ms, news, now_ns))
        return wait_ms

    def _begin(self, held: HeldQuery, look: Look, now_ns: int, settled: list[Settled]) -> None:
        is_on_time = held.lane is Lane.ON_TIME
        is_late = not is_on_time and held.query.slo.ttft_ms is not None
        is_degraded = is_late or look.is_infeasible
        action = RouteAction.DEGRADE if is_degraded else RouteAction.QUEUE
        admitted = self._admitted(held.query, look, action, now_ns, has_time=not is_on_time)
        self._queue.started(held, now_ns)
        settled.append(Settled(held.query.request_id, admitted))

    def _pass_over(
        self, held: HeldQuery, look: Look, reserved_ms: float, news: int, now_ns: int
    ) -> float:
        """Milliseconds until there may be a place for it; not before that or ``news`` is it looked
        at again."""
        self._remember(held.query.model, look)
        held.obstacle = RESERVED if reserved_ms else look.weighed.obstacle
        if held.obstacle == DECODE_FULL and now_ns - held.since_ns >= self._ageing_ns:
            self._keep_room(held, now_ns)
            return float(LONGEST_WAIT_MS)  # with a look each time: reports of room are no news
        again_ms, ready_ms = LOOK_AGAIN_MS, reserved_ms or look.weighed.ready_ms
        if ready_ms > 0:
            again_ms = min(again_ms, max(1.0, ready_ms))
        held.news, held.looks_ns = news, now_ns + int(again_ms * NS_PER_MS)
        return again_ms

    def _reserved_ms(self, query: RouteQuery, look: Look, now_ns: int) -> float:
        """Until it may begin on who was chosen, since heavier classes would find nobody free for
        too long; 0 = it may, or nobody was chosen."""
        pool, weight = self._pools[query.model], query.slo.weight
        candidates = look.weighed.candidates
        if not candidates or not pool.reserve.has_heavier(weight):
            return 0.0
        chosen = candidates[0].prefill
        wait_ms, number = self._places.others(query.model, now_ns, chosen.view.instance_id)
        limit_ms = pool.reserve.limit_ms(weight, number, now_ns)
        return max(0.0, min(wait_ms, chosen.ttft_ms) - limit_ms)

    def _kept_from(
        self, held: HeldQuery, now_ns: int, is_spare: Callable[[float], bool]
    ) -> InstanceId | None:
        """None also while it is not the turn of who room is kept for: if nobody else could begin,
        it might never be."""
        kept = self._kept.get(held.query.model)
        if kept is None or kept.request_id == held.query.request_id:
            return None
        if kept.request_id not in self._queue:
            del self._kept[held.query.model]
            return None
        has_turn = self._queue.has_turn(kept.request_id, now_ns, is_spare)
        return kept.instance_id if has_turn else None

    def _keep_room(self, held: HeldQuery, now_ns: int) -> None:
        """For one query of a model at a time: the next one's turn comes when this one has gone."""
        model, request_id = held.query.model, held.query.request_id
        kept = self._kept.get(model)
        if kept is not None and kept.request_id != request_id:
            return
        instance_id = self._places.nearest_room(held.query, now_ns)
        if instance_id is not None:  # it lacks less and less, so this does not swing back and forth
            self._kept[model] = Kept(request_id, instance_id)

    def _admitted(
        self, query: RouteQuery, look: Look, action: RouteAction, now_ns: int, *, has_time: bool
    ) -> Admitted:
        """``has_time``: there is no target that it could still miss."""
        pool = self._remember(query.model, look)
        pool.started(look.weighed.work_ms, now_ns)
        chosen = look.weighed.candidates[0]
        if has_time and not chosen.is_local:
            pool.demand.begun(chosen.prefill.ttft_ms, now_ns)
        return Admitted(self._commit(query, look, action, now_ns))

    def _rejected(self, query: RouteQuery, error: IsthmusError | None, now_ns: int) -> Rejected:
        return Rejected(self._refuse(query, error, now_ns))

    def _give_up(
        self, held: HeldQuery, error: IsthmusError | None, now_ns: int, settled: list[Settled]
    ) -> None:
        # First what may break off: a query that is in no line any more must have been told why.
        rejected = self._rejected(held.query, error, now_ns)
        self._queue.remove(held.query.request_id)
        settled.append(Settled(held.query.request_id, rejected))

    def _remember(self, model: str, look: Look) -> Pool:
        weighed = look.weighed
        pool = self._pools.get(model)
        if pool is None:
            pool = Pool(weighed.ready_ms, weighed.num_workers)
            self._pools[model] = pool
        else:
            pool.ready_ms = weighed.ready_ms
            pool.num_workers = weighed.num_workers
        return pool

    def _tick_after_entry(self, model: str, now_ns: int) -> int | None:
        """At once where somebody could begin, or must perhaps be given up for who has come. Else a
        tick would find nothing to do: of many that come together, each would cost one."""
        soonest_ms = self._places.soonest_start_ms(model, now_ns)
        if not 0 < soonest_ms < float("inf"):
            return now_ns
        next_ns = self._next(now_ns, min(LONGEST_WAIT_MS, max(1.0, soonest_ms)))
        if self._queue.has_on_time(model):
            next_ns = _earlier(next_ns, max(now_ns, self._pools[model].plans_ns))
        return _earlier(self._next_tick_ns, next_ns)

    def _next(self, now_ns: int, wait_ms: float) -> int | None:
        if not len(self._queue):
            return None
        next_ns = now_ns + int(wait_ms * NS_PER_MS)
        change_ns = self._queue.next_change_ns()
        if change_ns is not None:
            next_ns = min(next_ns, max(change_ns, now_ns + NS_PER_MS))
        return next_ns


def _earlier(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


def _is_last_chance(held: HeldQuery, now_ns: int) -> bool:
    """It has waited for most of the time that it could."""
    if held.latest_start_ns is None:
        return False
    return held.latest_start_ns - now_ns < LAST_CHANCE * (now_ns - held.since_ns)


def _duplicate(request_id: RequestId) -> InvalidRequestError:
    """Not noted as a refusal: that would be taken for the end of the one that waits."""
    message = f"a request with the id {request_id!r} waits already"
    return InvalidRequestError(message, stage="route", param="request_id")


def _infeasible(query: RouteQuery, look: Look) -> InfeasibleSloError:
    """Not for load: for the size of the request, or the speed of the instances."""
    slo = query.slo
    limit_ms: float | None
    if slo.ttft_ms is not None and look.least_ttft_ms > slo.ttft_ms:
        what, predicted_ms, limit_ms = "TTFT", look.least_ttft_ms, slo.ttft_ms
    else:
        what, predicted_ms, limit_ms = "TPOT", look.least_tpot_ms, slo.tpot_ms
    return InfeasibleSloError(
        f"{query.num_prompt_tokens} prompt tokens mean a {what} of {predicted_ms:.0f} ms even on "
        f"an idle instance; the target of class {slo.class_name} is {limit_ms:g} ms",
        stage="route",
        reason="slo_infeasible",
        predicted_ms=predicted_ms,
        limit_ms=limit_ms,
    )
