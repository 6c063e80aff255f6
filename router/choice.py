"""Which of all that cost something: the cheapest, of near ties the least recently chosen.

Takes costs of pairs, [prefills, decodes], and of local prefills, [decodes], infinite where a
promise would be broken or nothing can start now, and returns what the decision and its explanation
need. A place is (prefill row, decode column), with row −1 for a local prefill.
"""

from __future__ import annotations

import random

import numpy as np

from isthmus.common.types import LocalPrefillReason
from isthmus.router.columns import Floats, PromptColumns
from isthmus.router.decider import local_prefill_reason
from isthmus.router.forecast import NEVER, Forecast, PromptForecast, least
from isthmus.router.policy import Candidate
from isthmus.router.predictor import DecodeOption, PrefillOption
from isthmus.router.table import PairTable

NEAR_TIE_MS = 1.0
Place = tuple[int, int]


def cheapest(table: PairTable, pairs: Floats, alone: Floats) -> Place | None:
    """None when nothing is possible. Of near ties, whose decode instance was chosen least recently,
    then whose prefill instance was."""
    best_pair, best_alone = least(pairs), least(alone)
    best = min(best_pair, best_alone)
    if best == NEVER:
        return None
    limit = best + NEAR_TIE_MS
    ties: list[tuple[float, float, int, int]] = []
    if best_pair <= limit:
        ties.append(_least_recent(table, pairs, limit))
    if best_alone <= limit:
        candidates = np.nonzero(alone <= limit)[0]
        column = int(candidates[table.local.turn[candidates].argmin()])
        turn = table.local.turn.item(column)
        ties.append((turn, turn, -1, column))
    _, _, row, column = min(ties)
    return row, column


def _least_recent(table: PairTable, pairs: Floats, limit: float) -> tuple[float, float, int, int]:
    """Of the pairs up to ``limit``; of several, the first: turns, row and column."""
    tied = (pairs.ravel() <= limit).nonzero()[0]
    rows, columns = np.divmod(tied, pairs.shape[1])
    turns = table.local.turn[columns]
    if len(tied) > 1:
        last = turns == least(turns)
        rows, columns = rows[last], columns[last]
    turns = table.prefills.turn[rows]
    first = turns.argmin()
    row, column = rows.item(first), columns.item(first)
    return table.local.turn.item(column), turns.item(first), row, column


def anyone(source: random.Random, pairs: Floats, alone: Floats) -> Place | None:
    """Each place that is possible is as likely as another; None when none is."""
    rows, columns = np.nonzero(np.isfinite(pairs))
    possible = np.nonzero(np.isfinite(alone))[0]
    if not len(rows) + len(possible):
        return None
    pick = source.randrange(len(rows) + len(possible))
    if pick < len(rows):
        return int(rows[pick]), int(columns[pick])
    return -1, int(possible[pick - len(rows)])


def listed(
    forecast: Forecast, chosen: Place, pairs: Floats, alone: Floats, min_remote_tokens: int
) -> list[Candidate]:
    """The chosen one, then the best other prefill instance for the same decode instance, the best
    other decode instance for the same prefill instance, and the decode instance alone."""
    row, column = chosen
    picks = [chosen]
    if pairs.size:
        picks.append((_best_but(pairs[:, column], row), column))
    if row >= 0:
        picks.append((row, _best_but(pairs[row], column)))
    picks.append((-1, column))
    make = _Candidates(forecast, min_remote_tokens)
    found: list[Candidate] = []
    for at, to in dict.fromkeys(picks):
        cost = pairs.item(at, to) if at >= 0 else alone.item(to)
        if cost != NEVER:
            found.append(make.of(at, to, cost))
    return found


def _best_but(costs: Floats, chosen: int) -> int:
    """Where the least of them is, but for ``chosen`` (−1 = none)."""
    if chosen >= 0:
        costs = costs.copy()
        costs[chosen] = NEVER
    return int(costs.argmin())


class _Candidates:
    """Those of one query: many share a leg."""

    def __init__(self, forecast: Forecast, min_remote_tokens: int) -> None:
        self._forecast = forecast
        self._min_remote = min_remote_tokens
        self._decodes: dict[int, DecodeOption] = {}
        self._prefills: dict[int, PrefillOption] = {}

    def of(self, row: int, column: int, cost: float) -> Candidate:
        table = self._forecast.table
        decode = self._decodes.get(column)
        if decode is None:
            decode = self._decodes[column] = self._decode(column)
        if row < 0:
            has_prefill = bool(table.prefills.num_usable)
            reason = local_prefill_reason(decode, has_prefill, self._min_remote)
            prefill = _option(table.local, self._forecast.local, column)
            return Candidate(decode, prefill, reason or LocalPrefillReason.POLICY, cost)
        if column in self._forecast.fetched:
            remote = _option(table.prefills, self._forecast.fetched[column], row)
            return Candidate(decode, remote, LocalPrefillReason.NONE, cost)
        known = self._prefills.get(row)
        remote = known or _option(table.prefills, self._forecast.remote, row)
        self._prefills[row] = remote
        return Candidate(decode, remote, LocalPrefillReason.NONE, cost)

    def _decode(self, column: int) -> DecodeOption:
        columns, decode = self._forecast.table.decodes, self._forecast.decode
        cached = int(self._forecast.local.cached.item(column))
        return DecodeOption(
            columns.views[column],
            cached,
            self._forecast.query.num_prompt_tokens - cached,
            int(columns.seqs.item(column)),
            decode.tpot.item(column),
            0.0,
            decode.is_full.item(column),
        )


def _option(columns: PromptColumns, prompt: PromptForecast, row: int) -> PrefillOption:
    humility = prompt.humility.item(row) if prompt.humility is not None else 1.0
    return PrefillOption(
        columns.views[row],
        int(prompt.cached.item(row)),
        int(prompt.uncached.item(row)),
        prompt.wait.item(row),
        prompt.prefill.item(row),
        prompt.ttft.item(row),
        columns.factor.item(row) * humility,
    )
