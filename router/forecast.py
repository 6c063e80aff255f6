"""What would become of one query on each instance of a table: times, promises and room, as columns.

For a query with uncached tokens u after c cached ones, over all instances at once::

    TTFT = wait + prefill(u, c)            first token from prefill, or from decode for a local one
    TPOT = step(b', K')                    b', K' as they will be at the handoff

each as its q-quantile (``quantiles``). Prompts that an instance computes beside its decodes hold
those up: with the share f of its time that they took lately, TPOT = step / (1 − f), or more where
what is left of them at the handoff, over the answer's length, is more. Times are milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from isthmus.common.ids import InstanceId
from isthmus.router.quantiles import FLOOR_MS, Residuals
from isthmus.router.table import Bools, DecodeColumns, Floats, PairTable, PromptColumns
from isthmus.router.types import RouteQuery

MAX_SHARE = 0.9
OVERDUE = 2.0  # of its prediction, from which on a prompt's delay counts as waiting work
NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Ask:
    """What one query wants of a choice, with what is known beside the query.

    ``ttft_ms``: its TTFT target (None = none that can be met), of which ``left_ms`` are left;
    ``remote``, ``local``, ``tpot``: how wrong predictions of a remote prefill, a local one and of
    decode steps are.
    """

    output_tokens: int
    ttft_ms: float | None
    left_ms: float
    tpot_ms: float | None
    quantile: float
    remote: Residuals
    local: Residuals
    tpot: Residuals
    now_ns: int
    spares_residents: bool = True


@dataclass(slots=True)
class PromptForecast:
    """One side's columns for one query."""

    cached: Floats
    uncached: Floats
    wait: Floats
    prefill: Floats
    is_usable: Bools
    budget: Floats  # tokens of a step
    least_ms: float  # alone, of all that it fits on, without corrections

    @property
    def ttft(self) -> Floats:
        total: Floats = self.wait + self.prefill
        return total


@dataclass(slots=True)
class DecodeForecast:
    seqs: Floats
    step: Floats  # alone
    tpot: Floats  # held up by prompts
    quantile: Floats
    is_full: Bools
    is_kept: Bools  # every TPOT promise
    is_kept_local: Bools  # also with this prompt computed there
    least_ms: float  # one sequence alone, where it is quickest, without corrections


@dataclass(slots=True)
class Forecast:
    """What one query would find on the instances of one table: prompts on its prefill instances
    (``remote``) and beside decodes (``local``)."""

    table: PairTable
    query: RouteQuery
    ask: Ask
    remote: PromptForecast
    local: PromptForecast
    decode: DecodeForecast
    forced_local: Bools  # decode instances that must compute the prompt themselves


def forecast(
    table: PairTable,
    query: RouteQuery,
    depths: Mapping[InstanceId, int],
    ask: Ask,
    min_remote_tokens: int,
    stale_ms: float,
    now_ms: float,
) -> Forecast:
    """``depths``: leading blocks of the prompt that instances have. ``stale_ms``: of silence, from
    which on it means doubt."""
    remote = _prompts(table.prefills, table.prefill_row, query, depths, stale_ms, now_ms)
    local = _prompts(table.local, table.decode_row, query, depths, stale_ms, now_ms)
    _humble(table, remote, local)
    has_prefills = bool(remote.is_usable.any())
    handoff_ms = float(remote.ttft[remote.is_usable].min()) if has_prefills else 0.0
    decode = _decodes(table.decodes, query, local, ask, handoff_ms, has_prefills, now_ms)
    forced_local = table.decodes.is_mixed | (local.uncached < min_remote_tokens)
    return Forecast(table, query, ask, remote, local, decode, forced_local)


def _prompts(
    columns: PromptColumns,
    rows: Mapping[InstanceId, int],
    query: RouteQuery,
    depths: Mapping[InstanceId, int],
    stale_ms: float,
    now_ms: float,
) -> PromptForecast:
    num_tokens = query.num_prompt_tokens
    cached = columns.cached(rows, {} if query.needs_whole_prompt else depths, num_tokens)
    uncached = num_tokens - cached
    prefill = (
        columns.base * np.ceil(uncached / columns.budget)
        + columns.token * uncached
        + columns.pair * uncached * (cached + uncached / 2)
    )
    wait = waits(columns, stale_ms, now_ms)
    is_fit = num_tokens <= columns.longest
    least = np.where(is_fit, prefill / columns.factor, NEVER)
    least_ms = float(least.min()) if least.size else NEVER
    is_usable = columns.is_usable & is_fit
    for instance_id in query.exclude:
        row = rows.get(instance_id)
        if row is not None:
            is_usable[row] = False
    return PromptForecast(cached, uncached, wait, prefill, is_usable, columns.budget, least_ms)


def waits(columns: PromptColumns, stale_ms: float, now_ms: float) -> Floats:
    """What this router has sent, less what has been done of it; what others have sent, as far
    as the last report told; and doubt, which grows with silence and with a prompt's delay."""
    age = np.maximum(now_ms - columns.heard_at, 0.0)
    doubt = np.maximum(age - stale_ms, 0.0)
    done = (now_ms - columns.head_since) / columns.factor
    overdue = np.where(columns.head > 0.0, np.maximum(done - OVERDUE * columns.head, 0.0), 0.0)
    own = columns.prompts - np.minimum(columns.head, done) + overdue
    strange = np.maximum(columns.strange - np.minimum(age, stale_ms), 0.0)
    wait: Floats = (own + strange + doubt) * columns.factor
    return wait


def _humble(table: PairTable, remote: PromptForecast, local: PromptForecast) -> None:
    """A decode instance that computes few prompts has not shown yet how slow it is: it must
    not look quicker than the quickest prefill instance would be."""
    if not remote.is_usable.any():
        return
    columns = table.prefills
    row = int(np.where(remote.is_usable, columns.token, NEVER).argmin())
    rival = (
        columns.base[row] * np.ceil(local.uncached / columns.budget[row])
        + columns.token[row] * local.uncached
        + columns.pair[row] * local.uncached * (local.cached + local.uncached / 2)
    )
    is_alone = table.decodes.is_mixed
    local.prefill = np.where(is_alone, local.prefill, np.maximum(local.prefill, rival))


def _decodes(
    columns: DecodeColumns,
    query: RouteQuery,
    local: PromptForecast,
    ask: Ask,
    handoff_ms: float,
    has_prefills: bool,
    now_ms: float,
) -> DecodeForecast:
    num_tokens, output = query.num_prompt_tokens, ask.output_tokens
    now = columns.step_ms(columns.seqs, columns.context)
    # Of those who are there, so many end before the handoff as their length says on average.
    stay = 1.0 - np.minimum(handoff_ms / np.maximum(output * now, 1.0), 0.9)
    context = columns.context * stay + num_tokens + output / 2
    step = columns.step_ms(columns.seqs * stay + 1, context)
    # Chunks of a local prompt run beside the decodes that are there.
    chunks = np.ceil(local.uncached / np.maximum(local.budget, 1.0))
    local.prefill = local.prefill + chunks * (step - columns.base)
    share = columns.prompt_share(now_ms)
    tpot = step / (1.0 - np.minimum(share, MAX_SHARE))
    # What is left of prompts there at the handoff comes before the second token.
    left = np.where(local.is_usable, np.maximum(local.wait - handoff_ms, 0.0), 0.0)
    tpot = np.maximum(tpot, step + left / output)
    tpot_local = tpot + local.prefill / output  # each sequence there bears all of it
    alone = columns.step_ms(np.ones(len(columns.views)), np.full_like(step, num_tokens))
    floor = float(alone.min()) if alone.size else 0.0
    least_ms = float((alone / columns.factor).min()) if alone.size else 0.0
    ratio = ask.tpot.within(ask.quantile, most_ratio(ask.tpot_ms, floor), ask.now_ns)
    quantile = quantile_of(tpot, ratio)
    needed = num_tokens // columns.block_size + 1 - local.cached // columns.block_size
    is_full = (needed > columns.free_blocks) | (columns.seqs + 1 > columns.max_seqs)
    is_kept = np.ones(len(columns.views), np.bool_)
    if ask.tpot_ms is not None:
        is_kept = quantile <= ask.tpot_ms
    # However long it has waited: a prompt may take minutes, and nobody joins meanwhile.
    is_kept_local = is_kept & (quantile_of(tpot_local, ratio) <= columns.tightest)
    if ask.spares_residents:
        is_kept = is_kept & (quantile <= columns.tightest)
    elif not has_prefills:
        is_kept_local = is_kept
    return DecodeForecast(
        columns.seqs, step, tpot, quantile, is_full, is_kept, is_kept_local, least_ms
    )


def most_ratio(target_ms: float | None, floor_ms: float) -> float:
    """Of measured / predicted, with which the floor just meets the target; at least 1."""
    if target_ms is None or floor_ms == NEVER:
        return NEVER
    return max(1.0, (target_ms + FLOOR_MS) / (floor_ms + FLOOR_MS))


def quantile_of(predicted: Floats, ratio: float) -> Floats:
    scaled: Floats = (predicted + FLOOR_MS) * ratio - FLOOR_MS
    return scaled


def is_within(prompt: PromptForecast, ask: Ask, ratio: float) -> Bools:
    if ask.ttft_ms is None:
        return prompt.is_usable
    is_within: Bools = prompt.is_usable & (quantile_of(prompt.ttft, ratio) <= ask.left_ms)
    return is_within
