"""Binds held queries to pairs, in order, as far as there is room (late binding).

It also keeps room: a decode instance for one query that has waited long, and instances' time for
classes that weigh more (``reserve``). Pure: told the time, says what was settled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from isthmus.common.clock import NS_PER_MS
from isthmus.common.errors import IsthmusError
from isthmus.common.ids import InstanceId, RequestId
from isthmus.common.types import RouteAction, RouteDecision
from isthmus.router.binding_round import BindingRound
from isthmus.router.holding import HeldQuery, HoldingQueue, Lane
from isthmus.router.placement import Look
from isthmus.router.places import Places
from isthmus.router.pools import Pools
from isthmus.router.types import RouteQuery
from isthmus.router.verdict import Admitted, Settled
from isthmus.router.weighed import DECODE_FULL, RESERVED

LAST_CHANCE = 0.25  # of the time waited so far, when no more is left
LONGEST_WAIT_MS = 50  # for news that does not come
LEAST_WAIT_MS = 1.0
LOOK_AGAIN_MS = 100.0  # at one that found no place, where nothing has made room

GiveUp = Callable[[HeldQuery, IsthmusError | None, int, list[Settled]], None]


@dataclass(frozen=True, slots=True)
class Kept:
    """A decode instance that is left alone until there is room for one query on it that has waited
    long: else those behind it take each block that would make that room. All others are theirs."""

    request_id: RequestId
    instance_id: InstanceId


class Binder:
    """``commit`` books a decision; ``give_up`` ends the wait of a query that nobody can take."""

    def __init__(
        self,
        queue: HoldingQueue,
        pools: Pools,
        places: Places,
        commit: Callable[[RouteQuery, Look, RouteAction, int], RouteDecision],
        give_up: GiveUp,
        ageing_ms: float,
    ) -> None:
        self._queue = queue
        self._pools = pools
        self._places = places
        self._commit = commit
        self._give_up = give_up
        self._ageing_ns = int(ageing_ms * NS_PER_MS)
        self._kept: dict[str, Kept] = {}  # by model

    def bind(self, model: str, now_ns: int, settled: list[Settled]) -> float:
        """Binds in order as far as there is room; milliseconds until there may be more."""
        pool = self._pools[model]
        walk = BindingRound(float(LONGEST_WAIT_MS))

        def is_spare(work_ms: float) -> bool:
            return pool.demand.spares(work_ms, pool.num_workers, now_ns)

        for held in self._queue.in_order(model, now_ns, is_spare):
            is_starving = self._queue.is_starving(held, now_ns)
            if walk.stops(held) and not is_starving:
                continue
            soonest_ms = self._places.soonest_start_ms(model, now_ns)
            if 0 < soonest_ms < float("inf"):
                return soonest_ms
            if walk.is_over:
                break
            news = self._places.num_news(now_ns)
            if held.news == news and now_ns < held.looks_ns:
                walk.passed(held, (held.looks_ns - now_ns) / NS_PER_MS)
                continue
            look = self._look(held, is_spare, now_ns)
            if look is None:
                self._give_up(held, None, now_ns, settled)
                continue
            reserved_ms = 0.0 if is_starving else self.reserved_ms(held.query, look, now_ns)
            if look.weighed.candidates and not reserved_ms:
                self._begin(held, look, now_ns, settled)
            else:
                walk.passed(held, self._pass_over(held, look, reserved_ms, news, now_ns))
        return walk.wait_ms

    def _look(self, held: HeldQuery, is_spare: Callable[[float], bool], now_ns: int) -> Look | None:
        is_on_time = held.lane is Lane.ON_TIME
        return self._places.look(
            held.query,
            now_ns,
            is_on_time=is_on_time,
            is_starving=self._queue.is_starving(held, now_ns),
            is_last_chance=_is_last_chance(held, now_ns),
            left_alone=self._kept_from(held, now_ns, is_spare),
            press=self._pools.press(held.query.model, held),
        )

    def _begin(self, held: HeldQuery, look: Look, now_ns: int, settled: list[Settled]) -> None:
        is_on_time = held.lane is Lane.ON_TIME
        is_late = not is_on_time and held.query.slo.ttft_ms is not None
        is_degraded = is_late or look.is_infeasible
        action = RouteAction.DEGRADE if is_degraded else RouteAction.QUEUE
        admitted = self.admitted(held.query, look, action, now_ns, has_time=not is_on_time)
        self._queue.started(held, now_ns)
        settled.append(Settled(held.query.request_id, admitted))

    def _pass_over(
        self, held: HeldQuery, look: Look, reserved_ms: float, news: int, now_ns: int
    ) -> float:
        """Milliseconds until there may be a place for it; not before that or ``news`` is it looked
        at again."""
        self._pools.remember(held.query.model, look)
        held.obstacle = RESERVED if reserved_ms else look.weighed.obstacle
        if held.obstacle == DECODE_FULL and now_ns - held.since_ns >= self._ageing_ns:
            self._keep_room(held, now_ns)
            return float(LONGEST_WAIT_MS)  # with a look each time: reports of room are no news
        again_ms, ready_ms = LOOK_AGAIN_MS, reserved_ms or look.weighed.ready_ms
        if ready_ms > 0:
            again_ms = min(again_ms, max(LEAST_WAIT_MS, ready_ms))
        held.news, held.looks_ns = news, now_ns + int(again_ms * NS_PER_MS)
        return again_ms

    def reserved_ms(self, query: RouteQuery, look: Look, now_ns: int) -> float:
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

    def admitted(
        self, query: RouteQuery, look: Look, action: RouteAction, now_ns: int, *, has_time: bool
    ) -> Admitted:
        """``has_time``: there is no target that it could still miss."""
        pool = self._pools.remember(query.model, look)
        pool.started(look.weighed.work_ms, now_ns)
        chosen = look.weighed.candidates[0]
        if has_time and not chosen.is_local:
            pool.demand.begun(chosen.prefill.ttft_ms, now_ns)
        return Admitted(self._commit(query, look, action, now_ns))


def _is_last_chance(held: HeldQuery, now_ns: int) -> bool:
    """It has waited for most of the time that it could."""
    if held.has_last_chance or held.latest_start_ns is None:
        return held.has_last_chance
    return held.latest_start_ns - now_ns < LAST_CHANCE * (now_ns - held.since_ns)
