"""Whole steps of the engine: plan, stage, replay or run, sample, enter. Weights are random.

Sequences get their KV as from another instance, without anyone having computed it: what zeros a
store holds does not matter to how long attention takes.

::

    decode    tokens a step: one a sequence; limit: weights and KV once over the card's bandwidth
    prefill   one chunk of a prompt; limit: its products, and attention's, at the card's bf16 rate
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.gpu.limits import CardLimits
from benchmarks.gpu.models import Shape
from benchmarks.gpu.report import Check, Figure
from isthmus.common.config import EngineConfig
from isthmus.common.ids import RequestId
from isthmus.common.types import Request, SamplingParams
from isthmus.engine.core import EngineCore
from isthmus.engine.device_runner import DeviceRunner
from isthmus.engine.types import StepOutput

WARM_UPS = 4


@dataclass(frozen=True, slots=True)
class StepPlanSizes:
    """What is measured of one model."""

    decode: tuple[tuple[int, int], ...]  # sequences and the tokens that each has
    prefill: tuple[int, ...]  # tokens of a prompt
    num_steps: int = 24  # of each, the first ones not counted


def engine_config(sizes: StepPlanSizes, device: str, block_size: int = 16) -> EngineConfig:
    """Room for the largest case, and nothing beyond."""
    steps = sizes.num_steps + WARM_UPS + 2
    blocks = [
        sequences * (-(-(context + steps) // block_size)) for sequences, context in sizes.decode
    ]
    blocks += [-(-(tokens + 2) // block_size) for tokens in sizes.prefill]
    return EngineConfig(
        device=device,
        block_size=block_size,
        num_blocks=max(blocks) + 2,
        max_num_batched_tokens=max(sizes.prefill),
        max_num_seqs=max(sequences for sequences, _ in sizes.decode),
        watermark=0.0,
        enable_prefix_cache=False,
    )


def measure_steps(
    engine: EngineCore,
    runner: DeviceRunner,
    shape: Shape,
    sizes: StepPlanSizes,
    limits: CardLimits,
    num_allocations: Callable[[], int],
) -> tuple[list[Figure], list[Check]]:
    element_bytes = engine.kv_layout.dtype_bytes
    figures: list[Figure] = []
    for sequences, context in sizes.decode:
        seconds = _decode_seconds(engine, sequences, context, sizes.num_steps)
        weights = shape.linear_weights + shape.head_weights
        kv = sequences * (context + sizes.num_steps // 2) * shape.kv_elements
        flops = 2 * sequences * weights
        limit_s = limits.seconds(element_bytes * (weights + kv), flops)
        name = decode_name(shape, sequences, context)
        note = f"{sequences / seconds:,.0f} tokens/s"
        figures.append(Figure(name, seconds, limit_s, note=note))
    for num_tokens in sizes.prefill:
        seconds = _prefill_seconds(engine, num_tokens, WARM_UPS)
        pairs = num_tokens * (num_tokens + 1) / 2
        attention = 4 * pairs * shape.num_layers * shape.num_heads * shape.head_dim
        flops = 2 * num_tokens * shape.linear_weights + 2 * shape.head_weights + attention
        limit_s = limits.seconds(element_bytes * shape.linear_weights, flops)
        note = f"{num_tokens / seconds:,.0f} tokens/s"
        figures.append(
            Figure(f"{shape.name}: prefill of {num_tokens}", seconds, limit_s, note=note)
        )
    return figures, [_check_replays(runner, shape, num_allocations)]


def decode_name(shape: Shape, sequences: int, context: int) -> str:
    return f"{shape.name}: decode step, {sequences} × {context} tokens"


def _decode_seconds(engine: EngineCore, sequences: int, context: int, num_steps: int) -> float:
    """From the end of one step to the end of the next, host's work included."""
    total = num_steps + WARM_UPS
    for index in range(sequences):
        request = _request(f"d{index}", context, engine.spec.vocab_size, max_tokens=total + 1)
        engine.admit_with_kv(engine.reserve(request), request, first_token=1)
    samples = [
        _seconds(output)
        for output in _run(engine)
        if output.num_decode_tokens == sequences and not output.num_prefill_tokens
    ]
    assert len(samples) >= num_steps, f"{len(samples)} whole steps of {sequences} sequences"
    return statistics.median(samples[-num_steps:])


def _prefill_seconds(engine: EngineCore, num_tokens: int, repeats: int) -> float:
    samples = []
    for index in range(repeats + 1):
        engine.add(_request(f"p{index}", num_tokens, engine.spec.vocab_size, max_tokens=1))
        samples += [_seconds(o) for o in _run(engine) if o.num_prefill_tokens == num_tokens]
    return statistics.median(samples[1:])


@torch.inference_mode()
def _check_replays(runner: DeviceRunner, shape: Shape, num_allocations: Callable[[], int]) -> Check:
    """Replays every captured step, and counts what is taken from the allocator meanwhile."""
    taken = 0
    for bucket in runner.graphs.buckets:
        runner.stage_padding(bucket)
        before = num_allocations()
        runner.graphs.replay(bucket)
        taken += num_allocations() - before
    name = f"{shape.name}: no graph replay allocates"
    detail = f"{len(runner.graphs.buckets)} graphs, {taken} allocations"
    return Check(name, bool(runner.graphs.buckets) and taken == 0, detail)


def _run(engine: EngineCore) -> list[StepOutput]:
    outputs: list[StepOutput] = []
    while (output := engine.step()) is not None:
        for update in output.updates:
            if update.error is not None:
                raise update.error
        outputs.append(output)
    return outputs


def _seconds(output: StepOutput) -> float:
    return (output.ended_ns - output.started_ns) / 1e9


def _request(name: str, num_tokens: int, vocab_size: int, max_tokens: int) -> Request:
    return Request(
        request_id=RequestId(name),
        model="random",
        token_ids=tuple((7 * i + len(name)) % vocab_size for i in range(num_tokens)),
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens),
        arrival_ns=0,
        deadline_ns=2**62,
    )
