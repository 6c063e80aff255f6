"""How many tokens of prompts a simulated step may compute beside its decodes (``common.pacing``).

What ``engine.pacer`` does, with a model of steps that need not be learned. Pure: owns nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf

from isthmus.common.clock import NS_PER_MS
from isthmus.common.pacing import LONGEST_GAP, ChunkBudget, longest_step_ms
from isthmus.sim.decode_batch import DecodeBatch
from isthmus.sim.sequence import SeqState, SimSequence
from isthmus.sim.step_model import StepModel


def paced_budget(
    model: StepModel,
    num_tokens: int,
    decodes: DecodeBatch,
    running: Iterable[SimSequence],
    kept: Iterable[SimSequence],
    now_ns: int,
    num_likely: int,
) -> ChunkBudget:
    """Of a step that begins now, with room for ``num_tokens`` beside ``decodes``.

    ``running``: those who decode are among them. ``kept``: those whose KV is on its way are: they
    must not find a long step begun."""
    step_ms = model.mixed_ms(0.0, decodes.num_seqs, decodes.context)
    limit_ms = inf
    if decodes.num_seqs:
        limit_ms = min(
            _decode_limits(running, decodes.steps, now_ns, step_ms, num_likely), default=inf
        )
    limit_ms = min(limit_ms, min(_coming_limits(kept, step_ms), default=inf))
    left_ms = max(0.0, limit_ms - step_ms)
    return ChunkBudget(num_tokens, left_ms, model.prefill_token, model.prefill_pair)


def _decode_limits(
    running: Iterable[SimSequence], steps: int, now_ns: int, step_ms: float, num_likely: int
) -> Iterator[float]:
    """How long the next step may take, in milliseconds, for each that decodes with a target."""
    for sequence in running:
        target_ms = sequence.tpot_ms
        if target_ms is not None and sequence.state is SeqState.DECODING:
            num_generated = sequence.base + steps - sequence.num_prompt
            yield longest_step_ms(
                target_ms,
                num_generated + 1 - sequence.num_first,
                (now_ns - sequence.first_ns) / NS_PER_MS,
                sequence.most_output - num_generated,
                step_ms,
                min(num_likely, sequence.most_output) - sequence.num_first,
            )


def _coming_limits(kept: Iterable[SimSequence], step_ms: float) -> Iterator[float]:
    for sequence in kept:
        if sequence.tpot_ms is not None and sequence.state is SeqState.RESERVED:
            yield max(LONGEST_GAP * sequence.tpot_ms, 2 * step_ms)
