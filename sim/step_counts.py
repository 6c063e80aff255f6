"""What a simulated instance measures of its steps, for whoever fits a model to it."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.common.cluster import StepTotals
from isthmus.sim.sequence import SimSequence


class StepCounts:
    """``StepTotals`` that grow."""

    def __init__(self) -> None:
        self._prefill_steps = 0
        self._prefill_tokens = 0
        self._prefill_pairs = 0.0
        self._beside_seqs = 0
        self._beside_context = 0
        self._prefill_ms = 0.0
        self._decode_steps = 0
        self._decode_seqs = 0
        self._decode_context = 0
        self._decode_ms = 0.0
        self.known: StepTotals | None = None  # as long as nothing has changed since

    def totals(self) -> StepTotals:
        if self.known is None:
            self.known = StepTotals(
                prefill_steps=self._prefill_steps,
                prefill_tokens=self._prefill_tokens,
                prefill_pairs=self._prefill_pairs,
                beside_seqs=self._beside_seqs,
                beside_context=self._beside_context,
                prefill_ms=self._prefill_ms,
                decode_steps=self._decode_steps,
                decode_seqs=self._decode_seqs,
                decode_context=self._decode_context,
                decode_ms=self._decode_ms,
            )
        return self.known

    def decoded(self, steps: int, num_seqs: int, context: int, took_ms: float) -> None:
        """``context``: when the first of the steps began."""
        self.known = None
        self._decode_steps += steps
        self._decode_seqs += steps * num_seqs
        self._decode_context += steps * context + num_seqs * steps * (steps - 1) // 2
        self._decode_ms += took_ms

    def prefilled(
        self,
        chunks: Sequence[tuple[SimSequence, int]],
        num_seqs: int,
        context: int,
        took_ms: float,
    ) -> None:
        """A step that computed chunks beside ``num_seqs`` decodes, before they are counted."""
        self.known = None
        self._prefill_steps += 1
        self._prefill_tokens += sum([count for _, count in chunks])
        self._prefill_pairs += sum([count * (s.num_computed + count / 2) for s, count in chunks])
        self._beside_seqs += num_seqs
        self._beside_context += context
        self._prefill_ms += took_ms
