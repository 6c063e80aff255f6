"""How long a step may take that computes prompts beside sequences that decode.

A sequence that decodes has a token due every ``PACE`` of its TPOT target. One that is ahead of that
can bear a longer step, up to what its next token is due; one that is behind has to catch up::

    first token                       now    due             due = PACE · target · n − age
        ├── 1 ── 2 ──── 3 ── … ─ n−1 ──┼──────┤
                                       └──────┘ the step may take so long

Prompts fill what the decodes leave of that time. A sequence also lends what it can take back before
its answer may end: nearly all answers have some length at least (``answer_lengths``), and a short
prompt beside one that has just begun is computed at once instead of in pieces. Prompts are never
starved: who is behind takes back half of what it could, a share of its pace is always left for
prompts, and who cannot meet its target any more has no claim. Chunks sized by what each token has
left of its deadline are Niyama's (Goel et al., 2025, arXiv:2503.22562). The engine, the simulator
and the router's predictions share this file.
"""

from __future__ import annotations

from math import inf, sqrt

PACE = 0.9
"""Share of the target: the rest is for steps that take longer than expected."""
LEAST_SHARE = 0.1
"""Of a sequence's pace, that prompts have in any case."""
LENT = 0.5
"""Of what a sequence could take back before its answer may end: the rest is for what comes then."""
LONGEST_GAP = 3.0
"""TPOT targets between two tokens, however far ahead a sequence is."""


def longest_step_ms(
    target_ms: float,
    num_tokens: int,
    age_ms: float,
    num_left: int,
    step_ms: float,
    num_likely: int,
) -> float:
    """What a sequence lets the next step take; infinite where nothing can save its target.

    ``num_tokens``: those since its first one, with the next; ``age_ms``: since the first one;
    ``num_left``: those that it may have yet at most, with the next; ``step_ms``: a step without
    prompts; ``num_likely``: tokens since the first one that there will be in nearly all cases."""
    ends_ms = age_ms + num_left * step_ms
    if ends_ms > target_ms * (num_tokens + num_left - 1):
        return inf
    pace_ms = PACE * target_ms
    least_ms = max((pace_ms + step_ms) / 2, step_ms + LEAST_SHARE * pace_ms)
    due_ms = pace_ms * num_tokens - age_ms
    if num_tokens < num_likely:
        due_ms += LENT * (num_likely - num_tokens) * max(0.0, pace_ms - least_ms)
    return min(max(due_ms, least_ms), max(LONGEST_GAP * target_ms, least_ms))


def tokens_within(limit_ms: float, token_ms: float, pair_ms: float, computed: int) -> float:
    """How many prompt tokens after ``computed`` ones take ``limit_ms``, without a step's base."""
    if limit_ms <= 0.0:
        return 0.0
    linear = token_ms + pair_ms * computed
    if pair_ms <= 0.0:
        return limit_ms / linear if linear > 0.0 else inf
    # The positive root of  pair/2 · n² + linear · n = limit,  in the form that loses no digits.
    return 2 * limit_ms / (linear + sqrt(linear * linear + 2 * pair_ms * limit_ms))


class ChunkBudget:
    """What is left of one step for prompts: tokens, and time where somebody's pace limits it."""

    __slots__ = ("_left_ms", "_pair_ms", "_token_ms", "is_cut", "num_tokens", "taken_ms")

    def __init__(
        self, num_tokens: int, left_ms: float = inf, token_ms: float = 0.0, pair_ms: float = 0.0
    ) -> None:
        """``token_ms``, ``pair_ms``: coefficients of a prompt's time, where they are known."""
        self.num_tokens = num_tokens
        self.taken_ms = 0.0
        self.is_cut = False  # a chunk would have been longer but for the time
        self._left_ms = left_ms
        self._token_ms = token_ms
        self._pair_ms = pair_ms

    @property
    def is_spent(self) -> bool:
        return self.num_tokens <= 0 or (self.taken_ms > 0.0 and self._left_ms < self._token_ms)

    def take(self, num_left: int, num_computed: int) -> int:
        """How many tokens, one at least, of a prompt that has ``num_left`` to compute."""
        count = min(num_left, self.num_tokens)
        if self._left_ms < inf:
            fitting = tokens_within(self._left_ms, self._token_ms, self._pair_ms, num_computed)
            fitting = max(1.0, fitting)
            if fitting < count:
                count, self.is_cut = int(fitting), True
        took_ms = (self._token_ms + self._pair_ms * (num_computed + count / 2)) * count
        self._left_ms -= took_ms
        self.taken_ms += took_ms
        self.num_tokens -= count
        return count
