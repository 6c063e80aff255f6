"""The sequences of a simulated instance that decode: counted, so that steps need not be taken.

Steps in which nobody comes or goes differ by one token a sequence, so when the next one ends, and
how many blocks all of them need until then, follow from counts::

    steps      steps               steps + n
                 ├──┬──┬──┬──┬──┬──┤
    blocks       └ grown_to ┘

Invariant between steps: every decoding sequence owns the blocks of the tokens that it had when
decode step ``grown_to`` began. ``_bins[s % block_size]`` counts those that need one more for
step s. Owns no block: it takes and returns them for its sequences.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from isthmus.sim.kv_pool import KvPool
from isthmus.sim.sequence import SeqState, SimSequence


class DecodeBatch:
    """``steps``: decode steps done; ``context``: Σ tokens when the next one begins."""

    def __init__(self, pool: KvPool) -> None:
        self.num_seqs = 0
        self.context = 0
        self.steps = 0
        self.grown_to = -1
        self._pool = pool
        self._bins = [0] * pool.block_size
        self._ends: list[tuple[int, int, SimSequence]] = []
        self._order = 0

    def join(self, sequence: SimSequence) -> None:
        """Its blocks hold the tokens up to ``grown_to`` from here on."""
        base = sequence.num_tokens - self.steps
        if not self.num_seqs:  # ``grown_to`` says something of decodes only
            is_new = sequence.state is SeqState.PREFILLING
            self.grown_to = self.steps - 1 if is_new else self.steps
        owned = self._pool.blocks_for(base + self.grown_to)
        assert owned == sequence.num_blocks, "blocks and tokens disagree"
        sequence.move_to(SeqState.DECODING)
        sequence.base = base
        sequence.end_step = self.steps + sequence.num_output - sequence.num_generated
        self._bins[(1 - base) % len(self._bins)] += 1
        self.num_seqs += 1
        self.context += sequence.num_tokens
        self._order += 1
        heappush(self._ends, (sequence.end_step, self._order, sequence))

    def leave(self, sequence: SimSequence) -> None:
        """Between steps. It keeps its tokens and its blocks."""
        sequence.num_blocks = self.blocks_of(sequence)
        sequence.num_generated = sequence.base + self.steps - sequence.num_prompt
        self._bins[(1 - sequence.base) % len(self._bins)] -= 1
        self.num_seqs -= 1
        self.context -= sequence.base + self.steps

    def clear(self) -> None:
        """The instance died."""
        self.num_seqs = 0

    # --- steps -----------------------------------------------------------------------------------

    def advance(self, steps: int) -> None:
        self.own(self.steps + steps - 1)
        self.steps += steps
        self.context += self.num_seqs * steps

    def take_ended(self) -> SimSequence | None:
        """The next one that has all its tokens. It is still in the batch."""
        ends = self._ends
        while ends and ends[0][0] <= self.steps:
            end_step, _, sequence = heappop(ends)
            if sequence.state is SeqState.DECODING and sequence.end_step == end_step:
                return sequence
        return None

    def steps_to_next_end(self) -> int:
        """Of a batch that is not empty."""
        ends = self._ends
        while True:
            end_step, _, sequence = ends[0]
            if sequence.state is SeqState.DECODING and sequence.end_step == end_step:
                return end_step - self.steps
            heappop(ends)

    # --- blocks ----------------------------------------------------------------------------------

    def blocks_of(self, sequence: SimSequence) -> int:
        """Of one that decodes."""
        return self._pool.blocks_for(sequence.base + self.grown_to)

    def own(self, step: int) -> None:
        """The blocks that all need up to ``step``; there must be as many."""
        if step > self.grown_to:
            if self.num_seqs and (needed := self.blocks_until(step)):
                self._pool.grow(needed)
            self.grown_to = step

    def blocks_until(self, step: int) -> int:
        """Blocks that all need for steps ``grown_to + 1 … step``."""
        missing = step - self.grown_to
        if missing <= 0:
            return 0
        bins = self._bins
        size = len(bins)
        rounds, rest = divmod(missing, size)
        needed = rounds * self.num_seqs
        if rest:
            first = (self.grown_to + 1) % size
            last = first + rest
            needed += sum(bins[first:last])
            if last > size:
                needed += sum(bins[: last - size])
        return needed

    def longest_leap(self, steps: int) -> int:
        """Most steps, one at least and ``steps`` at most, for which there are blocks."""
        free = self._pool.free
        if self.num_seqs * (steps // len(self._bins) + 1) <= free:
            return steps
        low, high = 1, steps
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks_until(self.steps + middle - 1) <= free:
                low = middle
            else:
                high = middle - 1
        return low

    def check_integrity(self, sequences: Iterable[SimSequence]) -> None:
        """AssertionError when the counts are not those of ``sequences``, which decode."""
        decodes = list(sequences)
        assert len(decodes) == self.num_seqs
        assert sum(s.base + self.steps for s in decodes) == self.context
        assert sum(self._bins) == len(decodes)
