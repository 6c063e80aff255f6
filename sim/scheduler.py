"""Who of a simulated instance's sequences runs, and on which blocks.

It follows ``isthmus.engine.scheduler``: one token budget a step, decodes first, then newcomers with
KV, chunks of prompts, waiting newcomers; blocks for all tokens on entry, growth later, and the
youngest is preempted when none is left. Knows of time only what it is told, and tells nobody
anything: steps, and whoever wants to hear of sequences, are ``instance``'s.

Owns the sequences, each in one of its ``lines`` or running, and the pool of their blocks; who
decodes is counted by ``decodes``.
"""

from __future__ import annotations

from isthmus.common.answer_lengths import AnswerLengths
from isthmus.common.pacing import ChunkBudget
from isthmus.sim.decode_batch import DecodeBatch
from isthmus.sim.kv_pool import KvPool
from isthmus.sim.lines import Lines
from isthmus.sim.pacer import paced_budget
from isthmus.sim.sequence import SeqState, SimSequence
from isthmus.sim.sequence_blocks import give_back, publish, try_take
from isthmus.sim.spec import InstanceSpec
from isthmus.sim.step_model import StepModel

Chunk = tuple[SimSequence, int]
"""A sequence, and how many tokens of its prompt a step computes."""


class Scheduler:
    """``running`` (oldest first) and ``prefilling`` (of the running) are to be read only."""

    def __init__(self, spec: InstanceSpec) -> None:
        self.pool = KvPool(spec.num_blocks, spec.block_size)
        self.lines = Lines(self.pool, spec.fetch_min_tokens)
        self.decodes = DecodeBatch(self.pool)
        self.running: dict[SimSequence, None] = {}
        self.prefilling: dict[SimSequence, None] = {}
        self.num_preempted = 0
        self.answers = AnswerLengths()
        self._spec = spec
        self._num_aborting = 0  # of the running
        self._joined: list[SimSequence] = []

    @property
    def has_room(self) -> bool:
        """For one more in the batch."""
        return len(self.running) < self._spec.max_num_seqs

    @property
    def kept_to_grow(self) -> int:
        """Blocks that newcomers leave to those who run."""
        return self._spec.watermark_blocks if self.running else 0

    # --- a step ----------------------------------------------------------------------------------

    def plan(self, now_ns: int, model: StepModel) -> list[Chunk]:
        """Whoever can enters, and the decodes get blocks for the next step. Returns its chunks.
        ``model``: how long steps take at present."""
        self._grow_decodes()
        self._enter_all_arrived()
        budget = self._budget(now_ns, model)
        chunks: list[Chunk] = []
        for sequence in self.prefilling:
            if budget.is_spent:
                break
            chunks.append((sequence, budget.take(sequence.num_left, sequence.num_computed)))
        while not budget.is_spent and self.has_room:
            entered = self._enter_next(now_ns)
            if entered is None:
                break
            if entered.state is SeqState.PREFILLING:
                chunks.append((entered, budget.take(entered.num_left, entered.num_computed)))
            else:
                budget.take(1, entered.num_tokens - 1)  # the last is the one to compute
        return chunks

    def take_joined(self) -> list[SimSequence]:
        """Those that decode since this was last asked, after one token."""
        joined, self._joined = self._joined, []
        return joined if not joined else [s for s in joined if s.state is SeqState.DECODING]

    def computed(self, sequence: SimSequence, count: int) -> bool:
        """A chunk is done. True = a token is sampled: it decodes (``join``), or is kept (``hold``)
        since then."""
        sequence.num_computed += count
        self._publish(sequence)
        if sequence.num_left or sequence.is_aborting:
            return False
        del self.prefilling[sequence]
        return True

    def hold(self, sequence: SimSequence) -> None:
        """Computed for another, which has not got it yet."""
        del self.running[sequence]
        sequence.move_to(SeqState.HELD)
        self.lines.keep(sequence)

    def join(self, sequence: SimSequence) -> None:
        self.decodes.join(sequence)
        if sequence.num_generated == 1:
            self._joined.append(sequence)

    def end(self, sequence: SimSequence) -> None:
        """One that runs."""
        self._leave(sequence)
        give_back(self.pool, sequence)
        sequence.move_to(SeqState.ENDED)

    def abort_later(self, sequence: SimSequence) -> None:
        """One that runs, until ``end_aborting``."""
        sequence.is_aborting = True
        self._num_aborting += 1

    def end_aborting(self) -> None:
        if self._num_aborting:
            for sequence in [s for s in self.running if s.is_aborting]:
                self.end(sequence)

    # --- between steps ---------------------------------------------------------------------------

    def try_grant(self) -> SimSequence | None:
        """The next reservation in line, if there are blocks that the waiting do not want."""
        lines = self.lines
        sequence = lines.reserving.head
        if sequence is None:
            return None
        keep_free = lines.waiting.num_blocks + self._spec.watermark_blocks
        if not try_take(self.pool, sequence, keep_free):
            return None
        lines.reserving.pop_head()
        sequence.move_to(SeqState.RESERVED)
        lines.keep(sequence)
        return sequence

    def arrived(self, sequence: SimSequence, first_ns: int) -> None:
        """The KV of a reserved sequence is there, and its first token since ``first_ns``."""
        self.lines.remove(sequence)
        sequence.move_to(SeqState.ARRIVED)
        sequence.take_first_token(first_ns)
        sequence.num_computed = sequence.num_tokens - 1
        self._publish(sequence)
        self.lines.arrived.append(sequence)

    def drop(self, sequence: SimSequence) -> None:
        """Ends one that does not run."""
        self.lines.remove(sequence)
        give_back(self.pool, sequence)
        sequence.move_to(SeqState.ENDED)

    def clear(self, steps: int) -> list[SimSequence]:
        """The instance died, ``steps`` decode steps done. Returns everybody, with their tokens."""
        lost = [*self.running, *self.lines]
        for sequence in lost:
            if sequence.state is SeqState.DECODING:
                sequence.num_generated = sequence.base + steps - sequence.num_prompt
            sequence.move_to(SeqState.ENDED)
        self.running.clear()
        self._num_aborting = 0
        self.prefilling.clear()
        self.lines.clear()
        self.decodes.clear()
        self.pool.clear()
        return lost

    def check_integrity(self) -> None:
        """AssertionError when counts disagree with the sequences."""
        running, lines = self.running, self.lines
        self.pool.check_integrity()
        lines.check_integrity()
        self.decodes.check_integrity(s for s in running if s.state is SeqState.DECODING)
        assert self._num_aborting == sum(s.is_aborting for s in running)
        owned: set[bytes] = set()
        private = 0
        for sequence in [*running, *lines.arrived, *lines.kept, *lines.fetching]:
            owned.update(sequence.refs)
            is_decoding = sequence.state is SeqState.DECODING
            num = self.decodes.blocks_of(sequence) if is_decoding else sequence.num_blocks
            private += num - len(sequence.refs)
        assert private + len(owned) == self.pool.used, "blocks without an owner"

    # --- entering and leaving --------------------------------------------------------------------

    def _budget(self, now_ns: int, model: StepModel) -> ChunkBudget:
        decodes, lines = self.decodes, self.lines
        num_tokens = self._spec.max_num_batched_tokens - decodes.num_seqs
        may_enter = lines.waiting.head is not None and self.has_room
        if not self.prefilling and not may_enter:
            return ChunkBudget(num_tokens)
        return paced_budget(
            model, num_tokens, decodes, self.running, lines.kept, now_ns, self.answers.least
        )

    def _enter_all_arrived(self) -> None:
        """Before chunks of prompts; the last place goes to the older of the two lines' heads."""
        spec, lines = self._spec, self.lines
        room = min(spec.max_num_batched_tokens, spec.max_num_seqs) - len(self.running)
        while lines.arrived.head is not None and room > (1 if lines.is_waiting_first else 0):
            if self._enter_arrived() is None:
                return
            room -= 1

    def _enter_next(self, now_ns: int) -> SimSequence | None:
        """The older of the two lines' heads, or the other one when that does not fit."""
        if self.lines.is_waiting_first:
            return self._enter_waiting(now_ns) or self._enter_arrived()
        return self._enter_arrived() or self._enter_waiting(now_ns)

    def _enter_waiting(self, now_ns: int) -> SimSequence | None:
        sequence = self.lines.waiting.head
        if sequence is None:
            return None
        if not try_take(self.pool, sequence, self.kept_to_grow):
            return None
        self.lines.waiting.pop_head()
        sequence.move_to(SeqState.PREFILLING)
        sequence.started_ns = now_ns
        self.running[sequence] = None
        self.prefilling[sequence] = None
        return sequence

    def _enter_arrived(self) -> SimSequence | None:
        line = self.lines.arrived
        sequence = line.head
        if sequence is None:
            return None
        needed = self.pool.blocks_for(sequence.num_tokens) - sequence.num_blocks
        if needed > self.pool.free:
            if self.running:
                return None
            # Nobody will free blocks for it: it gives its own back and computes them again later.
            line.pop_head()
            self._send_back(sequence)
            return None
        self.pool.grow(needed)
        sequence.num_blocks += needed
        line.pop_head()
        self.running[sequence] = None
        self.join(sequence)
        return sequence

    def _leave(self, sequence: SimSequence) -> None:
        """Runs no more; what it owns stays its own."""
        if sequence.state is SeqState.DECODING:
            self.decodes.leave(sequence)
        else:
            del self.prefilling[sequence]
        del self.running[sequence]
        self._num_aborting -= sequence.is_aborting

    def _send_back(self, sequence: SimSequence) -> None:
        """To the head of the line, without blocks."""
        give_back(self.pool, sequence)
        sequence.num_computed = 0
        sequence.move_to(SeqState.WAITING)
        self.lines.waiting.append_first(sequence)
        self.num_preempted += 1

    # --- blocks ----------------------------------------------------------------------------------

    def _grow_decodes(self) -> None:
        """A block for whoever needs one for the next step; the youngest give way."""
        decodes = self.decodes
        decodes.grown_to = max(decodes.grown_to, decodes.steps - 1)
        while decodes.num_seqs and decodes.blocks_until(decodes.steps) > self.pool.free:
            victim = next(reversed(self.running))
            self._leave(victim)
            self._send_back(victim)
        decodes.own(decodes.steps)

    def _publish(self, sequence: SimSequence) -> None:
        if self._spec.has_prefix_cache:
            publish(self.pool, sequence)
