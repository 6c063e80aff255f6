"""How many tokens of prompts a step may compute beside its decodes (``common.pacing``).

The speed of steps is measured at boot (``expect``) and corrected by every step since. Without it,
or without TPOT targets, only the token budget limits a step. Owned by the engine core, used under
its lock.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from operator import attrgetter

from isthmus.common.answer_lengths import AnswerLengths
from isthmus.common.clock import NS_PER_MS, Clock
from isthmus.common.cluster import LatencyModel, StepTotals
from isthmus.common.learned_latency import LearnedLatency
from isthmus.common.pacing import LONGEST_GAP, PACE, ChunkBudget, longest_step_ms
from isthmus.engine.sequence import Sequence

_num_tokens = attrgetter("num_tokens")
_num_unknown_tokens = attrgetter("num_unknown_tokens")


class Pacer:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._learned: LearnedLatency | None = None
        self._answers = AnswerLengths()
        self._step_ms = 0.0  # of the step that is planned, without its prompts
        self._planned_ms = 0.0  # of the last one with prompts; 0 = the last one had none

    def expect(self, latency: LatencyModel) -> None:
        """How long steps take, to learn on. What ran until now measured that: no answers."""
        self._learned = LearnedLatency(latency)
        self._answers = AnswerLengths()

    def observe(self, totals: StepTotals) -> None:
        """One more step has ended."""
        if self._learned is not None:
            self._learned.observe(totals)

    def answered(self, num_tokens: int) -> None:
        """An answer has ended after so many tokens."""
        self._answers.observe(num_tokens)

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
        # Of a decode all tokens but the one that it computes are planned.
        context = sum(map(_num_tokens, decodes)) + sum(map(_num_unknown_tokens, decodes))
        step_ms = _mixed_step_ms(model, len(decodes), context)
        begins_ns = self._clock.monotonic_ns()
        if not is_idle:
            begins_ns += round((self._planned_ms or step_ms) * NS_PER_MS)
        limit_ms = _limit_ms(decodes, begins_ns, step_ms, self._answers.least)
        limit_ms = min(limit_ms, max(LONGEST_GAP * coming_ms, 2 * step_ms))
        self._step_ms = step_ms
        left_ms = max(0.0, limit_ms - step_ms)
        return ChunkBudget(num_tokens, left_ms, model.prefill_token, model.prefill_pair)

    def planned(self, budget: ChunkBudget | None) -> None:
        """The step is planned; None = without prompts."""
        self._planned_ms = self._step_ms + budget.taken_ms if budget is not None else 0.0


def _mixed_step_ms(model: LatencyModel, num_decodes: int, context: int) -> float:
    """A step with prompts, without what their tokens take: of two constant costs, the larger."""
    if not num_decodes:
        return model.prefill_base
    base = model.large_base if 0 < model.large_batch <= num_decodes else model.decode_base
    return model.decode_step_ms(num_decodes, context) + max(0.0, model.prefill_base - base)


def _limit_ms(
    decodes: Collection[Sequence], begins_ns: int, step_ms: float, num_likely: int
) -> float:
    """What all of them let the step take. There may be hundreds, and each step asks: most are seen
    not to be the nearest without a call."""
    limit_ms = inf
    for sequence in decodes:
        target_ms = sequence.request.slo.tpot_ms
        if target_ms is None or not sequence.paced_from_ns:
            continue
        num_expected = sequence.num_tokens + sequence.num_unknown_tokens
        num_tokens = num_expected + 1 - sequence.paced_from_tokens
        age_ms = (begins_ns - sequence.paced_from_ns) / NS_PER_MS
        # It lets the step take as long as its next token is due, or its longest gap, at least.
        if PACE * target_ms * num_tokens - age_ms < limit_ms or LONGEST_GAP * target_ms < limit_ms:
            longest_ms = longest_step_ms(
                target_ms,
                num_tokens,
                age_ms,
                sequence.max_num_tokens - num_expected,
                step_ms,
                min(sequence.request.num_prompt_tokens + num_likely, sequence.max_num_tokens)
                - sequence.paced_from_tokens,
            )
            limit_ms = min(limit_ms, longest_ms)
    return limit_ms
