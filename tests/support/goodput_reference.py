"""The goodput policy once more, one instance and one pair at a time, as it would be written if
speed were no matter: what the fast one must agree with to the last bit.

Every pair is looked at, nothing is kept from one query to the next. The order of operations is the
policy's, so that rounding is the same too. A change of what the policy means is a change here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, exp

import numpy as np

from isthmus.common.ids import InstanceId
from isthmus.common.pacing import LEAST_SHARE, PACE
from isthmus.router import costs
from isthmus.router.choice import NEAR_TIE_MS
from isthmus.router.cluster_view import PROMPT_MEMORY_MS
from isthmus.router.columns import OVERDUE, DecodeColumns, PromptColumns
from isthmus.router.forecast import MAX_HOLDERS, MAX_SHARE, NEVER, Ask, most_ratio
from isthmus.router.links import SETUP_MS
from isthmus.router.predictor import MAX_DOUBT_MS
from isthmus.router.prices import Prices
from isthmus.router.quantiles import FLOOR_MS
from isthmus.router.table import PairTable
from isthmus.router.types import RouteQuery


@dataclass
class Prompt:
    """The query's prompt on one instance."""

    cached: float
    uncached: float
    wait: float
    prefill: float
    is_usable: bool
    least: float  # without what else is there or was learned
    starts: bool

    @property
    def ttft(self) -> float:
        return self.wait + self.prefill


@dataclass
class Decode:
    tpot: float
    quantile: float
    is_full: bool
    is_kept: bool
    own_missed: float
    least: float


@dataclass
class Answer:
    place: tuple[int, int] | None  # (prefill row, decode row); −1 for a local prefill
    score: float
    ttft_ms: float
    tpot_ms: float
    work_ms: float
    floor_quantile_ms: float
    ready_ms: float
    least_ttft_ms: float
    least_tpot_ms: float
    num_workers: int


def quantile_of(predicted: float, ratio: float) -> float:
    return (predicted + FLOOR_MS) * ratio - FLOOR_MS


def prompt_on(
    columns: PromptColumns,
    row: int,
    query: RouteQuery,
    depths: Mapping[InstanceId, int],
    stale_ms: float,
    now_ms: float,
) -> Prompt:
    view, num_tokens = columns.views[row], query.num_prompt_tokens
    size = float(view.block_size)
    depth = 0 if query.needs_whole_prompt else depths.get(view.instance_id, 0)
    cached = min(depth, (num_tokens - 1) // size) * size
    uncached = num_tokens - cached
    base, token, pair = float(columns.base[row]), float(columns.token[row]), columns.pair[row]
    factor, budget = float(columns.factor[row]), float(columns.budget[row])
    prefill = base * ceil(uncached / budget) + token * uncached
    prefill += float(pair) * uncached * (cached + uncached / 2)
    age = max(now_ms - float(columns.heard_at[row]), 0.0)
    done = (now_ms - float(columns.head_since[row])) / factor
    head = float(columns.head[row])
    overdue = max(done - OVERDUE * head, 0.0) if head > 0.0 else 0.0
    own = float(columns.prompts[row]) - min(head, done) + overdue
    trusted = age if is_silent_side(columns, stale_ms, now_ms) else min(age, stale_ms)
    unreported = max(float(columns.strange[row]) - trusted, 0.0) + min(age - trusted, MAX_DOUBT_MS)
    wait = (own + unreported) * factor
    is_fit = num_tokens <= view.longest_prompt
    is_usable = columns.barred[row] == 0.0 and is_fit and view.instance_id not in query.exclude
    least = prefill / factor if is_fit else NEVER
    return Prompt(
        cached, uncached, wait, prefill, is_usable, least, wait <= float(columns.ahead[row])
    )


def is_silent_side(columns: PromptColumns, stale_ms: float, now_ms: float) -> bool:
    usable = [row for row, barred in enumerate(columns.barred) if barred == 0.0]
    return all(now_ms - float(columns.heard_at[row]) > stale_ms for row in usable)


def fetched(
    table: PairTable, remote: list[Prompt], local: list[Prompt], query: RouteQuery
) -> dict[int, list[Prompt]]:
    """By decode row: the prompt on the prefill instances that fetch KV from there."""
    if query.needs_whole_prompt or not any(prompt.is_usable for prompt in remote):
        return {}
    found: dict[int, list[Prompt]] = {}
    wanted = [
        prompt.cached + float(least) for prompt, least in zip(remote, table.fetch_min, strict=True)
    ]
    holders = [row for row, prompt in enumerate(local) if prompt.cached >= min(wanted)]
    if len(holders) > MAX_HOLDERS:
        holders.sort(key=lambda row: local[row].cached)
        holders = holders[-MAX_HOLDERS:]
    columns = table.prefills
    for holder in holders if min(wanted) < NEVER else []:
        found[holder] = []
        for row, prompt in enumerate(remote):
            size = float(columns.views[row].block_size)
            held = min(local[holder].cached, query.num_prompt_tokens - 1.0) // size * size
            missing = held - prompt.cached
            if missing < float(table.fetch_min[row]):
                found[holder].append(prompt)
                continue
            uncached = query.num_prompt_tokens - held
            travel = missing * float(table.decodes.token_bytes[holder])
            travel = SETUP_MS + travel / float(table.rates[row, holder])
            budget = float(columns.budget[row])
            prefill = travel + float(columns.base[row]) * ceil(uncached / budget)
            pairs = float(columns.pair[row]) * uncached * (held + uncached / 2)
            prefill += float(columns.token[row]) * uncached + pairs
            found[holder].append(replace(prompt, cached=held, uncached=uncached, prefill=prefill))
    return found


def step_ms(columns: DecodeColumns, row: int, seqs: float, context: float) -> float:
    if seqs >= columns.large_batch[row]:
        large = float(columns.large_base[row]) + float(columns.large_seq[row]) * seqs
        return large + float(columns.large_ctx[row]) * context
    small = float(columns.base[row]) + float(columns.seq[row]) * seqs
    return small + float(columns.ctx[row]) * context


def humble(table: PairTable, remote: list[Prompt], local: list[Prompt]) -> None:
    columns = table.prefills
    usable = [row for row, prompt in enumerate(remote) if prompt.is_usable]
    if not usable:
        return
    quickest = min(usable, key=lambda row: columns.token[row])
    for row, prompt in enumerate(local):
        if table.decodes.is_mixed[row]:
            continue
        rival = float(columns.base[quickest]) * ceil(prompt.uncached / columns.budget[quickest])
        rival += float(columns.token[quickest]) * prompt.uncached
        pairs = prompt.cached + prompt.uncached / 2
        rival += float(columns.pair[quickest]) * prompt.uncached * pairs
        prompt.prefill = max(prompt.prefill, rival)


def decode_on(
    table: PairTable,
    row: int,
    query: RouteQuery,
    ask: Ask,
    local: Prompt,
    handoff_ms: float,
    ratio: float,
    now_ms: float,
) -> Decode:
    columns, num_tokens, output = table.decodes, query.num_prompt_tokens, ask.output_tokens
    seqs, there = float(columns.seqs[row]), float(columns.context[row])
    now = step_ms(columns, row, seqs, there)
    stay = 1.0 - min(handoff_ms / max(output * now, 1.0), 0.9)
    step = step_ms(columns, row, seqs * stay + 1, there * stay + num_tokens + output / 2)
    chunks = ceil(local.uncached / max(float(table.local.budget[row]), 1.0))
    tightest = float(columns.tightest[row])
    pace = PACE * tightest
    beside = min((local.wait + local.prefill) / max(pace - now, LEAST_SHARE * pace), output) * now
    local.prefill = local.prefill + max(beside, chunks * (step - float(columns.base[row])))
    decay = exp((float(columns.prompt_at[row]) - now_ms) / PROMPT_MEMORY_MS)
    share = float(columns.prompt[row]) * decay / PROMPT_MEMORY_MS
    left = max(local.wait - handoff_ms, 0.0) if local.is_usable else 0.0
    tpot = max(step / (1.0 - min(share, MAX_SHARE)), step + left / output)
    if ask.tpot_ms is not None:
        tpot = min(tpot, max(step, PACE * ask.tpot_ms))
    quantile = quantile_of(step, ratio)
    size = float(columns.block_size[row])
    needed = num_tokens // size + 1 - local.cached // size
    is_kept = ask.tpot_ms is None or quantile <= ask.tpot_ms
    own_missed = 0.0
    if ask.tpot_ms is not None:
        ratios = np.array([(ask.tpot_ms + FLOOR_MS) / (step + FLOOR_MS)])
        own_missed = float(ask.tpot.share_above(ratios)[0])
    if ask.spares_residents:
        is_kept = is_kept and quantile <= tightest
    is_left_alone = columns.views[row].instance_id == ask.left_alone
    is_full = (
        is_left_alone
        or needed > columns.room[row]
        or seqs + 1 > columns.views[row].info.max_num_seqs
    )
    least = step_ms(columns, row, 1.0, float(num_tokens)) / float(columns.factor[row])
    return Decode(tpot, quantile, bool(is_full), is_kept, own_missed, least)


def decode_cost(
    table: PairTable, row: int, query: RouteQuery, ask: Ask, prices: Prices, decode: Decode
) -> float:
    own = ask.output_tokens * decode.tpot
    tokens = query.num_prompt_tokens + ask.output_tokens
    share = tokens / float(table.decodes.capacity[row])
    if ask.ttft_ms is None:
        own *= 1.0 + (prices.decode - 1.0) * share
        own += ask.press.worth_ms * decode.own_missed
        return own - favour(ask, table.decodes.views[row].instance_id)
    balance = costs.BALANCE
    if ask.tpot_ms is not None:
        balance = costs.HOST if table.decodes.seqs[row] < 1 else 0.0
    own = own * (balance + prices.decode * share) + ask.press.worth_ms * decode.own_missed
    return own - favour(ask, table.decodes.views[row].instance_id)


def favour(ask: Ask, name: InstanceId) -> float:
    """Of whoever served the session's last turn."""
    last = ask.last
    return last.worth_ms if last is not None and name in (last.prefill, last.decode) else 0.0


def pair_cost(
    table: PairTable,
    place: tuple[int, int],
    ask: Ask,
    prices: Prices,
    remote: Prompt,
    local: Prompt,
    decode: Decode,
    rest: float,
) -> float:
    row, column = place
    columns = table.prefills
    travel = local.uncached * float(table.decodes.token_bytes[column])
    travel /= float(table.rates[row, column])
    last = min(1.0, float(columns.budget[row]) / max(local.uncached, 1.0))
    exposed = SETUP_MS + max(travel - costs.OVERLAP * remote.prefill, travel * last)
    if ask.ttft_ms is None:
        own = remote.ttft + (prices.prefill - 1.0) * remote.prefill
    else:
        wait = remote.prefill * float(table.speed[row]) + remote.wait + ask.press.line_ms
        own = prices.prefill * wait
        own = own - costs.TIGHTNESS * remote.ttft
    own -= favour(ask, columns.views[row].instance_id)
    cost = own + rest + exposed
    if ask.tpot_ms is not None:
        late = exposed + decode.quantile - costs.GAP_FACTOR * ask.tpot_ms
        cost = cost + costs.GAP_PENALTY * max(late, 0.0)
    return cost


def local_cost(
    table: PairTable,
    row: int,
    ask: Ask,
    prices: Prices,
    local: Prompt,
    rest: float,
) -> float:
    seqs = float(table.decodes.seqs[row])
    if ask.ttft_ms is None:
        return rest + local.ttft + local.prefill * (1.0 + seqs) * prices.decode
    return prices.decode * (local.prefill + local.wait) + rest


def weigh_slowly(
    table: PairTable,
    query: RouteQuery,
    depths: Mapping[InstanceId, int],
    ask: Ask,
    prices: Prices,
    now_ms: float,
    min_remote_tokens: int,
    stale_ms: float,
) -> Answer:
    """What ``GoodputPolicy.weigh`` must say, without exploration."""

    def prompts(columns: PromptColumns) -> list[Prompt]:
        rows = range(len(columns.views))
        return [prompt_on(columns, row, query, depths, stale_ms, now_ms) for row in rows]

    remote, local = prompts(table.prefills), prompts(table.local)
    least_ttft = min((prompt.least for prompt in (*remote, *local)), default=NEVER)
    humble(table, remote, local)
    usable = [prompt for prompt in remote if prompt.is_usable]
    handoff_ms = min((prompt.ttft for prompt in usable), default=0.0)
    alone = [
        step_ms(table.decodes, row, 1.0, float(query.num_prompt_tokens))
        for row in range(len(local))
    ]
    ratio = ask.tpot.within(ask.quantile, most_ratio(ask.tpot_ms, min(alone)), ask.now_ns)
    decodes = [
        decode_on(table, row, query, ask, prompt, handoff_ms, ratio, now_ms)
        for row, prompt in enumerate(local)
    ]
    forced = [
        bool(table.decodes.is_mixed[row]) or prompt.uncached < min_remote_tokens
        for row, prompt in enumerate(local)
    ]
    can_pair = any(prompt.is_usable and not forced[row] for row, prompt in enumerate(local))
    has_pair = bool(usable) and can_pair
    fetching = fetched(table, remote, local, query)
    quickest = [p.prefill for side in (remote, *fetching.values()) for p in side if p.is_usable]
    best_remote = min(quickest, default=NEVER) if has_pair else NEVER
    best_local = min((p.prefill for p in local if p.is_usable), default=NEVER)
    work = min(best_remote, best_local)
    most = most_ratio(ask.ttft_ms, work)
    residuals = ask.remote if best_remote <= best_local else ask.local
    floor = quantile_of(work, residuals.within(ask.quantile, most, ask.now_ns))
    side, columns = (remote, table.prefills) if has_pair else (local, table.local)
    excess = [p.wait - float(columns.ahead[r]) for r, p in enumerate(side) if p.is_usable]
    remote_ratio = ask.remote.within(ask.quantile, most, ask.now_ns)
    local_ratio = ask.local.within(ask.quantile, most, ask.now_ns)

    def is_within(prompt: Prompt, ratio: float) -> bool:
        is_late = ask.ttft_ms is not None and quantile_of(prompt.ttft, ratio) > ask.left_ms
        return prompt.is_usable and not is_late

    pairs: dict[tuple[int, int], float] = {}
    locals_: dict[tuple[int, int], float] = {}
    least_pair = NEVER
    rest = [decode_cost(table, r, query, ask, prices, d) for r, d in enumerate(decodes)]
    may_decode = [
        local[row].is_usable and not decode.is_full and decode.is_kept
        for row, decode in enumerate(decodes)
    ]
    for row in range(len(remote)):
        for column, decode in enumerate(decodes):
            prompt = fetching.get(column, remote)[row]
            if not is_within(prompt, remote_ratio) or not may_decode[column] or forced[column]:
                continue
            place = row, column
            cost = pair_cost(table, place, ask, prices, prompt, local[column], decode, rest[column])
            least_pair = min(least_pair, cost)
            if prompt.starts:
                pairs[place] = cost
    for column, prompt in enumerate(local):
        if not is_within(prompt, local_ratio) or not prompt.starts:
            continue
        if not may_decode[column]:
            continue
        cost = local_cost(table, column, ask, prices, prompt, rest[column])
        if ask.ttft_ms is None or not remote or cost <= least_pair:
            locals_[-1, column] = cost
    possible = pairs | locals_
    answer = Answer(
        None,
        NEVER,
        NEVER,
        NEVER,
        work,
        floor,
        max(0.0, min(excess, default=NEVER)),
        least_ttft,
        min(decode.least for decode in decodes),
        max(1, len(excess)),
    )
    if possible:
        limit = min(possible.values()) + NEAR_TIE_MS
        tied = [place for place, cost in possible.items() if cost <= limit]
        row, column = min(tied, key=lambda place: _turns(table, place))
        prompt = local[column] if row < 0 else fetching.get(column, remote)[row]
        answer.place, answer.score = (row, column), possible[row, column]
        answer.ttft_ms, answer.tpot_ms = prompt.ttft, decodes[column].tpot
    return answer


def _turns(table: PairTable, place: tuple[int, int]) -> tuple[float, float, int, int]:
    row, column = place
    turn = float(table.local.turn[column])
    return turn, turn if row < 0 else float(table.prefills.turn[row]), row, column
