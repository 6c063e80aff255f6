"""What a simulated instance tells a router of its load: sums that are kept, put together."""

from __future__ import annotations

from isthmus.common.clock import NS_PER_MS
from isthmus.common.cluster import LoadReport
from isthmus.common.ids import InstanceId
from isthmus.sim.decode_batch import DecodeBatch
from isthmus.sim.scheduler import Scheduler
from isthmus.sim.step_counts import StepCounts


def load_report(
    scheduler: Scheduler,
    counts: StepCounts,
    at_ns: int,
    *,
    instance_id: InstanceId,
    epoch: int,
    seq: int,
    step_ms: float,
) -> LoadReport:
    """At a time by which the decodes own their blocks. ``step_ms``: how long steps take of late."""
    pool, lines, decodes = scheduler.pool, scheduler.lines, scheduler.decodes
    arrived = lines.arrived
    waiting_tokens = lines.num_waiting_tokens
    context = arrived.num_tokens - arrived.num_seqs + _decode_context(decodes)
    num_prompts = lines.num_prompts
    for sequence in scheduler.prefilling:
        done = sequence.num_computed
        waiting_tokens += sequence.num_prompt + sequence.num_generated - done
        context += done
        num_prompts += sequence.is_prompt
    head = lines.waiting.head
    oldest_ns = head.added_ns if head is not None else at_ns
    return LoadReport(
        instance_id=instance_id,
        epoch=epoch,
        seq=seq,
        at_ns=at_ns,
        waiting_seqs=lines.num_waiting_seqs,
        waiting_tokens=waiting_tokens,
        oldest_wait_ms=(at_ns - oldest_ns) / NS_PER_MS,
        running_seqs=len(scheduler.running) + arrived.num_seqs,
        running_context_tokens=context,
        num_blocks=pool.num_blocks,
        free_blocks=pool.num_blocks - pool.used,
        held_blocks=lines.held_blocks,
        cached_blocks=pool.num_cached,
        step_ms=step_ms,
        steps=counts.num_steps,
        totals=counts.known or counts.totals(),
        prompt_seqs=num_prompts,
    )


def _decode_context(decodes: DecodeBatch) -> int:
    """With the tokens of the steps of a leap that have begun."""
    if decodes.grown_to > decodes.steps:
        return decodes.context + (decodes.grown_to - decodes.steps) * decodes.num_seqs
    return decodes.context
