"""What the engine's steps have cost so far, in the form that a latency model is fitted to."""

from __future__ import annotations

from dataclasses import replace

from isthmus.common.cluster import StepTotals
from isthmus.engine.scheduler import StepPlan


def add_step(totals: StepTotals, plan: StepPlan, elapsed_ms: float) -> StepTotals:
    """``totals`` with one more step. Decodes come first in a plan and run one token each."""
    num_decodes = plan.num_decode_tokens
    context = sum(plan.starts[:num_decodes]) + num_decodes
    if not plan.num_prefill_tokens:
        return replace(
            totals,
            decode_steps=totals.decode_steps + 1,
            decode_seqs=totals.decode_seqs + num_decodes,
            decode_context=totals.decode_context + context,
            decode_ms=totals.decode_ms + elapsed_ms,
        )
    chunks = zip(plan.starts[num_decodes:], plan.counts[num_decodes:], strict=True)
    return replace(
        totals,
        prefill_steps=totals.prefill_steps + 1,
        prefill_tokens=totals.prefill_tokens + plan.num_prefill_tokens,
        prefill_pairs=totals.prefill_pairs + sum(u * c + u * u / 2 for c, u in chunks),
        beside_seqs=totals.beside_seqs + num_decodes,
        beside_context=totals.beside_context + context,
        prefill_ms=totals.prefill_ms + elapsed_ms,
    )
