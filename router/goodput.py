"""The goodput policy: which pair keeps every promise at the least cost, and can it do so now.

Joins what would become of the query on each instance (``forecast``), what that costs (``costs``)
and the pick (``choice``). A candidate is *feasible* when its TTFT and TPOT are within the query's
targets, its KV fits, and no sequence on the decode instance is pushed over its own TPOT target. It
*can start* when hardly more is before it than hides the way there. Among those, the least cost in
seconds of an instance wins.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from isthmus.common.ids import InstanceId
from isthmus.router.choice import Place, anyone, cheapest, listed
from isthmus.router.costs import local_costs, pair_costs
from isthmus.router.forecast import (
    NEVER,
    Ask,
    Forecast,
    forecast,
    is_within,
    most_ratio,
    waits,
)
from isthmus.router.policy import Candidate
from isthmus.router.prices import Prices
from isthmus.router.quantiles import FLOOR_MS
from isthmus.router.table import Bools, Floats, PairTable, PromptColumns
from isthmus.router.types import RouteQuery

DECODE_FULL = "decode_full"  # an obstacle: no KV blocks or no place in the batch


@dataclass(slots=True)
class Weighed:
    """``candidates``: that can start now and keep every promise, best first; may be empty.

    ``work_ms``: TTFT on the best instance if it were idle; ``floor_quantile_ms``: as its quantile;
    ``least_ttft_ms``, ``least_tpot_ms``: what the quickest of all that are registered would take if
    it were idle and as quick as its model says, whether it may be chosen now or not. ``ready_ms``:
    when somebody could start. ``obstacle`` names what kept the list empty.
    """

    candidates: list[Candidate]
    work_ms: float
    floor_quantile_ms: float
    least_ttft_ms: float
    least_tpot_ms: float
    ready_ms: float
    num_workers: int
    obstacle: str = ""


class GoodputPolicy:
    """Arithmetic over one ``PairTable``; owns nothing but the stream of its exploration."""

    name = "goodput"

    def __init__(
        self, stale_load_ms: float, min_remote_tokens: int, exploration: float, seed: int = 0
    ) -> None:
        self._stale_ms = stale_load_ms
        self._min_remote = min_remote_tokens
        self._exploration = exploration
        self._random = random.Random(seed)

    def weigh(
        self,
        table: PairTable,
        query: RouteQuery,
        depths: Mapping[InstanceId, int],
        ask: Ask,
        prices: Prices,
        now_ms: float,
    ) -> Weighed:
        found = forecast(table, query, depths, ask, self._min_remote, self._stale_ms, now_ms)
        remote, local, decode = found.remote, found.local, found.decode
        weighed = _outlook(found)
        pairs, alone = pair_costs(found, prices), local_costs(found, prices)
        starts = remote.wait <= table.prefills.ahead
        starts_local = local.wait <= table.local.ahead
        most = most_ratio(ask.ttft_ms, weighed.work_ms)
        remote_ratio = ask.remote.within(ask.quantile, most, ask.now_ns)
        local_ratio = ask.local.within(ask.quantile, most, ask.now_ns)
        may_pair = is_within(remote, ask, remote_ratio)
        may_decode = local.is_usable & ~decode.is_full & decode.is_kept
        may_local = is_within(local, ask, local_ratio) & starts_local
        may_local &= may_decode & decode.is_kept_local
        pairs = pairs + np.where(may_pair, 0.0, NEVER)[:, None]
        pairs += np.where(may_decode & ~found.forced_local, 0.0, NEVER)
        if ask.ttft_ms is not None and pairs.size:
            # With time to wait for whoever is there for it, a local prefill must be worth more.
            may_local &= alone <= pairs.min()
        pairs = pairs + np.where(starts, 0.0, NEVER)[:, None]
        alone = np.where(may_local, alone, NEVER)
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
        return max(0.0, float(np.where(columns.is_usable, excess, NEVER).min()))

    def least_wait_ms(self, table: PairTable, now_ms: float) -> float:
        """Until one of the instances for prompts has nothing to do: of the prefill ones, or without
        any of the mixed and decode ones."""
        for columns in (table.prefills, table.local):
            if columns.num_usable:
                return float(waits(columns, self._stale_ms, now_ms)[columns.is_usable].min())
        return NEVER

    def _choose(self, table: PairTable, pairs: Floats, alone: Floats) -> Place | None:
        chosen = cheapest(table, pairs, alone)
        if chosen is not None and self._random.random() < self._exploration:
            return anyone(self._random, pairs, alone)
        return chosen


def _outlook(found: Forecast) -> Weighed:
    """What an idle cluster could do, and when somebody of this one is free."""
    table, ask, remote, local = found.table, found.ask, found.remote, found.local
    local_idle = np.where(local.is_usable, local.prefill, NEVER)
    remote_idle = np.where(remote.is_usable, remote.prefill, NEVER)
    has_pair = remote.is_usable.any() and (local.is_usable & ~found.forced_local).any()
    best_remote = float(remote_idle.min()) if has_pair else NEVER
    best_local = float(local_idle.min()) if local_idle.size else NEVER
    work = min(best_remote, best_local)
    residuals = ask.remote if best_remote <= best_local else ask.local
    columns = table.prefills if has_pair else table.local
    wait = (remote if has_pair else local).wait - columns.ahead
    usable = remote.is_usable if has_pair else local.is_usable
    ready = float(np.where(usable, wait, NEVER).min()) if usable.size else NEVER
    ratio = residuals.within(ask.quantile, most_ratio(ask.ttft_ms, work), ask.now_ns)
    return Weighed(
        candidates=[],
        work_ms=work,
        floor_quantile_ms=(work + FLOOR_MS) * ratio - FLOOR_MS,
        least_ttft_ms=min(remote.least_ms, local.least_ms),
        least_tpot_ms=found.decode.least_ms,
        ready_ms=max(0.0, ready),
        num_workers=max(1, int(usable.sum())),
    )


def _obstacle(found: Forecast, starts: Bools, may_decode: Bools) -> str:
    """The first thing in the way, for the explanation and for refusals."""
    usable, prefills = found.local.is_usable, found.remote.is_usable
    if not usable.any():
        return "no_decode_instance"
    if not (usable & ~found.decode.is_full).any():
        return DECODE_FULL
    if not may_decode.any():
        return "tpot"
    if prefills.any() and not (starts & prefills).any():
        return "prefill_busy"
    return "ttft"
