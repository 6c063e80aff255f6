"""A short measurement at boot: how long do this instance's steps take?

The throw-away requests go through the engine like any others, so they also warm it up (kernels
compiled, memory touched). Afterwards no block is used and the prefix cache is empty.

Two coefficients are measured in each phase; the third, the cost of attention over a longer context,
would need long prompts and is derived: compute-bound prefill spends time in proportion to
floating-point operations, memory-bound decode in proportion to bytes read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from enum import Enum

import numpy as np

from isthmus.common.clock import NS_PER_MS, NS_PER_S, Clock
from isthmus.common.cluster import LatencyModel
from isthmus.common.errors import CapacityError, InvalidRequestError
from isthmus.common.ids import RequestId
from isthmus.common.types import Request, SamplingParams
from isthmus.engine.core import EngineCore
from isthmus.engine.models.types import ModelSpec
from isthmus.engine.types import SequenceMode, StepOutput

BUDGET_S = 2.0
_PREFILL_SIZES = (8, 8, 32, 64, 128, 256)  # the first run of a size warms up
_DECODE_BATCHES = (1, 2, 4, 8)
_DECODE_PROMPT = 8
_DECODE_STEPS = 3
_MIN_COST_MS = 1e-4


def calibrate(
    engine: EngineCore, max_num_batched_tokens: int, clock: Clock, budget_s: float = BUDGET_S
) -> LatencyModel:
    """Runs on the caller's thread, before the engine loop starts; at most about ``budget_s``."""
    probe = _Probe(engine, max_num_batched_tokens, clock)
    # Prefill costs more the more it measures, so it gets the larger share.
    prefill = probe.prefill_samples(budget_s * 0.6)
    decode = probe.decode_samples(budget_s * 0.4)
    engine.flush_cache()
    engine.take_kv_events()
    kv_bytes_per_token = engine.kv_layout.block_bytes / engine.kv_layout.block_size
    return fit(engine.spec, kv_bytes_per_token, prefill, decode)


def fit(
    spec: ModelSpec,
    kv_bytes_per_token: float,
    prefill: Sequence[tuple[int, float]],
    decode: Sequence[tuple[int, float]],
) -> LatencyModel:
    """``prefill``: (uncached tokens, ms) a step; ``decode``: (sequences, ms) a step."""
    bytes_per_weight = 4 if spec.dtype == "float32" else 2
    linear_flops = 2 * max(1, spec.weight_bytes) / bytes_per_weight
    pair_flops = 4 * spec.num_heads * spec.head_dim * spec.num_layers
    pair_share = pair_flops / linear_flops
    effective = [(tokens + pair_share * tokens**2 / 2, ms) for tokens, ms in prefill]
    prefill_base, prefill_token = _fit_line(effective, _Alone.SLOPE)
    decode_base, decode_seq = _fit_line([(float(seqs), ms) for seqs, ms in decode], _Alone.BASE)
    return LatencyModel(
        prefill_base=prefill_base,
        prefill_token=prefill_token,
        prefill_pair=prefill_token * pair_share,
        decode_base=decode_base,
        decode_seq=decode_seq,
        decode_context=decode_base * kv_bytes_per_token / max(1, spec.weight_bytes),
    )


class _Alone(Enum):
    """What a single measured size says most about."""

    BASE = "base"  # a decode step reads all weights, whatever the batch
    SLOPE = "slope"  # a prefill step computes in proportion to its tokens


def _fit_line(samples: Sequence[tuple[float, float]], alone: _Alone) -> tuple[float, float]:
    """Intercept and slope by least squares over the best time at each x, neither below zero."""
    best: dict[float, float] = {}
    for x, y in samples:
        best[x] = min(y, best.get(x, y))
    if len(best) == 1:
        ((x, y),) = best.items()
        slope, intercept = (0.0, y) if alone is _Alone.BASE else (y / max(x, 1.0), 0.0)
    else:
        slope, intercept = (
            float(value) for value in np.polyfit(list(best), list(best.values()), 1)
        )
    if slope < 0:  # noise: as good as a constant
        slope, intercept = 0.0, sum(best.values()) / len(best)
    if intercept < 0:  # a line through the origin fits better than a negative base
        slope, intercept = sum(x * y for x, y in best.items()) / sum(x * x for x in best), 0.0
    return max(_MIN_COST_MS, intercept), max(_MIN_COST_MS, slope)


class _Probe:
    """Throw-away requests with prompts that nothing else shares."""

    def __init__(self, engine: EngineCore, max_num_batched_tokens: int, clock: Clock) -> None:
        self._engine = engine
        self._max_num_batched_tokens = max_num_batched_tokens
        self._clock = clock
        self._random = np.random.default_rng(0)
        self._ids = itertools.count()

    def prefill_samples(self, budget_s: float) -> list[tuple[int, float]]:
        """At least one sample; stops before a size that would not fit into the time left."""
        ends_ns = self._clock.monotonic_ns() + int(budget_s * NS_PER_S)
        samples: list[tuple[int, float]] = []
        for size in self._fitting(_PREFILL_SIZES):
            if samples:
                last_size, last_ms = samples[-1]
                expected_ns = last_ms * size / last_size * NS_PER_MS
                if self._clock.monotonic_ns() + expected_ns > ends_ns:
                    break
            request_id = self._add(size, max_tokens=1)
            samples.extend(
                (size, _duration_ms(output))
                for output in self._run()
                if output.num_prefill_tokens == size
            )
            self._engine.abort(request_id)
        return samples or [(1, _MIN_COST_MS)]

    def decode_samples(self, budget_s: float) -> list[tuple[int, float]]:
        ends_ns = self._clock.monotonic_ns() + int(budget_s * NS_PER_S)
        samples: list[tuple[int, float]] = []
        for batch in _DECODE_BATCHES:
            if (
                samples
                and self._clock.monotonic_ns() + batch * samples[-1][1] * NS_PER_MS > ends_ns
            ):
                break
            try:
                ids = [self._add(_DECODE_PROMPT, _DECODE_STEPS + 1) for _ in range(batch)]
            except (CapacityError, InvalidRequestError):  # a pool too small for this batch
                break
            samples.extend(
                (batch, _duration_ms(output))
                for output in self._run()
                if output.num_prefill_tokens == 0 and output.num_decode_tokens == batch
            )
            for request_id in ids:
                self._engine.abort(request_id)
        return samples or [(1, _MIN_COST_MS)]

    def _fitting(self, sizes: Sequence[int]) -> Iterator[int]:
        engine = self._engine
        load = engine.load()
        room = min(
            self._max_num_batched_tokens,
            engine.max_model_len - 2,
            (load.free_blocks - 1) * engine.kv_layout.block_size // 2,
        )
        return (size for size in sizes if size <= room)

    def _add(self, num_tokens: int, max_tokens: int) -> RequestId:
        request_id = RequestId(f"calibrate-{next(self._ids)}")
        tokens = self._random.integers(0, self._engine.spec.vocab_size, num_tokens)
        now_ns = self._clock.now_ns()
        request = Request(
            request_id=request_id,
            model=self._engine.spec.name,
            token_ids=tuple(int(token) for token in tokens),
            sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens),
            arrival_ns=now_ns,
            deadline_ns=now_ns + 60 * NS_PER_S,
        )
        self._engine.add(request, SequenceMode.FULL)
        return request_id

    def _run(self) -> Iterator[StepOutput]:
        while (output := self._engine.step()) is not None:
            yield output


def _duration_ms(output: StepOutput) -> float:
    return (output.ended_ns - output.started_ns) / NS_PER_MS
