"""Sequences in line at a simulated instance, with the tokens and the blocks that they amount to.

Sums are kept, not counted when somebody asks: every report asks, and under overload lines are long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from isthmus.sim.sequence import SimSequence


class Line:
    """Nobody in it gains or loses a token. ``num_blocks`` hold all of ``num_tokens``."""

    def __init__(self, block_size: int) -> None:
        self.num_seqs = 0
        self.num_prompts = 0
        self.num_tokens = 0
        self.num_blocks = 0
        self.head: SimSequence | None = None
        self._block_size = block_size
        self._queue: deque[SimSequence] = deque()

    def __iter__(self) -> Iterator[SimSequence]:
        return iter(self._queue)

    def append(self, sequence: SimSequence) -> None:
        self._queue.append(sequence)
        self._count(sequence, 1)

    def append_first(self, sequence: SimSequence) -> None:
        self._queue.appendleft(sequence)
        self._count(sequence, 1)

    def pop_head(self) -> SimSequence:
        sequence = self._queue.popleft()
        self._count(sequence, -1)
        return sequence

    def remove(self, sequence: SimSequence) -> None:
        self._queue.remove(sequence)
        self._count(sequence, -1)

    def clear(self) -> None:
        self._queue.clear()
        self.head = None
        self.num_seqs = self.num_prompts = self.num_tokens = self.num_blocks = 0

    def check_integrity(self) -> None:
        """AssertionError when the sums are not those of who is there."""
        assert self.num_seqs == len(self._queue)
        assert self.head is next(iter(self._queue), None)
        assert self.num_prompts == sum(s.is_prompt for s in self._queue)
        assert self.num_tokens == sum(s.num_tokens for s in self._queue)
        assert self.num_blocks == sum(-(-s.num_tokens // self._block_size) for s in self._queue)

    def _count(self, sequence: SimSequence, sign: int) -> None:
        num_tokens = sequence.num_tokens
        self.head = self._queue[0] if self._queue else None
        self.num_seqs += sign
        if sequence.is_prompt:
            self.num_prompts += sign
        self.num_tokens += sign * num_tokens
        self.num_blocks += sign * -(-num_tokens // self._block_size)
