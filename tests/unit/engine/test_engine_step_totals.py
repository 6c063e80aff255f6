"""What steps have cost, as a latency model is fitted to it."""

from __future__ import annotations

from isthmus.common.cluster import NO_STEPS
from isthmus.engine.scheduler import StepPlan
from isthmus.engine.step_totals import add_step


def plan(
    starts: tuple[int, ...], counts: tuple[int, ...], num_prefill: int, num_decode: int
) -> StepPlan:
    samples = (True,) * len(starts)
    return StepPlan(0, (), starts, counts, samples, num_prefill, num_decode, 0)


def test_decode_steps_count_sequences_and_the_context_they_attend_to() -> None:
    totals = add_step(NO_STEPS, plan((10, 20), (1, 1), 0, 2), 5.0)
    totals = add_step(totals, plan((11, 21), (1, 1), 0, 2), 6.0)
    assert (totals.decode_steps, totals.decode_seqs, totals.decode_ms) == (2, 4, 11.0)
    assert totals.decode_context == 10 + 20 + 11 + 21 + 4
    assert totals.prefill_steps == 0


def test_chunks_count_their_pairs_and_what_decodes_beside_them() -> None:
    totals = add_step(NO_STEPS, plan((30, 100), (1, 50), 50, 1), 9.0)
    assert (totals.prefill_steps, totals.prefill_tokens, totals.prefill_ms) == (1, 50, 9.0)
    assert totals.prefill_pairs == 50 * 100 + 50 * 50 / 2
    assert (totals.beside_seqs, totals.beside_context) == (1, 31)
    assert totals.decode_steps == 0
