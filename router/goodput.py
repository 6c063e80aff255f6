"""The goodput policy: which pair keeps every promise at the least cost, and can it do so now.

Joins what would become of the query on each instance (``forecast``), what that costs (``costs``)
and the pick (``choice``). A candidate is *feasible* when its TTFT and TPOT are within the query's
targets, its KV fits, and no sequence on the decode instance is pushed over its own TPOT target. It
*can start* when hardly more is before it than hides the way there. Among those, the least cost in
seconds of an instance wins.
"""

from __future__ import annotations

import random
from collections.abc import Collection

import numpy as np

from isthmus.common.ids import InstanceId
from isthmus.router.blocks import Holders
from isthmus.router.capacity import Capacity
from isthmus.router.choice import Place, anyone, cheapest, listed
from isthmus.router.columns import Bools, Floats, PromptColumns
from isthmus.router.costs import (
    decode_costs,
    fetched_costs,
    least_local_cost,
    local_costs,
    pair_costs,
    prefill_costs,
)
from isthmus.router.forecast import (
    NEVER,
    Ask,
    Forecast,
    PromptForecast,
    forecast,
    least,
    most_ratio,
    quantile_of,
    waits,
)
from isthmus.router.native import Weigher
from isthmus.router.prices import Prices
from isthmus.router.quantiles import FLOOR_MS
from isthmus.router.table import PairTable
from isthmus.router.types import RouteQuery
from isthmus.router.weighed import (
    DECODE_FULL,
    NO_DECODE_INSTANCE,
    PREFILL_BUSY,
    TPOT,
    TTFT,
    Weighed,
)


class GoodputPolicy:
    """Arithmetic over one ``PairTable``; owns nothing but the stream of its exploration.

    ``is_compiled``: with ``native``, where there is a compiler. What is in this file says the same
    in numpy.
    """

    name = "goodput"

    def __init__(
        self,
        stale_load_ms: float,
        min_remote_tokens: int,
        exploration: float,
        seed: int = 0,
        *,
        is_compiled: bool = True,
    ) -> None:
        self._stale_ms = stale_load_ms
        self._min_remote = min_remote_tokens
        self._exploration = exploration
        self._random = random.Random(seed)
        self._native: Weigher | None = None
        if is_compiled:
            self._native = Weigher.create(min_remote_tokens, stale_load_ms)

    def weigh(
        self,
        table: PairTable,
        query: RouteQuery,
        holders: Holders,
        ask: Ask,
        prices: Prices,
        now_ms: float,
    ) -> Weighed:
        if self._native is None:
            return self._weigh(table, query, holders, ask, prices, now_ms)
        weighed = self._native.weigh(table, query, holders, ask, prices, now_ms)
        if weighed.candidates and self._explores():
            weighed = self._native.explore(table, query, self._random)
        return weighed

    def _weigh(
        self,
        table: PairTable,
        query: RouteQuery,
        holders: Holders,
        ask: Ask,
        prices: Prices,
        now_ms: float,
    ) -> Weighed:
        found = forecast(table, query, holders, ask, self._min_remote, self._stale_ms, now_ms)
        weighed, ratios = _outlook(found)
        starts = found.remote.wait <= table.prefills.ahead
        may_decode = found.decode.is_kept > found.decode.is_full  # kept, and not full
        if found.local.num_usable < len(may_decode):
            may_decode &= found.local.barred == 0.0
        if not np.count_nonzero(may_decode):
            weighed.obstacle = _obstacle(found, starts, may_decode)
            return weighed
        rest = decode_costs(found, prices)
        pairs = self._pairs(found, prices, rest, may_decode, ratios[0])
        least_pair = least(pairs)
        if np.count_nonzero(starts) < len(starts):
            pairs[~starts] = NEVER
        alone = self._alone(found, prices, rest, may_decode, ratios[1], least_pair)
        chosen = self._choose(table, pairs, alone)
        if chosen is None:
            weighed.obstacle = _obstacle(found, starts, may_decode)
        else:
            weighed.candidates = listed(found, chosen, pairs, alone, self._min_remote)
        return weighed

    def soonest_start_ms(self, columns: PromptColumns, now_ms: float) -> float:
        """When one more prompt could be begun on one of these; infinite when none is usable."""
        if not columns.num_usable:
            return NEVER
        excess = waits(columns, self._stale_ms, now_ms) - columns.ahead
        return max(0.0, least(excess + columns.barred))

    def others(self, table: PairTable, now_ms: float, chosen: InstanceId) -> tuple[float, int]:
        """Of the instances that may compute prompts, but for ``chosen``: when the first of them is
        free, from now, and how many there are."""
        columns = table.prompts
        excess = waits(columns, self._stale_ms, now_ms) + columns.barred
        excess[table.row_of[chosen]] = NEVER
        return least(excess), int(np.count_nonzero(excess < NEVER))

    def capacity(
        self, table: PairTable, now_ms: float, counted: Collection[InstanceId] = ()
    ) -> Capacity:
        """Of the prefill instances but those ``counted`` already, or without any of the mixed and
        decode ones."""
        if table.prefills.num_usable:
            columns, speed = table.prefills, table.speed
        else:
            columns, speed = table.local, np.ones(len(table.local.views))
        usable = columns.barred == 0.0
        if counted:
            usable &= [view.instance_id not in counted for view in columns.views]
        return Capacity(waits(columns, self._stale_ms, now_ms)[usable], speed[usable])

    def _pairs(
        self,
        found: Forecast,
        prices: Prices,
        rest: Floats,
        may_decode: Bools,
        ratio: float,
    ) -> Floats:
        """Costs of pairs, infinite where a promise would be broken. ``ratio``: of the quantile."""
        if found.forced_local is not None:
            may_decode = may_decode & ~found.forced_local
        if np.count_nonzero(may_decode) < len(may_decode):
            rest = np.where(may_decode, rest, NEVER)
        pairs = pair_costs(found, self._own(found, prices, found.remote, ratio), rest)
        for column, remote in found.fetched.items():
            own = self._own(found, prices, remote, ratio)
            pairs[:, column] = fetched_costs(found, column, own, rest.item(column))
        return pairs

    @staticmethod
    def _own(found: Forecast, prices: Prices, remote: PromptForecast, ratio: float) -> Floats:
        own, ask = prefill_costs(found, prices, remote), found.ask
        if ask.ttft_ms is not None and not remote.is_surely_within(ask.left_ms, ratio):
            own[quantile_of(remote.ttft, ratio) > ask.left_ms] = NEVER
        return remote.usable(own)

    def _alone(
        self,
        found: Forecast,
        prices: Prices,
        rest: Floats,
        may_decode: Bools,
        ratio: float,
        least_pair: float,
    ) -> Floats:
        """Costs of local prefills, infinite where a promise would be broken or none could begin.
        With time to wait for whoever is there for it, a local prefill must be worth more than the
        best of the pairs (``least_pair``), whether that can begin or not."""
        ask, local, is_urgent = found.ask, found.local, found.ask.ttft_ms is not None
        if is_urgent and least_local_cost(found, prices, rest) > least_pair:
            return found.table.nowhere
        may_local = may_decode & (local.wait <= found.table.local.ahead)
        if is_urgent and not local.is_surely_within(ask.left_ms, ratio):
            may_local &= quantile_of(local.ttft, ratio) <= ask.left_ms
        alone = np.where(may_local, local_costs(found, prices, rest), NEVER)
        if is_urgent and found.table.num_prefills:
            alone[alone > least_pair] = NEVER
        return alone

    def _choose(self, table: PairTable, pairs: Floats, alone: Floats) -> Place | None:
        chosen = cheapest(table, pairs, alone)
        if chosen is not None and self._explores():
            return anyone(self._random, pairs, alone)
        return chosen

    def _explores(self) -> bool:
        return self._random.random() < self._exploration


def _outlook(found: Forecast) -> tuple[Weighed, tuple[float, float]]:
    """What an idle cluster could do, and when somebody of this one is free; and how wrong the TTFT
    of a remote and of a local prefill may turn out to be."""
    table, ask, remote, local = found.table, found.ask, found.remote, found.local
    can_pair = remote.num_usable and local.num_usable
    if can_pair and found.forced_local is not None:
        can_pair = bool(((local.barred == 0.0) & ~found.forced_local).any())
    best_remote = NEVER
    if can_pair:
        sides = (remote, *found.fetched.values())
        best_remote = min(least(side.usable(side.prefill)) for side in sides)
    best_local = least(local.usable(local.prefill))
    work = min(best_remote, best_local)
    most = most_ratio(ask.ttft_ms, work)
    ratios = (
        ask.remote.within(ask.quantile, most, ask.now_ns),
        ask.local.within(ask.quantile, most, ask.now_ns),
    )
    ratio = ratios[0] if best_remote <= best_local else ratios[1]
    side, columns = (remote, table.prefills) if can_pair else (local, table.local)
    excess = side.wait - columns.ahead
    weighed = Weighed(
        candidates=[],
        work_ms=work,
        floor_quantile_ms=(work + FLOOR_MS) * ratio - FLOOR_MS,
        least_ttft_ms=found.least_ttft_ms,
        least_tpot_ms=found.decode.least_ms,
        ready_ms=max(0.0, least(side.usable(excess))),
        num_workers=max(1, side.num_usable),
    )
    return weighed, ratios


def _obstacle(found: Forecast, starts: Bools, may_decode: Bools) -> str:
    """The first thing in the way, for the explanation and for refusals."""
    usable, prefills = found.local.barred == 0.0, found.remote.barred == 0.0
    if not usable.any():
        return NO_DECODE_INSTANCE
    if not (usable & ~found.decode.is_full).any():
        return DECODE_FULL
    if not may_decode.any():
        return TPOT
    if prefills.any() and not (starts & prefills).any():
        return PREFILL_BUSY
    return TTFT
