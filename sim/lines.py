"""The sequences of a simulated instance that are not in its batch, and what they amount to.

::

    fetching    FETCHING          wait for a prefix from a peer
    waiting     WAITING           prompts to compute
    reserving   RESERVING         wait for blocks for KV that another computes
    kept        RESERVED, HELD    have blocks: for KV that is coming, or for KV to be sent
    arrived     ARRIVED           have KV and wait for a place in the batch

Invariant: each is in the line of its state. Owns the lines, not the blocks of who is in them, but
for those of ``fetching``.
"""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.sim.kv_pool import KvPool
from isthmus.sim.line import Line
from isthmus.sim.prefix_fetch import FetchLine
from isthmus.sim.sequence import SeqState, SimSequence


class Lines:
    """``held_blocks``: those of HELD sequences. ``kept`` is to be read only."""

    def __init__(self, pool: KvPool, fetch_min_tokens: int) -> None:
        self.fetching = FetchLine(pool, fetch_min_tokens)
        self.waiting = Line(pool.block_size)
        self.reserving = Line(pool.block_size)
        self.kept: dict[SimSequence, None] = {}
        self.held_blocks = 0
        self.arrived = Line(pool.block_size)

    def __iter__(self) -> Iterator[SimSequence]:
        yield from self.arrived
        yield from self.kept
        yield from self.waiting
        yield from self.reserving
        yield from self.fetching

    @property
    def num_seqs(self) -> int:
        return self.num_waiting_seqs + len(self.kept) + self.arrived.num_seqs

    @property
    def num_waiting_seqs(self) -> int:
        """Without blocks for all their tokens."""
        return self.waiting.num_seqs + self.reserving.num_seqs + len(self.fetching)

    @property
    def num_waiting_tokens(self) -> int:
        return self.waiting.num_tokens + self.reserving.num_tokens + self.fetching.num_tokens

    @property
    def num_prompts(self) -> int:
        """To be computed here."""
        return self.waiting.num_prompts + self.fetching.num_prompts

    @property
    def is_waiting_first(self) -> bool:
        """The head of ``waiting`` is there, and older than that of ``arrived``."""
        waiting, arrived = self.waiting.head, self.arrived.head
        if waiting is None:
            return False
        return arrived is None or waiting.added_ns <= arrived.added_ns

    def keep(self, sequence: SimSequence) -> None:
        """RESERVED or HELD since now."""
        self.kept[sequence] = None
        if sequence.is_for_peer:
            self.held_blocks += sequence.num_blocks

    def remove(self, sequence: SimSequence) -> None:
        """From the line of its state. It keeps its blocks, but for one that was FETCHING."""
        match sequence.state:
            case SeqState.RESERVED | SeqState.HELD:
                del self.kept[sequence]
                if sequence.is_for_peer:
                    self.held_blocks -= sequence.num_blocks
            case SeqState.ARRIVED:
                self.arrived.remove(sequence)
            case SeqState.FETCHING:
                self.fetching.leave(sequence)
            case SeqState.WAITING:
                self.waiting.remove(sequence)
            case SeqState.RESERVING:
                self.reserving.remove(sequence)

    def clear(self) -> None:
        """The instance died."""
        for line in (self.waiting, self.reserving, self.arrived, self.fetching):
            line.clear()
        self.kept.clear()
        self.held_blocks = 0

    def check_integrity(self) -> None:
        """AssertionError when sums disagree with the sequences."""
        for line in (self.waiting, self.reserving, self.arrived, self.fetching):
            line.check_integrity()
        assert self.held_blocks == sum(s.num_blocks for s in self.kept if s.is_for_peer)
