"""What would become of one query on each instance of a table: times, promises and room, as columns.

For a query with uncached tokens u after c cached ones, over all instances at once::

    TTFT = wait + prefill(u, c)            first token from prefill, or from decode for a local one
    TPOT = step(b', K')                    b', K' as they will be at the handoff

each at the quantile that its class asks for (``quantiles``). Prompts that an instance computes
beside its decodes hold those up, but not beyond the pace of their TPOT targets (``common.pacing``):
with the share f of its time that they took lately, TPOT = step / (1 − f), or more where what is
left of them at the handoff, over the answer's length, is more; the pace at most. And a prompt there
takes as many decode steps longer as its chunks need to fit between them. Times are milliseconds.

An operation costs as much as its call, for tens of instances: what is the same for all of them is
a number, and what is zero everywhere is left out. Columns may be windows of a table's: never
written to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from isthmus.common.ids import InstanceId
from isthmus.common.pacing import LEAST_SHARE, PACE
from isthmus.router.blocks import Holders
from isthmus.router.columns import Bools, Floats, PromptColumns
from isthmus.router.links import SETUP_MS
from isthmus.router.predictor import MAX_DOUBT_MS
from isthmus.router.quantiles import FLOOR_MS, Residuals, ratio_of
from isthmus.router.sessions import LastServed
from isthmus.router.table import PairTable
from isthmus.router.types import RouteQuery

MAX_HOLDERS = 4  # decode instances that a prompt's KV may be fetched from, for one decision
MAX_SHARE = 0.9
NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Press:
    """``line_ms``: how long the prefill instances need for all who wait for them in time;
    ``worth_ms``: what one of those takes of them on average, which is what another one is worth."""

    line_ms: float = 0.0
    worth_ms: float = 0.0


NO_PRESS = Press()


@dataclass(slots=True)
class Ask:
    """What one query wants of a choice, with what is known beside the query.

    ``ttft_ms``: its TTFT target (None = none that can be met), of which ``left_ms`` are left;
    ``remote``, ``local``, ``tpot``: how wrong predictions of a remote prefill, a local one and of
    decode steps are;
    ``last``: where its session's last turn was served.
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
    press: Press
    spares_residents: bool = True
    last: LastServed | None = None
    left_alone: InstanceId | None = None  # whose room is kept for another query


@dataclass(slots=True)
class PromptForecast:
    """One side's columns for one query."""

    cached: Floats
    uncached: Floats
    wait: Floats
    prefill: Floats
    ttft: Floats
    barred: Floats  # infinite where it may not be computed, else 0
    num_usable: int
    humility: Floats | None = None  # how much longer than by their own models and factors

    def usable(self, column: Floats) -> Floats:
        """``column``, but infinite where the prompt may not be computed."""
        if self.num_usable == len(column):
            return column
        barred: Floats = column + self.barred
        return barred

    def is_surely_within(self, limit_ms: float, ratio: float) -> bool:
        """Every TTFT, times ``ratio``; False when one at least might be longer."""
        if not self.ttft.size:
            return True
        longest = self.ttft.item(self.ttft.argmax())
        return (longest + FLOOR_MS) * ratio - FLOOR_MS <= limit_ms


@dataclass(slots=True)
class DecodeForecast:
    tpot: Floats  # held up by prompts
    quantile: Floats  # of a step: how far prompts hold it up is the instance's choice
    is_full: Bools
    is_kept: Bools  # every TPOT promise
    ratio: float  # of the quantile
    own_missed: Floats | None  # how likely the query misses its own; None without one
    least_ms: float  # one sequence alone, where it is quickest, without corrections


@dataclass(slots=True)
class Forecast:
    """What one query would find on the instances of one table: prompts on its prefill instances
    (``remote``) and beside decodes (``local``). ``least_ttft_ms``: alone, of all instances that it
    fits on, without corrections."""

    table: PairTable
    query: RouteQuery
    ask: Ask
    remote: PromptForecast
    local: PromptForecast
    decode: DecodeForecast
    fetched: dict[int, PromptForecast]
    """As ``remote``, for pairs with the decode instance of this column, from which prefill
    instances fetch KV that they lack."""
    forced_local: Bools | None  # who must compute the prompt where it is decoded; None = nobody
    least_ttft_ms: float


def forecast(
    table: PairTable,
    query: RouteQuery,
    holders: Holders,
    ask: Ask,
    min_remote_tokens: int,
    stale_ms: float,
    now_ms: float,
) -> Forecast:
    """``holders``: of the prompt's leading blocks. ``stale_ms``: of silence, from which on it means
    doubt."""
    columns, num_tokens, count = table.prompts, query.num_prompt_tokens, table.num_prefills
    if query.needs_whole_prompt or not holders:
        blocks = np.zeros(len(columns.views))
    else:
        blocks = table.cached_blocks(holders)
        np.minimum(blocks, (num_tokens - 1) // table.block_size, out=blocks)
    cached = blocks * table.block_size
    uncached = num_tokens - cached
    pairs = uncached / 2
    pairs += cached  # what each uncached token attends to, on average
    chunks = np.ceil(uncached / columns.budget)
    prefill = columns.base * chunks
    prefill += columns.token * uncached
    prefill += columns.pair * uncached * pairs
    wait = waits(columns, stale_ms, now_ms)
    ttft = wait + prefill
    alone: Floats = prefill / columns.factor
    barred = columns.barred
    is_special = bool(query.exclude) or num_tokens > columns.shortest
    if is_special:
        barred = _barred(table, query, alone)

    def side(part: slice, num_usable: int) -> PromptForecast:
        if is_special:
            num_usable -= int(np.count_nonzero(barred[part] > columns.barred[part]))
        return PromptForecast(
            cached[part],
            uncached[part],
            wait[part],
            prefill[part],
            ttft[part],
            barred[part],
            num_usable,
        )

    remote = side(slice(count), table.prefills.num_usable)
    local = side(slice(count, None), table.local.num_usable)
    handoff_ms = 0.0
    if remote.num_usable:
        _humble(table, remote, local, pairs[count:], is_special=is_special)
        handoff_ms = least(remote.usable(remote.ttft))
    needed = num_tokens // table.decodes.block_size + 1 - blocks[count:]
    if ask.left_alone is not None and table.row_of.get(ask.left_alone, -1) >= count:
        needed[table.row_of[ask.left_alone] - count] = NEVER
    decode = _decodes(table, query, local, ask, chunks[count:], needed, handoff_ms, now_ms)
    forced: Bools | None = None
    if table.decodes.has_mixed or least(local.uncached) < min_remote_tokens:
        forced = table.decodes.is_mixed | (local.uncached < min_remote_tokens)
    fetched = _fetched(table, query, remote, local)
    return Forecast(table, query, ask, remote, local, decode, fetched, forced, least(alone))


def _barred(table: PairTable, query: RouteQuery, alone: Floats) -> Floats:
    """With those on which the prompt does not fit, which are no measure of what is possible alone,
    and those that must not be chosen."""
    unfit = query.num_prompt_tokens > table.prompts.longest
    alone[unfit] = NEVER
    barred: Floats = table.prompts.barred.copy()
    barred[unfit] = NEVER
    for instance_id in query.exclude:
        row = table.row_of.get(instance_id)
        if row is not None:
            barred[row] = NEVER
    return barred


def _fetched(
    table: PairTable, query: RouteQuery, remote: PromptForecast, local: PromptForecast
) -> dict[int, PromptForecast]:
    """For the few decode instances that hold most of the prompt: who could fetch it from them need
    not compute it, after the time that it takes to come."""
    if not table.has_fetches or not remote.num_usable or query.needs_whole_prompt:
        return {}
    enough = least(remote.cached + table.fetch_min)
    holders = np.nonzero(local.cached >= enough)[0]
    if len(holders) > MAX_HOLDERS:
        holders = holders[local.cached[holders].argsort(kind="stable")[-MAX_HOLDERS:]]
    columns, fetched = table.prefills, {}
    for column in holders.tolist():
        # Whole blocks of the one that fetches; a token at least is left to compute.
        held = min(local.cached.item(column), query.num_prompt_tokens - 1)
        blocks = held // table.prefill_blocks * table.prefill_blocks
        missing = blocks - remote.cached
        fetches = missing >= table.fetch_min
        cached = np.where(fetches, blocks, remote.cached)
        uncached = query.num_prompt_tokens - cached
        # What comes back is as fast as what goes there.
        travel = missing * table.decodes.token_bytes.item(column) / table.rates[:, column]
        prefill = SETUP_MS + travel + columns.base * np.ceil(uncached / columns.budget)
        prefill += columns.token * uncached + columns.pair * uncached * (cached + uncached / 2)
        prefill = np.where(fetches, prefill, remote.prefill)
        fetched[column] = replace(
            remote, cached=cached, uncached=uncached, prefill=prefill, ttft=remote.wait + prefill
        )
    return fetched


def waits(columns: PromptColumns, stale_ms: float, now_ms: float) -> Floats:
    """What this router has sent, less what has been done of it; what others have sent, as far
    as the last report told; and doubt, for silence and for a prompt's delay."""
    done = (now_ms - columns.head_since) / columns.factor
    wait: Floats = columns.prompts - np.minimum(columns.head, done)
    done -= columns.head_late
    wait += np.maximum(done, 0.0, out=done)
    is_stale = now_ms - least(columns.heard_at) > stale_ms
    if is_stale or columns.has_strange:
        wait += _unreported(columns, stale_ms, now_ms)
    wait *= columns.factor
    return wait


def _unreported(columns: PromptColumns, stale_ms: float, now_ms: float) -> Floats:
    """What others have sent and no report tells the end of, and doubt of who is silent while others
    of its kind report. Where nobody does it is the way here that fails, or this process that
    stood still: they work on as they did, and doubt would keep all of them idle."""
    age = np.maximum(now_ms - columns.heard_at, 0.0)
    trusted = np.minimum(age, stale_ms)
    for side in columns.sides:
        if least(age[side] + columns.barred[side]) > stale_ms:
            trusted[side] = age[side]
    unreported: Floats = np.maximum(columns.strange - trusted, 0.0)
    unreported += np.minimum(age - trusted, MAX_DOUBT_MS)
    return unreported


def _humble(
    table: PairTable,
    remote: PromptForecast,
    local: PromptForecast,
    pairs: Floats,
    *,
    is_special: bool,
) -> None:
    """A decode instance that computes few prompts has not shown yet how slow it is: it must
    not look quicker than the quickest prefill instance would be."""
    columns, row = table.prefills, table.quickest
    if is_special:
        row = int((columns.token + remote.barred).argmin())
    rival = columns.base.item(row) * np.ceil(local.uncached / columns.budget.item(row))
    rival += columns.token.item(row) * local.uncached
    rival += columns.pair.item(row) * local.uncached * pairs
    np.maximum(rival, local.prefill, out=rival)
    if table.decodes.has_mixed:
        rival = np.where(table.decodes.is_mixed, local.prefill, rival)
    # What is measured is held against this prediction: it must not be mistaken for its own.
    local.humility = rival / local.prefill
    local.prefill = rival


def _decodes(
    table: PairTable,
    query: RouteQuery,
    local: PromptForecast,
    ask: Ask,
    chunks: Floats,
    needed: Floats,
    handoff_ms: float,
    now_ms: float,
) -> DecodeForecast:
    """``chunks``: steps that the prompt takes; ``needed``: blocks that it would take up. Completes
    ``local`` by the decodes that its chunks run beside."""
    columns, output = table.decodes, ask.output_tokens
    # Of those who are there, so many end before the handoff as their length says on average.
    stay = output * columns.step
    stay = 1.0 - np.minimum(handoff_ms / np.maximum(stay, 1.0, out=stay), 0.9)
    context = columns.context * stay
    context += query.num_prompt_tokens
    context += output / 2
    stay *= columns.seqs
    stay += 1
    step = columns.step_ms(stay, context)
    # Steps of those who are there, while chunks fill what these leave of their pace.
    pace = PACE * columns.tightest
    beside = (local.wait + local.prefill) / np.maximum(pace - columns.step, LEAST_SHARE * pace)
    np.minimum(beside, output, out=beside)
    beside *= columns.step
    local.prefill = local.prefill + np.maximum(beside, chunks * (step - columns.base))
    local.ttft = local.wait + local.prefill
    tpot = step
    if columns.prompted:
        tpot = step / (1.0 - np.minimum(columns.prompt_share(now_ms), MAX_SHARE))
    if local.wait.item(local.wait.argmax()) > handoff_ms:
        left = np.where(local.barred == 0.0, np.maximum(local.wait - handoff_ms, 0.0), 0.0)
        tpot = np.maximum(tpot, step + left / output)
    if tpot is not step and ask.tpot_ms is not None:
        tpot = np.minimum(tpot, np.maximum(step, PACE * ask.tpot_ms))
    alone = columns.step_of_one_ms(query.num_prompt_tokens)
    ratio = ask.tpot.within(ask.quantile, most_ratio(ask.tpot_ms, least(alone)), ask.now_ns)
    quantile = quantile_of(step, ratio)
    own_missed: Floats | None = None
    limit: float | Floats = NEVER
    if ask.tpot_ms is not None:
        limit = ask.tpot_ms
        own_missed = ask.tpot.share_above((ask.tpot_ms + FLOOR_MS) / (step + FLOOR_MS))
    if ask.spares_residents:
        limit = np.minimum(columns.tightest, limit)
    is_kept: Bools = quantile <= limit
    return DecodeForecast(
        tpot,
        quantile,
        needed > columns.room,
        is_kept,
        ratio,
        own_missed,
        least(alone / columns.factor),
    )


def least(column: Floats) -> float:
    """Infinite of nothing. Half of what ``column.min()`` costs."""
    return column.item(column.argmin()) if column.size else NEVER


def nearest_room(table: PairTable, query: RouteQuery) -> tuple[float, InstanceId] | None:
    """Which decode instance lacks the fewest blocks for it, and how many; None when it is too long
    for all that may be chosen."""
    columns, local, count = table.decodes, table.local, table.num_prefills
    is_fit = (local.barred == 0.0) & (query.num_prompt_tokens <= local.longest)
    for instance_id in query.exclude:
        if table.row_of.get(instance_id, -1) >= count:
            is_fit[table.row_of[instance_id] - count] = False
    if not is_fit.any():
        return None
    lacks = query.num_prompt_tokens // columns.block_size + 1 - columns.room
    lacks = np.where(is_fit, lacks, NEVER)
    row = int(lacks.argmin())
    return lacks.item(row), columns.views[row].instance_id


def most_ratio(target_ms: float | None, floor_ms: float) -> float:
    """Of measured / predicted, with which the floor just meets the target; at least 1."""
    if target_ms is None or floor_ms == NEVER:
        return NEVER
    return max(1.0, ratio_of(target_ms, floor_ms))


def quantile_of(predicted: Floats, ratio: float) -> Floats:
    scaled: Floats = predicted + FLOOR_MS
    scaled *= ratio
    scaled -= FLOOR_MS
    return scaled
