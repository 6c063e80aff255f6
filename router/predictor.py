"""How long would it take there: closed-form latency per instance, corrected by what was measured.

For u uncached tokens after c cached ones, on an instance with the fitted ``LatencyModel``::

    TTFT (remote)  = queue + prefill(u, c)                     first token comes from prefill
    TTFT (local)   = queue + prefill(u, c) + chunks · step     chunks run beside d's decodes
    TPOT           = step(b + incoming + 1, K + incoming + n + ô/2)

Queue = work in the last report, less what was done since, plus what the ledger knows is pending.
Decode load is projected to the time of the handoff: requests still at prefill count. Everything is
in milliseconds. Each instance carries two factors, the smoothed ratio of what was measured to what
the model alone had said, so that late news of many requests corrects once and not many times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from isthmus.common.clock import NS_PER_MS
from isthmus.router.cluster_view import InstanceView
from isthmus.router.links import SETUP_MS, Links
from isthmus.router.pending import PendingLoad
from isthmus.router.reservation import NO_LIMIT, Burden
from isthmus.router.types import RouteQuery

EXPECTED_OUTPUT_TOKENS = 128  # ô: only right in the mean; a request's own limit caps it
FACTOR_SMOOTHING = 0.1
FACTOR_RANGE = (0.2, 5.0)
MAX_SURPRISE = 1.5  # as which one measurement counts at most
MAX_DOUBT_MS = 2_000.0  # of an instance that is silent: the last one there is must still be used
RATIO_FLOOR_MS = 10.0  # constant overheads must not read as a slow instance when times are tiny


@dataclass(slots=True)
class PrefillOption:
    """The prompt computed by ``view``."""

    view: InstanceView
    cached_tokens: int
    uncached_tokens: int
    wait_ms: float
    prefill_ms: float
    ttft_ms: float
    factor: float  # that the three times above contain


@dataclass(slots=True)
class DecodeOption:
    """The request decoded by ``view``."""

    view: InstanceView
    cached_tokens: int
    uncached_tokens: int
    num_seqs: int  # running, waiting and incoming, without this request
    tpot_ms: float
    wait_ms: float  # until there is a place and blocks for it
    is_full: bool


class Predictor:
    """Arithmetic over views and links for one query after the other; owns only the bounds of one
    cluster.

    The two ``…_option`` methods run once per instance and query: they are written flat.
    """

    def __init__(self, stale_load_ms: float, links: Links) -> None:
        self._stale_load_ms = stale_load_ms
        self._links = links

    def prefill_option(
        self,
        view: InstanceView,
        unreported_ms: float,
        query: RouteQuery,
        depth: int,
        now_ns: int,
        least_factor: float = 0.0,
    ) -> PrefillOption:
        """``unreported_ms``: work of prompts there that its last report cannot contain; ``depth`` =
        leading blocks of the prompt in this instance's prefix cache."""
        cached = cached_tokens(view, query, depth) if depth else 0
        uncached = query.num_prompt_tokens - cached
        queued_ms = 0.0
        if view.load is not None:
            # A silent instance is neither idle nor full: its last view holds, with some doubt.
            age_ms = (now_ns - view.load_at_ns) / NS_PER_MS
            doubt_ms = min(age_ms - self._stale_load_ms, MAX_DOUBT_MS)
            if doubt_ms > 0:
                queued_ms = max(0.0, view.reported_work_ms - self._stale_load_ms) + doubt_ms
            elif age_ms < view.reported_work_ms:
                queued_ms = view.reported_work_ms - age_ms
        model = view.latency
        factor = max(view.prefill_factor, least_factor)
        wait_ms = (queued_ms + unreported_ms) * factor
        prefill_ms = factor * (
            model.prefill_base * -(-uncached // view.info.max_num_batched_tokens)
            + model.prefill_token * uncached
            + model.prefill_pair * uncached * (cached + uncached / 2)
        )
        ttft_ms = wait_ms + prefill_ms
        return PrefillOption(view, cached, uncached, wait_ms, prefill_ms, ttft_ms, factor)

    def decode_option(
        self, view: InstanceView, pending: PendingLoad, query: RouteQuery, depth: int, now_ns: int
    ) -> DecodeOption:
        """``depth`` as for ``prefill_option``: blocks that need not be transferred."""
        info, load = view.info, view.load
        num_tokens = query.num_prompt_tokens
        output_tokens = min(query.max_output_tokens, EXPECTED_OUTPUT_TOKENS)
        cached = cached_tokens(view, query, depth) if depth else 0
        num_seqs = pending.decode_seqs
        context = pending.decode_context_tokens
        free_blocks = info.num_blocks - pending.decode_blocks
        wait_ms = 0.0
        if load is not None:
            num_seqs += load.running_seqs + load.waiting_seqs
            context += load.running_context_tokens + load.waiting_tokens
            free_blocks += load.free_blocks - load.num_blocks
            doubt_ms = (now_ns - view.load_at_ns) / NS_PER_MS - self._stale_load_ms
            if doubt_ms > 0:
                wait_ms = min(doubt_ms, MAX_DOUBT_MS)
        model = view.latency
        step_ms = view.decode_factor * (
            model.decode_base
            + model.decode_seq * (num_seqs + 1)
            + model.decode_context * (context + num_tokens + output_tokens // 2)
        )
        block_size = view.block_size
        missing = num_tokens // block_size + 1 - cached // block_size - free_blocks
        excess = num_seqs + 1 - info.max_num_seqs
        is_full = missing > 0 or excess > 0
        if is_full:
            share = max(excess / info.max_num_seqs, missing * block_size / max(context, 1))
            wait_ms += min(share, 100.0) * EXPECTED_OUTPUT_TOKENS * step_ms
        return DecodeOption(
            view,
            cached,
            num_tokens - cached,
            num_seqs,
            step_ms,
            wait_ms,
            is_full,
        )

    def local_option(
        self,
        decode: DecodeOption,
        unreported_ms: float,
        query: RouteQuery,
        now_ns: int,
        rival: PrefillOption | None = None,
    ) -> PrefillOption:
        """The prompt computed by the decode instance, its chunks beside its decode steps;
        ``unreported_ms`` as for ``prefill_option``.

        ``rival``: the quickest of the prefill instances that could do it. A decode instance that
        computes few prompts has not shown yet how slow it is, and two fits made while a machine
        was busy with other things differ by more than the instances do, so it must not look
        quicker than the rival would be.
        """
        depth = decode.cached_tokens // decode.view.block_size
        least_factor = 0.0
        if rival is not None:
            size = decode.uncached_tokens, decode.cached_tokens
            rival_ms = rival.factor * rival.view.latency.prefill_ms(*size)
            least_factor = rival_ms / decode.view.latency.prefill_ms(*size)
        option = self.prefill_option(decode.view, unreported_ms, query, depth, now_ns, least_factor)
        num_chunks = -(-option.uncached_tokens // decode.view.info.max_num_batched_tokens)
        option.prefill_ms += num_chunks * decode.tpot_ms
        option.ttft_ms = option.wait_ms + option.prefill_ms
        return option

    def fetched_option(
        self, decode: DecodeOption, prefill: PrefillOption, query: RouteQuery
    ) -> PrefillOption:
        """``prefill`` as the other leg of ``decode``: what KV of the prompt's first tokens that
        one has, this one fetches where it saves enough, and computes what is left after it."""
        missing = decode.cached_tokens - prefill.cached_tokens
        view = prefill.view
        if missing < view.fetch_min_tokens(decode.view.key) or query.needs_whole_prompt:
            return prefill
        held = min(decode.cached_tokens, query.num_prompt_tokens - 1)
        held = held // view.block_size * view.block_size
        missing = held - prefill.cached_tokens
        if missing < view.fetch_min_tokens(decode.view.key):
            return prefill
        uncached = query.num_prompt_tokens - held
        # What comes back is as fast as what goes there.
        travel_ms = self._travel_ms(missing, decode, view)
        prefill_ms = prefill.factor * view.prefill_ms(uncached, held) + travel_ms
        ttft_ms = prefill.wait_ms + prefill_ms
        return replace(
            prefill,
            cached_tokens=held,
            uncached_tokens=uncached,
            prefill_ms=prefill_ms,
            ttft_ms=ttft_ms,
        )

    def transfer_ms(self, decode: DecodeOption, source: InstanceView | None) -> float:
        """Time until the KV that ``decode`` lacks is there from ``source``, or from anywhere."""
        return self._travel_ms(decode.uncached_tokens, decode, source)

    def _travel_ms(
        self, num_tokens: int, decode: DecodeOption, source: InstanceView | None
    ) -> float:
        rate = self._links.rate(source.info if source is not None else None, decode.view.info)
        return SETUP_MS + num_tokens * decode.view.token_bytes / rate

    def observe_ttft(
        self, view: InstanceView, predicted_ms: float, factor: float, measured_ms: float
    ) -> None:
        """``factor``: that the prediction contained when it was made."""
        view.prefill_factor = _corrected(view.prefill_factor, factor, predicted_ms, measured_ms)

    def observe_tpot(
        self, view: InstanceView, predicted_ms: float, factor: float, measured_ms: float
    ) -> None:
        view.decode_factor = _corrected(view.decode_factor, factor, predicted_ms, measured_ms)


def quickest_of(options: list[PrefillOption]) -> PrefillOption:
    """Whoever computes a token in the least time, whatever waits there."""
    token_ms = [option.factor * option.view.latency.prefill_token for option in options]
    return options[token_ms.index(min(token_ms))]


def expected_output(query: RouteQuery) -> int:
    return max(1, min(query.max_output_tokens, EXPECTED_OUTPUT_TOKENS))


def cached_tokens(view: InstanceView, query: RouteQuery, depth: int) -> int:
    """Prompt tokens that a prefix hit of ``depth`` blocks saves: never the last one."""
    if query.needs_whole_prompt:
        return 0
    block_size = view.block_size
    return min(depth, (query.num_prompt_tokens - 1) // block_size) * block_size


def burden(
    query: RouteQuery,
    prefill: PrefillOption,
    decode: DecodeOption,
    output_tokens: int,
    *,
    is_spared: bool = True,
) -> Burden:
    """What the ledger books for a request that is sent to this pair. ``is_spared``: newcomers leave
    it its TPOT target."""
    limit_ms = query.slo.tpot_ms if is_spared else None
    return Burden(
        prefill_tokens=prefill.uncached_tokens,
        prefill_ms=prefill.prefill_ms / prefill.factor,
        context_tokens=query.num_prompt_tokens + output_tokens // 2,
        blocks=query.num_prompt_tokens // decode.view.block_size + 1,
        tpot_limit_ms=NO_LIMIT if limit_ms is None else limit_ms,
    )


def _corrected(now: float, then: float, predicted_ms: float, measured_ms: float) -> float:
    """``now`` moved towards the factor that would have made the prediction right."""
    right = then * (measured_ms + RATIO_FLOOR_MS) / (predicted_ms + RATIO_FLOOR_MS)
    right = min(max(right, now / MAX_SURPRISE), now * MAX_SURPRISE)
    low, high = FACTOR_RANGE
    return now + FACTOR_SMOOTHING * (min(max(right, low), high) - now)
