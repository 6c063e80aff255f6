"""Which of all that cost something: the cheapest, of near ties the least recently chosen.

Takes costs of pairs, [prefills, decodes], and of local prefills, [decodes], infinite where a
promise would be broken or nothing can start now, and returns what the decision and its explanation
need. A place is (prefill row, decode column), with row −1 for a local prefill.
"""

from __future__ import annotations

import random

import numpy as np

from isthmus.common.types import LocalPrefillReason
from isthmus.router.decider import local_prefill_reason
from isthmus.router.forecast import NEVER, Forecast, PromptForecast
from isthmus.router.policy import Candidate
from isthmus.router.predictor import DecodeOption, PrefillOption
from isthmus.router.table import Floats, PairTable, PromptColumns

NEAR_TIE_MS = 1.0
MAX_LISTED = 4
Place = tuple[int, int]


def cheapest(table: PairTable, pairs: Floats, alone: Floats) -> Place | None:
    """None when nothing is possible."""
    best_pair = float(pairs.min()) if pairs.size else NEVER
    best_alone = float(alone.min()) if alone.size else NEVER
    best = min(best_pair, best_alone)
    if best == NEVER:
        return None
    limit = best + NEAR_TIE_MS
    ties: list[tuple[float, float, int, int]] = []
    if best_pair <= limit:
        rows, columns = np.nonzero(pairs <= limit)
        turns = table.local.turn[columns]
        order = np.lexsort((table.prefills.turn[rows], turns))
        row, column = int(rows[order[0]]), int(columns[order[0]])
        turn = float(table.local.turn[column])
        ties.append((turn, float(table.prefills.turn[row]), row, column))
    if best_alone <= limit:
        candidates = np.nonzero(alone <= limit)[0]
        column = int(candidates[table.local.turn[candidates].argmin()])
        turn = float(table.local.turn[column])
        ties.append((turn, turn, -1, column))
    _, _, row, column = min(ties)
    return row, column


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
    """The chosen one, then the best others for the same decode instance and for others."""
    row, column = chosen
    picks = [chosen]
    if pairs.size:
        near = pairs[:, column].argsort()[: MAX_LISTED // 2]
        picks += [(int(other), column) for other in near]
    if row >= 0:
        near = pairs[row].argsort()[: MAX_LISTED // 2]
        picks += [(row, int(other)) for other in near]
    picks.append((-1, column))
    found: list[Candidate] = []
    for at, to in dict.fromkeys(picks):
        cost = float(pairs[at, to] if at >= 0 else alone[to])
        if cost != NEVER:
            found.append(_candidate(forecast, (at, to), cost, min_remote_tokens))
    return found


def _candidate(forecast: Forecast, place: Place, cost: float, min_remote_tokens: int) -> Candidate:
    row, column = place
    table, local, decode = forecast.table, forecast.local, forecast.decode
    cached = int(local.cached[column])
    option = DecodeOption(
        table.decodes.views[column],
        cached,
        forecast.query.num_prompt_tokens - cached,
        int(decode.seqs[column]),
        float(decode.tpot[column]),
        0.0,
        bool(decode.is_full[column]),
    )
    if row >= 0:
        prefill = _option(table.prefills, forecast.remote, row)
        return Candidate(option, prefill, LocalPrefillReason.NONE, cost)
    reason = local_prefill_reason(option, bool(table.prefills.num_usable), min_remote_tokens)
    prefill = _option(table.local, local, column)
    return Candidate(option, prefill, reason or LocalPrefillReason.POLICY, cost)


def _option(columns: PromptColumns, prompt: PromptForecast, row: int) -> PrefillOption:
    wait, prefill = float(prompt.wait[row]), float(prompt.prefill[row])
    return PrefillOption(
        columns.views[row],
        int(prompt.cached[row]),
        int(prompt.uncached[row]),
        wait,
        prefill,
        wait + prefill,
        float(columns.factor[row]),
    )
