"""What serving a query would cost, in milliseconds of an instance, for each pair and each instance.

    λp · (prefill · speed + wait + line) + λd · KV share · ô · TPOT + transfer
        + worth · own chance to miss the TPOT target

``line``: what the prefill pool needs for all who wait for it, since whoever takes it makes them
wait; ``worth``: what one request more takes of that pool (``Press``). Answers with a TPOT target
are packed, as far as they keep it, so that decode instances stay free for prompts when many come at
once: on one that is free an answer costs ``HOST`` of its time.

``speed`` makes a second of a slow instance cheaper than one of a fast one, so that requests that
can wait leave the fast ones to those that cannot; of equal costs the tighter fit wins. The gap
before the second token, exposed transfer + step, is dear beyond ``GAP_FACTOR`` · TPOT target. A
query without targets has nothing to be feasible for: it goes where it ends soonest, as with
``LeastPredictedLoad``, whose score this is then, at prices of 1. The instances that served the
last turn of its session cost a little less.
"""

from __future__ import annotations

import numpy as np

from isthmus.router.columns import Floats
from isthmus.router.forecast import Forecast, PromptForecast, least
from isthmus.router.links import SETUP_MS
from isthmus.router.prices import Prices

GAP_FACTOR = 3.0  # second-token gap, in TPOT targets …
GAP_PENALTY = 2.0  # … and what each millisecond beyond counts: how fast a link is may be a guess
OVERLAP = 0.9  # share of the prefill during which KV already travels
HOST = 0.5  # of the answer's time, on a decode instance that could compute prompts instead
BALANCE = 0.1  # the same, on any, of an answer without a target, which is better spread
TIGHTNESS = 0.02


def prefill_costs(found: Forecast, prices: Prices, remote: PromptForecast) -> Floats:
    """[prefills]: a pair's, of the prefill instance alone."""
    if found.ask.ttft_ms is None:
        costs: Floats = remote.ttft + (prices.prefill - 1.0) * remote.prefill
    else:
        costs = remote.prefill * found.table.speed
        costs += remote.wait
        costs += found.ask.press.line_ms
        costs *= prices.prefill
        costs -= TIGHTNESS * remote.ttft
    _favour(costs, found, 0)
    return costs


def decode_costs(found: Forecast, prices: Prices) -> Floats:
    """[decodes]: of the answer alone."""
    ask = found.ask
    own: Floats = ask.output_tokens * found.decode.tpot
    num_tokens = found.query.num_prompt_tokens + ask.output_tokens
    share = num_tokens / found.table.decodes.capacity
    if ask.ttft_ms is None:
        share *= prices.decode - 1.0
        share += 1.0
    else:
        share *= prices.decode
        share += BALANCE if ask.tpot_ms is None else HOST * (found.table.decodes.seqs < 1.0)
    own *= share
    if found.decode.own_missed is not None:
        own += ask.press.worth_ms * found.decode.own_missed
    _favour(own, found, found.table.num_prefills)
    return own


def _favour(costs: Floats, found: Forecast, first: int) -> None:
    """Makes whoever served the session's last turn cheaper, in place. ``costs``: of the table's
    instances from ``first`` on."""
    last, row_of = found.ask.last, found.table.row_of
    if last is None:
        return
    for name in (last.prefill, last.decode):
        row = row_of.get(name, -1) - first if name is not None else -1
        if 0 <= row < len(costs):
            costs[row] -= last.worth_ms


def pair_costs(found: Forecast, own: Floats, rest: Floats) -> Floats:
    """[prefills, decodes]: of ``own`` (``prefill_costs``), ``rest`` (``decode_costs``) and the way
    between them. Either may be infinite. The result lives until the table's next one."""
    costs, *scratch = found.table.scratch
    if not costs.size:
        return costs
    ask = found.ask
    exposed = _exposed_ms(found, scratch)
    np.add(own[:, None], rest, out=costs)
    costs += exposed
    if ask.tpot_ms is not None:
        late = exposed
        late += found.decode.quantile
        late -= GAP_FACTOR * ask.tpot_ms
        if late.item(late.argmax()) > 0.0:
            np.maximum(late, 0.0, out=late)
            late *= GAP_PENALTY
            costs += late
    return costs


def fetched_costs(found: Forecast, column: int, own: Floats, rest: float) -> Floats:
    """[prefills]: as ``pair_costs``, of pairs with the decode instance of ``column``, from which KV
    is fetched."""
    table, ask = found.table, found.ask
    uncached = found.local.uncached.item(column)
    travel = uncached * table.decodes.token_bytes.item(column) / table.rates[:, column]
    last = np.minimum(table.prefills.budget / max(uncached, 1.0), 1.0)
    hidden = OVERLAP * found.fetched[column].prefill
    exposed = SETUP_MS + np.maximum(travel - hidden, travel * last)
    costs: Floats = own + rest + exposed
    if ask.tpot_ms is not None:
        late = exposed + (found.decode.quantile.item(column) - GAP_FACTOR * ask.tpot_ms)
        costs += GAP_PENALTY * np.maximum(late, 0.0)
    return costs


def _exposed_ms(found: Forecast, scratch: list[Floats]) -> Floats:
    """Of the transfer, after the prefill. [prefills, decodes], or [decodes] where it is the same
    from all prefill instances."""
    table, local = found.table, found.local
    num_bytes = local.uncached * table.decodes.token_bytes
    budget = table.budget
    hidden = OVERLAP * found.remote.prefill
    if table.rate is None or budget is None:
        travel, last = scratch
        np.divide(num_bytes, table.rates, out=travel)
        np.divide(table.prefills.budget[:, None], np.maximum(local.uncached, 1.0), out=last)
        np.minimum(last, 1.0, out=last)
        last *= travel
        travel -= hidden[:, None]
        exposed: Floats = np.maximum(travel, last, out=travel)
    else:
        travel = num_bytes / table.rate
        exposed = budget / np.maximum(local.uncached, 1.0)
        np.minimum(exposed, 1.0, out=exposed)
        exposed *= travel
        least_hidden = least(hidden)
        longest = travel.item(travel.argmax())
        if longest > least_hidden and np.count_nonzero(travel - least_hidden > exposed):
            # Of some prefill at least, less is hidden than all but the last chunk's.
            rest = np.subtract(travel, hidden[:, None], out=scratch[0])
            exposed = np.maximum(rest, exposed, out=rest)
    exposed += SETUP_MS
    return exposed


def local_costs(found: Forecast, prices: Prices, rest: Floats) -> Floats:
    """[decodes], with ``decode_costs``."""
    ask, columns, local = found.ask, found.table.decodes, found.local
    if ask.ttft_ms is None:
        costs: Floats = rest + local.ttft + local.prefill * (1.0 + columns.seqs) * prices.decode
        return costs
    total = local.prefill + local.wait
    total *= prices.decode
    total += rest
    return total


def least_local_cost(found: Forecast, prices: Prices, rest: Floats) -> float:
    """None of ``local_costs`` is less, of a query with a TTFT target."""
    return prices.decode * least(found.local.prefill) + least(rest)
