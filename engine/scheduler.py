"""What runs in the next step. Decides; touches no tensors.

One token budget a step, and for prompts as much time as the decodes' TPOT targets leave
(``Pacer``), in this order:

1. running sequences with one token left (decodes), oldest first. The batch never outgrows the
   budget, so every decode gets its token in every step, whatever prompts are waiting;
2. newcomers whose KV a peer has computed: they own blocks, take one token each, and their client
   has the first token already. Behind the chunks they would wait for whole prompts;
3. running sequences with more (chunks of prompts), oldest first, as far as the budget goes;
4. waiting newcomers, first come first served. One that does not fit stops the line behind it, so
   nobody is overtaken for ever; preempted sequences stand at its head. Of places in the batch the
   last free one goes to the older of the two kinds of newcomers.

A sequence gets the blocks of all its tokens when it enters the batch; later only decodes grow. When
no block is left for one, the youngest preemptible sequence gives up its blocks and recomputes
later. The oldest therefore always advances, and a sequence alone fits by construction
(``max_model_len`` is bounded by the pool).

A step may be planned while others are in flight: it counts their tokens as computed and the tokens
they sample as there. Blocks are taken from a sequence only when nothing is in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from isthmus.common.cluster import StepTotals
from isthmus.common.pacing import ChunkBudget
from isthmus.engine.kv_manager import KvCacheManager
from isthmus.engine.pacer import Pacer
from isthmus.engine.sequence import SeqStatus, Sequence
from isthmus.engine.types import SequenceMode


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, decodes first: ``scheduled[i]`` runs ``counts[i]`` tokens from ``starts[i]`` on."""

    step_id: int
    scheduled: tuple[Sequence, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    samples: tuple[bool, ...]  # whether the token after them is sampled
    num_prefill_tokens: int
    num_decode_tokens: int
    num_preempted: int
    is_paced: bool = False  # its prompts were cut short for its decodes


class _MustPreemptError(Exception):
    """A sequence needs a block that only a preemption can give."""


class Scheduler:
    """Owns the queues and the batch. Not thread-safe: the engine core calls it under its lock."""

    def __init__(
        self, kv: KvCacheManager, pacer: Pacer, max_num_batched_tokens: int, max_num_seqs: int
    ) -> None:
        self._kv = kv
        self._pacer = pacer
        self._token_budget = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._running: list[Sequence] = []
        self._with_kv: deque[Sequence] = deque()
        self._waiting: deque[Sequence] = deque()
        self._next_step_id = 0
        self._num_preempted = 0  # since the last plan
        self._can_preempt = True

    @property
    def running(self) -> list[Sequence]:
        """Sequences that own blocks and compute, oldest first; the batch, then those outside."""
        return [*self._running, *self._with_kv]

    @property
    def waiting(self) -> list[Sequence]:
        return list(self._waiting)

    def num_wanted_blocks(self) -> int:
        """Blocks that the waiting sequences will take; newcomers must leave them."""
        return sum(self._kv.blocks_for(sequence.num_tokens) for sequence in self._waiting)

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def add_with_kv(self, sequence: Sequence) -> None:
        """A sequence that owns blocks and whose tokens but the last are computed."""
        self._with_kv.append(sequence)

    def observe(self, totals: StepTotals) -> None:
        """One more step has ended."""
        self._pacer.observe(totals)

    def answered(self, sequence: Sequence) -> None:
        """It has ended, by itself or because nobody wants more of it."""
        if sequence.mode is SequenceMode.FULL and sequence.num_output_tokens:
            self._pacer.answered(sequence.num_output_tokens)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out of whichever queue it is in; its blocks are the caller's."""
        if sequence.status is SeqStatus.RUNNING:
            self._running.remove(sequence)
        elif sequence.table is not None:
            self._with_kv.remove(sequence)
        else:
            self._waiting.remove(sequence)

    def schedule(
        self, coming_ms: Iterable[float] = (), *, can_preempt: bool = True
    ) -> StepPlan | None:
        """The next step, or None when nothing can run until blocks or sequences arrive.

        ``coming_ms``: TPOT targets of those whose KV is on its way; looked at where they matter.
        Without ``can_preempt`` also None when room has to be made first: ask again when no step is
        in flight."""
        self._can_preempt = can_preempt
        try:
            decodes = [*self._schedule_decodes(), *self._enter_arrived()]
            may_enter = bool(self._waiting) and len(self._running) < self._max_num_seqs
            has_prompts = len(decodes) < len(self._running) or may_enter
            budget = self._budget(decodes, coming_ms, has_prompts=has_prompts)
            chunks: list[tuple[Sequence, int]] = []
            for sequence in self._running if len(decodes) < len(self._running) else ():
                left = sequence.num_schedulable_tokens
                if left > 1 and not budget.is_spent:
                    chunks.append((sequence, budget.take(left, sequence.num_planned_tokens)))
            while not budget.is_spent and len(self._running) < self._max_num_seqs:
                entered = self._enter_next()
                if entered is None:
                    break
                left = entered.num_schedulable_tokens
                count = budget.take(left, entered.num_planned_tokens)
                if left == 1:
                    decodes.append(entered)
                else:
                    chunks.append((entered, count))
        except _MustPreemptError:
            return None
        if not decodes and not chunks:
            return None
        self._pacer.planned(budget if chunks else None)
        return self._commit(decodes, chunks, is_paced=budget.is_cut)

    def _budget(
        self, decodes: list[Sequence], coming_ms: Iterable[float], *, has_prompts: bool
    ) -> ChunkBudget:
        num_tokens = self._token_budget - len(decodes)
        if not has_prompts:
            return ChunkBudget(num_tokens)
        nearest_ms = min(coming_ms, default=inf)
        return self._pacer.budget(num_tokens, decodes, nearest_ms, is_idle=self._can_preempt)

    def _commit(
        self, decodes: list[Sequence], chunks: list[tuple[Sequence, int]], *, is_paced: bool
    ) -> StepPlan:
        """From here on the tokens of the step count as in flight."""
        # The last token of a prompt, alone in its chunk, runs like a decode but is none.
        num_last = sum(s.num_expected_tokens == len(s.request.token_ids) for s in decodes)
        scheduled = (*decodes, *(sequence for sequence, _ in chunks))
        counts = (*(1 for _ in decodes), *(count for _, count in chunks))
        starts, samples = zip(*map(Sequence.take_off, scheduled, counts), strict=True)
        plan = StepPlan(
            step_id=self._next_step_id,
            scheduled=scheduled,
            starts=starts,
            counts=counts,
            samples=samples,
            num_prefill_tokens=sum(count for _, count in chunks) + num_last,
            num_decode_tokens=len(decodes) - num_last,
            num_preempted=self._num_preempted,
            is_paced=is_paced,
        )
        self._next_step_id += 1
        self._num_preempted = 0
        return plan

    def _schedule_decodes(self) -> list[Sequence]:
        decodes: list[Sequence] = []
        for sequence in [s for s in self._running if s.num_schedulable_tokens == 1]:
            was_preempted = sequence.status is SeqStatus.PREEMPTED  # for an older one, just now
            if not was_preempted and self._make_room(sequence):
                decodes.append(sequence)
        return decodes

    def _make_room(self, sequence: Sequence) -> bool:
        """Finds a block for the next token if one is needed; False = it was preempted itself.

        Raises _MustPreemptError when there is none and nobody may be preempted now."""
        assert sequence.table is not None
        num_tokens = sequence.num_expected_tokens
        if num_tokens <= len(sequence.table.block_ids) * self._kv.block_size:
            return True
        while not self._kv.try_grow(sequence.table, num_tokens):
            if not self._can_preempt:
                raise _MustPreemptError
            victim = next(s for s in reversed(self.running) if s.can_be_preempted)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        """The victim is the sequence that needs room or younger: not yet in this step's plan."""
        assert victim.table is not None
        self.remove(victim)
        self._kv.free(victim.table)
        victim.restart()
        victim.move_to(SeqStatus.PREEMPTED)
        self._waiting.appendleft(victim)
        self._num_preempted += 1

    def _enter_arrived(self) -> list[Sequence]:
        """Those with KV that may go before the chunks of prompts. While there is a token for each
        who runs, chunks advance, too."""
        entered: list[Sequence] = []
        room = min(self._token_budget, self._max_num_seqs) - len(self._running)
        while self._with_kv and room > (1 if self._is_waiting_first() else 0):
            sequence = self._enter_with_kv()
            if sequence is None:
                break
            entered.append(sequence)
            room -= 1
        return entered

    def _is_waiting_first(self) -> bool:
        """Whether the waiting queue's head is the older one."""
        return bool(self._waiting) and (
            not self._with_kv or self._waiting[0].added_ns <= self._with_kv[0].added_ns
        )

    def _enter_next(self) -> Sequence | None:
        """The older of the two queues' heads, or the other one when that does not fit."""
        if self._is_waiting_first():
            return self._enter_waiting() or self._enter_with_kv()
        return self._enter_with_kv() or self._enter_waiting()

    def _enter_with_kv(self) -> Sequence | None:
        if not self._with_kv:
            return None
        sequence = self._with_kv[0]
        assert sequence.table is not None
        has_room = self._kv.try_grow(sequence.table, sequence.num_tokens)
        if not has_room and not self._running:  # nobody else will free blocks for it
            has_room = self._make_room(sequence)
        if not has_room:
            return None
        return self._enter(self._with_kv.popleft())

    def _enter_waiting(self) -> Sequence | None:
        if not self._waiting:
            return None
        sequence = self._waiting[0]
        hashes = [] if sequence.wants_prompt_logprobs else sequence.block_hashes
        table = self._kv.try_allocate(sequence.num_tokens, hashes)
        if table is None:
            return None
        sequence.table = table
        sequence.num_computed_tokens = table.num_cached_blocks * self._kv.block_size
        if sequence.status is SeqStatus.WAITING:  # a preempted one finds its own blocks again
            sequence.num_cached_tokens = sequence.num_computed_tokens
        return self._enter(self._waiting.popleft())

    def _enter(self, sequence: Sequence) -> Sequence:
        sequence.move_to(SeqStatus.RUNNING)
        self._running.append(sequence)
        return sequence
