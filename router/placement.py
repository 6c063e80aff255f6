"""One query against the cluster as it is: what the goodput policy says, and what that means.

Joins the columns (``table``), the prefix index, what was learned (residuals, lengths, prices) and
the policy. Decides nothing about waiting: that is ``intake``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from isthmus.common.clock import NS_PER_MS, Clock
from isthmus.common.ids import InstanceId
from isthmus.router.capacity import Capacity
from isthmus.router.forecast import NEVER, NO_PRESS, Ask, Press, nearest_room
from isthmus.router.goodput import GoodputPolicy
from isthmus.router.knowledge import Knowledge
from isthmus.router.prices import Stage
from isthmus.router.quantiles import Kind, bucket_of
from isthmus.router.sessions import Sessions
from isthmus.router.state import RouterState
from isthmus.router.table import ClusterTable
from isthmus.router.types import RouteQuery
from isthmus.router.weighed import DECODE_FULL, TPOT, Weighed

_OF_DECODE = frozenset({TPOT, DECODE_FULL})


@dataclass(slots=True)
class Look:
    """``latest_start_ns``: when its prefill must begin at the latest; None without a TTFT target.

    ``is_infeasible``: by its size, whatever the load, and whoever is away or slow just now: not
    even the quickest instances meet the targets, when idle: ``least_ttft_ms``, ``least_tpot_ms``.
    """

    weighed: Weighed
    latest_start_ns: int | None
    is_infeasible: bool
    least_ttft_ms: float
    least_tpot_ms: float


class Placement:
    def __init__(
        self,
        state: RouterState,
        knowledge: Knowledge,
        policy: GoodputPolicy,
        sessions: Sessions,
        clock: Clock,
    ) -> None:
        self._state = state
        self._knowledge = knowledge
        self._policy = policy
        self._sessions = sessions
        self._clock = clock
        self._table = ClusterTable(knowledge.links, state.index.slot)
        self._doubtful: set[InstanceId] = set()  # their breakers are not closed
        self._num_rebuilt = 0
        self._soonest: dict[str, float] = {}  # ``soonest_start_ms`` by model …
        self._soonest_ns = -1  # … at that time, and nothing has changed since

    def look(
        self,
        query: RouteQuery,
        now_ns: int,
        *,
        is_on_time: bool = True,
        is_starving: bool = False,
        is_last_chance: bool = False,
        left_alone: InstanceId | None = None,
        press: Press = NO_PRESS,
    ) -> Look | None:
        """None when no instance could take it at all.

        ``is_on_time`` False: its targets are lost or it has none. ``is_starving``: all who are late
        have given way for so long that it may slow others down. ``is_last_chance``: it is lost
        otherwise, so that it will more likely than not keep its targets is enough. ``left_alone``:
        a decode instance that it may not use. ``press``: of all who wait.
        """
        self.refresh(now_ns)
        tables = self._table.of_model(query.model)
        holders = self._state.index.holders(query.hash_chains)
        ask = self._ask(query, now_ns, is_on_time=is_on_time, is_starving=is_starving, press=press)
        if is_last_chance:
            ask = replace(ask, quantile=min(0.5, ask.quantile))
        if left_alone is not None:
            ask = replace(ask, left_alone=left_alone)
        prices = self._knowledge.prices.current
        now_ms = now_ns / NS_PER_MS

        def weigh(ask: Ask) -> list[Weighed]:
            weigh_one = self._policy.weigh
            return [weigh_one(table, query, holders, ask, prices, now_ms) for table in tables]

        all_weighed, slo = weigh(ask), query.slo
        least_ttft_ms = min([weighed.least_ttft_ms for weighed in all_weighed], default=NEVER)
        least_tpot_ms = min([weighed.least_tpot_ms for weighed in all_weighed], default=NEVER)
        if ask.tpot_ms is not None and least_tpot_ms > ask.tpot_ms:
            # Nothing to wait for: nobody will ever meet it.
            ask = replace(ask, tpot_ms=None)
            all_weighed = weigh(ask)
        best: Weighed | None = None
        for weighed in all_weighed:
            if weighed.work_ms < NEVER and (best is None or _is_better(weighed, best)):
                best = weighed
        if best is None:
            return None
        return Look(
            best,
            _latest_start_ns(ask, best, now_ns),
            (slo.ttft_ms is not None and least_ttft_ms > slo.ttft_ms)
            or (slo.tpot_ms is not None and least_tpot_ms > slo.tpot_ms),
            least_ttft_ms,
            least_tpot_ms,
        )

    def nearest_room(self, query: RouteQuery, now_ns: int) -> InstanceId | None:
        """The decode instance that lacks the least for ``query``, of those that are large enough;
        None when none is."""
        self.refresh(now_ns)
        tables = self._table.of_model(query.model)
        found = [room for table in tables if (room := nearest_room(table, query)) is not None]
        return min(found)[1] if found else None

    def refresh(self, now_ns: int) -> None:
        """Brings the columns up to date."""
        state = self._state
        if state.membership_changed:
            state.membership_changed = False
            self._table.is_outdated = True
            self._num_rebuilt += 1
        dirty = state.dirty
        if not dirty and not self._doubtful and not self._table.is_outdated:
            return
        # What the clock alone may change: a breaker half opens by itself.
        dirty |= self._doubtful
        self._soonest.clear()
        self._table.refresh(state.cluster.views, dirty, state.ledger.pending, now_ns)
        views = state.cluster.views
        self._doubtful = {
            instance_id
            for instance_id in dirty
            if instance_id in views and not views[instance_id].breaker.is_closed
        }
        dirty.clear()

    def num_news(self, now_ns: int) -> int:
        """Grows whenever something has made room; reports of load, which only say better what
        was known, do not count."""
        self.refresh(now_ns)
        return self._state.ledger.num_freed + self._num_rebuilt

    def soonest_start_ms(self, model: str, now_ns: int) -> float:
        """When the first prompt more could be begun anywhere; infinite without an instance."""
        self.refresh(now_ns)
        if now_ns != self._soonest_ns:
            self._soonest_ns = now_ns
            self._soonest.clear()
        known = self._soonest.get(model)
        if known is None:
            known = self._soonest[model] = self._soonest_of(model, now_ns / NS_PER_MS)
        return known

    def _soonest_of(self, model: str, now_ms: float) -> float:
        return min(
            (
                self._policy.soonest_start_ms(columns, now_ms)
                for table in self._table.of_model(model)
                if table.local.num_usable  # else nobody could decode
                for columns in (table.prefills, table.local)
            ),
            default=NEVER,
        )

    def capacity(self, model: str, now_ns: int) -> Capacity:
        """Of the pool for prompts."""
        self.refresh(now_ns)
        now_ms = now_ns / NS_PER_MS
        waits, speeds, seen = [np.zeros(0)], [np.zeros(0)], set[InstanceId]()
        for table in self._table.of_model(model):
            part = self._policy.capacity(table, now_ms, seen)
            seen.update(view.instance_id for view in table.prefills.views)
            waits.append(part.waits)
            speeds.append(part.speeds)
        return Capacity(np.concatenate(waits), np.concatenate(speeds))

    def hope(self, model: str, now_ns: int) -> float:
        """How many workers more there would be if all instances that decode computed prompts."""
        self.refresh(now_ns)
        tables = self._table.of_model(model)
        return float(sum(table.local.num_usable for table in tables if table.prefills.num_usable))

    def others(self, model: str, now_ns: int, chosen: InstanceId) -> tuple[float, int]:
        """As the policy's, of the tables that ``chosen`` is in."""
        self.refresh(now_ns)
        found = [
            self._policy.others(table, now_ns / NS_PER_MS, chosen)
            for table in self._table.of_model(model)
            if chosen in table.row_of
        ]
        return min(wait_ms for wait_ms, _ in found), max(number for _, number in found)

    def missed(self, query: RouteQuery, obstacle: str, now_ns: int) -> None:
        """``query`` was given up: whatever was in its way is scarce."""
        stage = Stage.DECODE if obstacle in _OF_DECODE else Stage.PREFILL
        self._knowledge.prices.count(stage, query.slo.quantile, True, now_ns)

    def elapsed_ms(self, query: RouteQuery) -> float:
        """Since its arrival; 0 where that is not known."""
        return query.elapsed_ms(self._clock.now_ns())

    def _ask(
        self,
        query: RouteQuery,
        now_ns: int,
        *,
        is_on_time: bool,
        is_starving: bool,
        press: Press,
    ) -> Ask:
        slo, known = query.slo, self._knowledge
        bucket, quantile = bucket_of(query.num_prompt_tokens), slo.quantile
        ttft_ms = slo.ttft_ms if is_on_time else None
        keeps_tpot = (ttft_ms is not None or slo.ttft_ms is None) and not is_starving
        return Ask(
            output_tokens=known.lengths.expected(
                query.model, slo.class_name, query.num_prompt_tokens, query.max_output_tokens
            ),
            ttft_ms=ttft_ms,
            left_ms=NEVER if ttft_ms is None else ttft_ms - self.elapsed_ms(query),
            tpot_ms=slo.tpot_ms if keeps_tpot else None,
            quantile=quantile,
            remote=known.residuals.of(Kind.TTFT, bucket),
            local=known.residuals.of(Kind.LOCAL_TTFT, bucket),
            tpot=known.residuals.of(Kind.STEP, bucket),
            now_ns=now_ns,
            press=press,
            spares_residents=not is_starving,
            last=self._sessions.last(query),
        )


def _latest_start_ns(ask: Ask, weighed: Weighed, now_ns: int) -> int | None:
    if ask.ttft_ms is None:
        return None
    return now_ns + int((ask.left_ms - weighed.floor_quantile_ms) * NS_PER_MS)


def _is_better(one: Weighed, other: Weighed) -> bool:
    if bool(one.candidates) != bool(other.candidates):
        return bool(one.candidates)
    if one.candidates:
        return one.candidates[0].score < other.candidates[0].score
    return one.ready_ms < other.ready_ms
