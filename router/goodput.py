"""The goodput policy: which pair keeps every promise at the least cost, and can it do so now.

For a query with uncached tokens u after c cached ones, over all instances at once::

    TTFT = wait + prefill(u, c)            first token from prefill, or from decode for a local one
    TPOT = step(b', K')                    b', K' as they will be at the handoff
    gap  = exposed transfer + step         second token, dear beyond ``GAP_FACTOR`` · TPOT target

each as its q-quantile (``quantiles``). Prompts that an instance computes beside its decodes hold
those up: with the share f of its time that they took lately, TPOT = step / (1 − f), or more where
what is left of them at the handoff, over the answer's length, is more. A candidate is
*feasible* when its TTFT and TPOT are within the query's targets, its KV fits, and no sequence on
the decode instance is pushed over its own TPOT target. It *can start* when hardly more is before
it than hides the way there. Among those, the least cost in seconds of an instance wins::

    λp · (prefill · speed + wait) + λd · KV share · ô · TPOT + λl · transfer + what residents lose

``speed`` makes a second of a slow instance cheaper than one of a fast one, so that requests that
can wait leave the fast ones to those that cannot; of equal costs the tighter fit wins. A query
without targets has nothing to be feasible for: it goes where it ends soonest, as with
``LeastPredictedLoad``, whose score this is then, at prices of 1.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from isthmus.common.ids import InstanceId
from isthmus.common.types import LocalPrefillReason
from isthmus.router.decider import local_prefill_reason
from isthmus.router.links import SETUP_MS
from isthmus.router.policy import Candidate
from isthmus.router.predictor import DecodeOption, PrefillOption
from isthmus.router.prices import Prices
from isthmus.router.quantiles import FLOOR_MS, Residuals
from isthmus.router.table import Bools, DecodeColumns, Floats, PairTable, PromptColumns
from isthmus.router.types import RouteQuery

GAP_FACTOR = 3.0  # second-token gap, in TPOT targets …
GAP_PENALTY = 2.0  # … and what each millisecond beyond counts: how fast a link is may be a guess
OVERLAP = 0.9  # share of the prefill during which KV already travels
LOCAL_PENALTY = 1.5  # a decode instance that computes a prompt does nothing else
BALANCE = 0.1  # what a second of the query's own decoding counts where targets are met anyway
TIGHTNESS = 0.02
MAX_SHARE = 0.9
OVERDUE = 2.0  # of its prediction, from which on a prompt's delay counts as waiting work
NEAR_TIE_MS = 1.0
MAX_LISTED = 4
NEVER = float("inf")
DECODE_FULL = "decode_full"  # an obstacle: no KV blocks or no place in the batch


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


@dataclass(slots=True)
class _Prompt:
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
class _Decode:
    seqs: Floats
    step: Floats  # alone
    tpot: Floats  # held up by prompts
    quantile: Floats
    is_full: Bools
    is_kept: Bools  # every TPOT promise
    is_kept_local: Bools  # also with this prompt computed there
    least_ms: float  # one sequence alone, where it is quickest, without corrections


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
        remote = self._prompt(table.prefills, table.prefill_row, query, depths, now_ms)
        local = self._prompt(table.local, table.decode_row, query, depths, now_ms)
        self._humble(table, remote, local)
        has_prefills = bool(remote.is_usable.any())
        handoff_ms = float(remote.ttft[remote.is_usable].min()) if has_prefills else 0.0
        decode = self._decode(table.decodes, query, local, ask, handoff_ms, has_prefills, now_ms)
        forced_local = table.decodes.is_mixed | (local.uncached < self._min_remote)
        weighed = self._outlook(table, ask, remote, local, decode, forced_local)
        pair_costs = self._pair_costs(table, query, ask, prices, remote, local, decode)
        local_costs = self._local_costs(table, query, ask, prices, local, decode)
        starts = remote.wait <= table.prefills.ahead
        starts_local = local.wait <= table.local.ahead
        most = _most_ratio(ask.ttft_ms, weighed.work_ms)
        remote_ratio = ask.remote.within(ask.quantile, most, ask.now_ns)
        local_ratio = ask.local.within(ask.quantile, most, ask.now_ns)
        may_pair = _within(remote, ask, remote_ratio)
        may_decode = local.is_usable & ~decode.is_full & decode.is_kept
        may_local = _within(local, ask, local_ratio) & starts_local
        may_local &= may_decode & decode.is_kept_local
        pair_costs = pair_costs + np.where(may_pair, 0.0, NEVER)[:, None]
        pair_costs += np.where(may_decode & ~forced_local, 0.0, NEVER)
        if ask.ttft_ms is not None and pair_costs.size:
            # With time to wait for whoever is there for it, a local prefill must be worth more.
            may_local &= local_costs <= pair_costs.min()
        pair_costs = pair_costs + np.where(starts, 0.0, NEVER)[:, None]
        local_costs = np.where(may_local, local_costs, NEVER)
        chosen = self._best(table, pair_costs, local_costs)
        if chosen is None:
            weighed.obstacle = _obstacle(starts, may_decode, decode, remote, local)
            return weighed
        weighed.candidates = self._listed(
            table, query, chosen, pair_costs, local_costs, remote, local, decode
        )
        return weighed

    def soonest_start_ms(self, columns: PromptColumns, now_ms: float) -> float:
        """When one more prompt could be begun on one of these; infinite when none is usable."""
        if not columns.num_usable:
            return NEVER
        excess = self._wait(columns, now_ms) - columns.ahead
        return max(0.0, float(np.where(columns.is_usable, excess, NEVER).min()))

    def least_wait_ms(self, table: PairTable, now_ms: float) -> float:
        """Until one of the instances for prompts has nothing to do: of the prefill ones, or without
        any of the mixed and decode ones."""
        for columns in (table.prefills, table.local):
            if columns.num_usable:
                return float(self._wait(columns, now_ms)[columns.is_usable].min())
        return NEVER

    # --- predictions -----------------------------------------------------------------------------

    def _prompt(
        self,
        columns: PromptColumns,
        rows: Mapping[InstanceId, int],
        query: RouteQuery,
        depths: Mapping[InstanceId, int],
        now_ms: float,
    ) -> _Prompt:
        num_tokens = query.num_prompt_tokens
        cached = columns.cached(rows, {} if query.needs_whole_prompt else depths, num_tokens)
        uncached = num_tokens - cached
        prefill = (
            columns.base * np.ceil(uncached / columns.budget)
            + columns.token * uncached
            + columns.pair * uncached * (cached + uncached / 2)
        )
        wait = self._wait(columns, now_ms)
        is_fit = num_tokens <= columns.longest
        least = np.where(is_fit, prefill / columns.factor, NEVER)
        least_ms = float(least.min()) if least.size else NEVER
        is_usable = columns.is_usable & is_fit
        for instance_id in query.exclude:
            row = rows.get(instance_id)
            if row is not None:
                is_usable[row] = False
        return _Prompt(cached, uncached, wait, prefill, is_usable, columns.budget, least_ms)

    def _wait(self, columns: PromptColumns, now_ms: float) -> Floats:
        """What this router has sent, less what has been done of it; what others have sent, as far
        as the last report told; and doubt, which grows with silence and with a prompt's delay."""
        age = np.maximum(now_ms - columns.heard_at, 0.0)
        doubt = np.maximum(age - self._stale_ms, 0.0)
        done = (now_ms - columns.head_since) / columns.factor
        overdue = np.where(columns.head > 0.0, np.maximum(done - OVERDUE * columns.head, 0.0), 0.0)
        own = columns.prompts - np.minimum(columns.head, done) + overdue
        strange = np.maximum(columns.strange - np.minimum(age, self._stale_ms), 0.0)
        wait: Floats = (own + strange + doubt) * columns.factor
        return wait

    def _humble(self, table: PairTable, remote: _Prompt, local: _Prompt) -> None:
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

    def _decode(
        self,
        columns: DecodeColumns,
        query: RouteQuery,
        local: _Prompt,
        ask: Ask,
        handoff_ms: float,
        has_prefills: bool,
        now_ms: float,
    ) -> _Decode:
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
        ratio = ask.tpot.within(ask.quantile, _most_ratio(ask.tpot_ms, floor), ask.now_ns)
        quantile = _quantile(tpot, ratio)
        needed = num_tokens // columns.block_size + 1 - local.cached // columns.block_size
        is_full = (needed > columns.free_blocks) | (columns.seqs + 1 > columns.max_seqs)
        is_kept = np.ones(len(columns.views), np.bool_)
        if ask.tpot_ms is not None:
            is_kept = quantile <= ask.tpot_ms
        # However long it has waited: a prompt may take minutes, and nobody joins meanwhile.
        is_kept_local = is_kept & (_quantile(tpot_local, ratio) <= columns.tightest)
        if ask.spares_residents:
            is_kept = is_kept & (quantile <= columns.tightest)
        elif not has_prefills:
            is_kept_local = is_kept
        return _Decode(
            columns.seqs, step, tpot, quantile, is_full, is_kept, is_kept_local, least_ms
        )

    # --- costs, in milliseconds of an instance ---------------------------------------------------

    def _decode_costs(
        self, columns: DecodeColumns, query: RouteQuery, ask: Ask, prices: Prices, decode: _Decode
    ) -> Floats:
        own: Floats = ask.output_tokens * decode.tpot
        share = (query.num_prompt_tokens + ask.output_tokens) / columns.capacity
        if ask.ttft_ms is None:
            costs: Floats = own * (1.0 + (prices.decode - 1.0) * share)
        else:
            costs = own * (BALANCE + prices.decode * share)
        return costs

    def _pair_costs(
        self,
        table: PairTable,
        query: RouteQuery,
        ask: Ask,
        prices: Prices,
        remote: _Prompt,
        local: _Prompt,
        decode: _Decode,
    ) -> Floats:
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
        rest = self._decode_costs(table.decodes, query, ask, prices, decode)
        costs: Floats = own[:, None] + rest + prices.link * exposed
        if ask.tpot_ms is not None:
            late = exposed + decode.quantile - GAP_FACTOR * ask.tpot_ms
            costs = costs + GAP_PENALTY * np.maximum(late, 0.0)
        return costs

    def _local_costs(
        self,
        table: PairTable,
        query: RouteQuery,
        ask: Ask,
        prices: Prices,
        local: _Prompt,
        decode: _Decode,
    ) -> Floats:
        """A local prefill takes its whole length from each of the instance's sequences."""
        columns = table.decodes
        rest = self._decode_costs(columns, query, ask, prices, decode)
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

    # --- the choice ------------------------------------------------------------------------------

    def _best(self, table: PairTable, pairs: Floats, locals_: Floats) -> tuple[int, int] | None:
        """(prefill row, decode column), −1 for a local prefill; None when nothing is possible."""
        best_pair = float(pairs.min()) if pairs.size else NEVER
        best_local = float(locals_.min()) if locals_.size else NEVER
        best = min(best_pair, best_local)
        if best == NEVER:
            return None
        if self._random.random() < self._exploration:
            return self._any(pairs, locals_)
        limit = best + NEAR_TIE_MS
        ties: list[tuple[float, float, int, int]] = []
        if best_pair <= limit:
            rows, columns = np.nonzero(pairs <= limit)
            turns = table.local.turn[columns]
            order = np.lexsort((table.prefills.turn[rows], turns))
            row, column = int(rows[order[0]]), int(columns[order[0]])
            turn = float(table.local.turn[column])
            ties.append((turn, float(table.prefills.turn[row]), row, column))
        if best_local <= limit:
            candidates = np.nonzero(locals_ <= limit)[0]
            column = int(candidates[table.local.turn[candidates].argmin()])
            turn = float(table.local.turn[column])
            ties.append((turn, turn, -1, column))
        _, _, row, column = min(ties)
        return row, column

    def _any(self, pairs: Floats, locals_: Floats) -> tuple[int, int]:
        rows, columns = np.nonzero(np.isfinite(pairs))
        alone = np.nonzero(np.isfinite(locals_))[0]
        pick = self._random.randrange(len(rows) + len(alone))
        if pick < len(rows):
            return int(rows[pick]), int(columns[pick])
        return -1, int(alone[pick - len(rows)])

    def _listed(
        self,
        table: PairTable,
        query: RouteQuery,
        chosen: tuple[int, int],
        pairs: Floats,
        locals_: Floats,
        remote: _Prompt,
        local: _Prompt,
        decode: _Decode,
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
        listed: list[Candidate] = []
        for at, to in dict.fromkeys(picks):
            cost = float(pairs[at, to] if at >= 0 else locals_[to])
            if cost == NEVER:
                continue
            listed.append(self._candidate(table, query, at, to, cost, remote, local, decode))
        return listed

    def _candidate(
        self,
        table: PairTable,
        query: RouteQuery,
        row: int,
        column: int,
        cost: float,
        remote: _Prompt,
        local: _Prompt,
        decode: _Decode,
    ) -> Candidate:
        view = table.decodes.views[column]
        cached = int(local.cached[column])
        option = DecodeOption(
            view,
            cached,
            query.num_prompt_tokens - cached,
            int(decode.seqs[column]),
            float(decode.tpot[column]),
            0.0,
            bool(decode.is_full[column]),
        )
        if row >= 0:
            prefill = _option(table.prefills, remote, row)
            return Candidate(option, prefill, LocalPrefillReason.NONE, cost)
        prefill = _option(table.local, local, column)
        return Candidate(option, prefill, self._why_local(table, option), cost)

    def _why_local(self, table: PairTable, decode: DecodeOption) -> LocalPrefillReason:
        has_prefill = bool(table.prefills.num_usable)
        reason = local_prefill_reason(decode, has_prefill, self._min_remote)
        return reason or LocalPrefillReason.POLICY

    def _outlook(
        self,
        table: PairTable,
        ask: Ask,
        remote: _Prompt,
        local: _Prompt,
        decode: _Decode,
        forced_local: Bools,
    ) -> Weighed:
        """What an idle cluster could do, and when somebody of this one is free."""
        local_idle = np.where(local.is_usable, local.prefill, NEVER)
        remote_idle = np.where(remote.is_usable, remote.prefill, NEVER)
        has_pair = remote.is_usable.any() and (local.is_usable & ~forced_local).any()
        best_remote = float(remote_idle.min()) if has_pair else NEVER
        best_local = float(local_idle.min()) if local_idle.size else NEVER
        work = min(best_remote, best_local)
        residuals = ask.remote if best_remote <= best_local else ask.local
        columns = table.prefills if has_pair else table.local
        wait = (remote if has_pair else local).wait - columns.ahead
        usable = remote.is_usable if has_pair else local.is_usable
        ready = float(np.where(usable, wait, NEVER).min()) if usable.size else NEVER
        ratio = residuals.within(ask.quantile, _most_ratio(ask.ttft_ms, work), ask.now_ns)
        return Weighed(
            candidates=[],
            work_ms=work,
            floor_quantile_ms=(work + FLOOR_MS) * ratio - FLOOR_MS,
            least_ttft_ms=min(remote.least_ms, local.least_ms),
            least_tpot_ms=decode.least_ms,
            ready_ms=max(0.0, ready),
            num_workers=max(1, int(usable.sum())),
        )


def _most_ratio(target_ms: float | None, floor_ms: float) -> float:
    """Of measured / predicted, with which the floor just meets the target; at least 1."""
    if target_ms is None or floor_ms == NEVER:
        return NEVER
    return max(1.0, (target_ms + FLOOR_MS) / (floor_ms + FLOOR_MS))


def _quantile(predicted: Floats, ratio: float) -> Floats:
    scaled: Floats = (predicted + FLOOR_MS) * ratio - FLOOR_MS
    return scaled


def _within(prompt: _Prompt, ask: Ask, ratio: float) -> Bools:
    if ask.ttft_ms is None:
        return prompt.is_usable
    is_within: Bools = prompt.is_usable & (_quantile(prompt.ttft, ratio) <= ask.left_ms)
    return is_within


def _option(columns: PromptColumns, prompt: _Prompt, row: int) -> PrefillOption:
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


def _obstacle(
    starts: Bools,
    may_decode: Bools,
    decode: _Decode,
    remote: _Prompt,
    local: _Prompt,
) -> str:
    """The first thing in the way, for the explanation and for refusals."""
    if not local.is_usable.any():
        return "no_decode_instance"
    if not (local.is_usable & ~decode.is_full).any():
        return DECODE_FULL
    if not may_decode.any():
        return "tpot"
    if remote.is_usable.any() and not (starts & remote.is_usable).any():
        return "prefill_busy"
    return "ttft"
