"""How many tokens of prompts a step may compute beside its decodes (``common.pacing``).

The speed of steps is measured at boot (``expect``) and corrected by every step since. Without it,
or without TPOT targets, only the token budget limits a step. Owned by the engine core, used under
its lock.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from isthmus.common.clock import NS_PER_MS, Clock
from isthmus.common.cluster import LatencyModel, StepTotals
from isthmus.common.learned_latency import LearnedLatency
from isthmus.common.pacing import LONGEST_GAP, ChunkBudget, longest_step_ms
from isthmus.engine.sequence import Sequence


class Pacer:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._learned: LearnedLatency | None = None
        self._step_ms = 0.0  # of the step that is planned, without its prompts
        self._planned_ms = 0.0  # of the last one with prompts; 0 = the last one had none

    def expect(self, latency: LatencyModel) -> None:
        """How long steps take, to learn on."""
        self._learned = LearnedLatency(latency)

    def observe(self, totals: StepTotals) -> None:
        """One more step has ended."""
        if self._learned is not None:
            self._learned.observe(totals)

    def budget(
        self,
        num_tokens: int,
        decodes: Collection[Sequence],
        coming_ms: float,
        *,
        is_idle: bool,
    ) -> ChunkBudget:
        """Of a step with these ``decodes`` and room for ``num_tokens`` more.

        ``coming_ms``: the least TPOT target of those whose KV is on its way: they must not find a
        long step begun. ``is_idle``: the step begins now; else when the one in flight ends."""
        learned = self._learned
        if learned is None:
            return ChunkBudget(num_tokens)
        model = learned.model
        context = sum(s.num_planned_tokens + 1 for s in decodes)
        step_ms = max(0.0, model.prefill_base - model.decode_base) if decodes else 0.0
        step_ms += model.decode_step_ms(len(decodes), context) if decodes else model.prefill_base
        begins_ns = self._clock.monotonic_ns()
        if not is_idle:
            begins_ns += round((self._planned_ms or step_ms) * NS_PER_MS)
        limit_ms = min([_limit_ms(s, begins_ns, step_ms) for s in decodes], default=inf)
        limit_ms = min(limit_ms, max(LONGEST_GAP * coming_ms, 2 * step_ms))
        self._step_ms = step_ms
        left_ms = max(0.0, limit_ms - step_ms)
        return ChunkBudget(num_tokens, left_ms, model.prefill_token, model.prefill_pair)

    def planned(self, budget: ChunkBudget | None) -> None:
        """The step is planned; None = without prompts."""
        self._planned_ms = self._step_ms + budget.taken_ms if budget is not None else 0.0


def _limit_ms(sequence: Sequence, begins_ns: int, step_ms: float) -> float:
    target_ms = sequence.request.slo.tpot_ms
    if target_ms is None or not sequence.paced_from_ns:
        return inf
    num_expected = sequence.num_expected_tokens
    return longest_step_ms(
        target_ms,
        num_expected + 1 - sequence.paced_from_tokens,
        (begins_ns - sequence.paced_from_ns) / NS_PER_MS,
        sequence.max_num_tokens - num_expected,
        step_ms,
    )
