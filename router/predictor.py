"""How long would it take there: closed-form latency per instance, corrected by what was measured.

For u uncached tokens after c cached ones, on an instance with the fitted ``LatencyModel``::

    TTFT (remote)  = queue + prefill(u, c)                     first token comes from prefill
    TTFT (local)   = queue + prefill(u, c) + chunks · step     chunks run beside d's decodes
    TPOT           = step(b + incoming + 1, K + incoming + n + ô/2)

Queue = work in the last report, less what was done since, plus what the ledger knows is pending.
Decode load is projected to the time of the handoff: requests still at prefill count. Everything is
in milliseconds. Each instance carries two factors, the smoothed ratio of measured to predicted.
"""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.common.cluster import LoadReport
from isthmus.router.cluster_view import InstanceView
from isthmus.router.ledger import Burden, PendingLoad
from isthmus.router.types import RouteQuery

EXPECTED_OUTPUT_TOKENS = 128  # ô: only right in the mean; a request's own limit caps it
FACTOR_SMOOTHING = 0.1
FACTOR_RANGE = (0.2, 5.0)
RATIO_FLOOR_MS = 10.0  # constant overheads must not read as a slow instance when times are tiny
TRANSFER_SETUP_MS = 2.0
TRANSFER_BYTES_PER_MS = 1e6  # 1 GB/s: a modest link; chunks travel while later ones compute


@dataclass(slots=True)
class PrefillOption:
    """The prompt computed by ``view``."""

    view: InstanceView
    cached_tokens: int
    uncached_tokens: int
    wait_ms: float
    prefill_ms: float

    @property
    def ttft_ms(self) -> float:
        return self.wait_ms + self.prefill_ms


@dataclass(slots=True)
class DecodeOption:
    """The request decoded by ``view``; and what computing its prompt there as well would take."""

    view: InstanceView
    cached_tokens: int
    uncached_tokens: int
    num_seqs: int  # running and incoming, without this request
    tpot_ms: float
    wait_ms: float  # until there is a place and blocks for it
    is_full: bool
    local: PrefillOption


class Predictor:
    """Pure arithmetic over views; owns only the constants of one cluster."""

    def __init__(self, stale_load_ms: float) -> None:
        self._stale_load_ms = stale_load_ms

    def prefill_option(
        self, view: InstanceView, pending: PendingLoad, query: RouteQuery, depth: int, now_ns: int
    ) -> PrefillOption:
        """``depth`` = leading blocks of the prompt in this instance's prefix cache."""
        cached = cached_tokens(view, query, depth)
        uncached = query.num_prompt_tokens - cached
        factor = view.prefill_factor
        wait_ms = self._queue_ms(view, pending, now_ns) * factor
        return PrefillOption(
            view, cached, uncached, wait_ms, _prefill_ms(view, uncached, cached) * factor
        )

    def decode_option(
        self, view: InstanceView, pending: PendingLoad, query: RouteQuery, depth: int, now_ns: int
    ) -> DecodeOption:
        """``depth`` as for ``prefill_option``: blocks that need not be transferred."""
        info, load = view.info, view.load
        cached = cached_tokens(view, query, depth)
        num_seqs = pending.decode_seqs
        context = pending.decode_context_tokens
        free_blocks = info.num_blocks - pending.decode_blocks
        stale_ms = 0.0
        if load is not None:
            num_seqs += load.running_seqs + load.waiting_seqs
            context += load.running_context_tokens + load.waiting_tokens
            free_blocks += load.free_blocks - load.num_blocks
            stale_ms = max(0.0, view.load_age_ms(now_ns) - self._stale_load_ms)
        with_me = context + query.num_prompt_tokens + expected_output(query) // 2
        step_ms = info.latency.decode_step_ms(num_seqs + 1, with_me) * view.decode_factor
        missing = num_prompt_blocks(view, query) - cached // info.block_size - free_blocks
        excess = num_seqs + 1 - info.max_num_seqs
        is_full = missing > 0 or excess > 0
        wait_ms = stale_ms
        if is_full:
            share = max(excess / info.max_num_seqs, missing * info.block_size / max(context, 1))
            wait_ms += min(share, 100.0) * EXPECTED_OUTPUT_TOKENS * step_ms
        uncached = query.num_prompt_tokens - cached
        local = self.prefill_option(view, pending, query, depth, now_ns)
        local.prefill_ms += _num_chunks(view, uncached) * step_ms
        return DecodeOption(view, cached, uncached, num_seqs, step_ms, wait_ms, is_full, local)

    def _queue_ms(self, view: InstanceView, pending: PendingLoad, now_ns: int) -> float:
        load = view.load
        if load is None:
            return pending.prefill_ms
        age_ms = view.load_age_ms(now_ns)
        queued_ms = _reported_work_ms(view, load) - min(age_ms, self._stale_load_ms)
        # A silent instance is neither idle nor full: its last view holds, with growing doubt.
        doubt_ms = max(0.0, age_ms - self._stale_load_ms)
        return max(0.0, queued_ms) + doubt_ms + pending.prefill_ms

    def observe_ttft(self, view: InstanceView, predicted_ms: float, measured_ms: float) -> None:
        view.prefill_factor = _corrected(view.prefill_factor, predicted_ms, measured_ms)

    def observe_tpot(self, view: InstanceView, predicted_ms: float, measured_ms: float) -> None:
        view.decode_factor = _corrected(view.decode_factor, predicted_ms, measured_ms)


def expected_output(query: RouteQuery) -> int:
    return max(1, min(query.max_output_tokens, EXPECTED_OUTPUT_TOKENS))


def num_prompt_blocks(view: InstanceView, query: RouteQuery) -> int:
    """Blocks for the prompt and the first output token."""
    return -(-(query.num_prompt_tokens + 1) // view.info.block_size)


def cached_tokens(view: InstanceView, query: RouteQuery, depth: int) -> int:
    """Prompt tokens that a prefix hit of ``depth`` blocks saves: never the last one."""
    if query.needs_whole_prompt:
        return 0
    block_size = view.info.block_size
    return min(depth, (query.num_prompt_tokens - 1) // block_size) * block_size


def burden(query: RouteQuery, prefill: PrefillOption, decode: DecodeOption) -> Burden:
    """What the ledger books for a request that is sent to this pair."""
    return Burden(
        prefill_tokens=prefill.uncached_tokens,
        prefill_ms=prefill.prefill_ms,
        context_tokens=query.num_prompt_tokens + expected_output(query) // 2,
        blocks=num_prompt_blocks(decode.view, query),
    )


def transfer_ms(decode: DecodeOption) -> float:
    """Time until the KV that ``decode`` lacks is there."""
    layout = decode.view.info.kv_layout
    num_bytes = decode.uncached_tokens * (layout.block_bytes // layout.block_size)
    return TRANSFER_SETUP_MS + num_bytes / TRANSFER_BYTES_PER_MS


def _prefill_ms(view: InstanceView, uncached: int, cached: int) -> float:
    model = view.info.latency
    extra_steps = _num_chunks(view, uncached) - 1
    return model.prefill_ms(uncached, cached) + model.prefill_base * extra_steps


def _num_chunks(view: InstanceView, uncached: int) -> int:
    return -(-uncached // view.info.max_num_batched_tokens)


def _reported_work_ms(view: InstanceView, load: LoadReport) -> float:
    """Work of the waiting prompts, as if they were equally long, and half a running step."""
    running_ms = load.step_ms / 2 if load.running_seqs else 0.0
    if not load.waiting_tokens:
        return running_ms
    num_seqs = max(1, load.waiting_seqs)
    mean = load.waiting_tokens // num_seqs
    return running_ms + num_seqs * view.info.latency.prefill_ms(mean)


def _corrected(factor: float, predicted_ms: float, measured_ms: float) -> float:
    ratio = (measured_ms + RATIO_FLOOR_MS) / (predicted_ms + RATIO_FLOOR_MS)
    low, high = FACTOR_RANGE
    updated = factor * (1 + FACTOR_SMOOTHING * (min(max(ratio, low), high) - 1))
    return min(max(updated, low), high)
