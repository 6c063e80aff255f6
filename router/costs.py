"""What serving a query would cost, in milliseconds of an instance, for each pair and each instance.

    λp · (prefill · speed + wait) + λd · KV share · ô · TPOT + λl · transfer + what residents lose

``speed`` makes a second of a slow instance cheaper than one of a fast one, so that requests that
can wait leave the fast ones to those that cannot; of equal costs the tighter fit wins. The gap
before the second token, exposed transfer + step, is dear beyond ``GAP_FACTOR`` · TPOT target. A
query without targets has nothing to be feasible for: it goes where it ends soonest, as with
``LeastPredictedLoad``, whose score this is then, at prices of 1.
"""

from __future__ import annotations

import numpy as np

from isthmus.router.forecast import NEVER, Forecast
from isthmus.router.links import SETUP_MS
from isthmus.router.prices import Prices
from isthmus.router.table import Floats

GAP_FACTOR = 3.0  # second-token gap, in TPOT targets …
GAP_PENALTY = 2.0  # … and what each millisecond beyond counts: how fast a link is may be a guess
OVERLAP = 0.9  # share of the prefill during which KV already travels
LOCAL_PENALTY = 1.5  # a decode instance that computes a prompt does nothing else
BALANCE = 0.1  # what a second of the query's own decoding counts where targets are met anyway
TIGHTNESS = 0.02


def pair_costs(forecast: Forecast, prices: Prices) -> Floats:
    """[prefills, decodes]."""
    table, ask = forecast.table, forecast.ask
    remote, local, decode = forecast.remote, forecast.local, forecast.decode
    columns = table.prefills
    if not columns.views or not table.decodes.views:
        return np.full((len(columns.views), len(table.decodes.views)), NEVER)
    num_bytes = local.uncached * table.decodes.token_bytes
    travel = num_bytes / table.rates
    hidden = travel - OVERLAP * remote.prefill[:, None]
    last = np.minimum(1.0, columns.budget[:, None] / np.maximum(local.uncached, 1.0))
    exposed = SETUP_MS + np.maximum(hidden, travel * last)
    if ask.ttft_ms is None:
        own = remote.ttft + (prices.prefill - 1.0) * remote.prefill
    else:
        own = prices.prefill * (remote.prefill * columns.speed + remote.wait)
        own = own - TIGHTNESS * remote.ttft
    rest = _decode_costs(forecast, prices)
    costs: Floats = own[:, None] + rest + prices.link * exposed
    if ask.tpot_ms is not None:
        late = exposed + decode.quantile - GAP_FACTOR * ask.tpot_ms
        costs = costs + GAP_PENALTY * np.maximum(late, 0.0)
    return costs


def local_costs(forecast: Forecast, prices: Prices) -> Floats:
    """[decodes]. A local prefill takes its whole length from each of the instance's sequences."""
    ask, columns = forecast.ask, forecast.table.decodes
    local, decode = forecast.local, forecast.decode
    rest = _decode_costs(forecast, prices)
    if ask.ttft_ms is None:
        costs: Floats = rest + local.ttft + local.prefill * (1.0 + columns.seqs) * prices.decode
        return costs
    slack = np.maximum(columns.tightest - decode.quantile, 1e-3)
    missed = np.minimum(local.prefill / max(1, ask.output_tokens) / slack, 1.0)
    missed = np.where(np.isinf(columns.tightest), 1.0, missed)
    lost = columns.seqs * local.prefill * missed
    own = LOCAL_PENALTY * local.prefill + local.wait
    total: Floats = prices.decode * (own + lost) + rest
    return total


def _decode_costs(forecast: Forecast, prices: Prices) -> Floats:
    ask = forecast.ask
    own: Floats = ask.output_tokens * forecast.decode.tpot
    num_tokens = forecast.query.num_prompt_tokens + ask.output_tokens
    share = num_tokens / forecast.table.decodes.capacity
    if ask.ttft_ms is None:
        costs: Floats = own * (1.0 + (prices.decode - 1.0) * share)
    else:
        costs = own * (BALANCE + prices.decode * share)
    return costs
