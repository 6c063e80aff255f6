"""A simulated instance: the engine's scheduler on counts instead of tensors.

It follows ``isthmus.engine.scheduler``: one token budget a step, decodes first, then newcomers with
KV, chunks of prompts, waiting newcomers; blocks for all tokens on entry, growth later, and the
youngest is preempted when none is left. What it does not follow token by token is a batch that only
decodes: such steps are crossed in one leap (``step_timer``), which ends early, with a step, when
somebody comes or goes. So the number of events grows with requests and chunks, not with tokens.

Owns its sequences, each in one of its lines or running, and the pool of their blocks; who decodes
is counted by ``decode_batch``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

from isthmus.common.clock import NS_PER_MS
from isthmus.common.cluster import LoadReport
from isthmus.common.pacing import LONGEST_GAP, ChunkBudget, longest_step_ms
from isthmus.sim.decode_batch import DecodeBatch
from isthmus.sim.events import EventQueue
from isthmus.sim.kv_pool import KvPool
from isthmus.sim.line import Line
from isthmus.sim.listener import Listener
from isthmus.sim.prefix_fetch import FetchLine
from isthmus.sim.sequence import SeqState, SimSequence
from isthmus.sim.sequence_blocks import give_back, publish, try_take
from isthmus.sim.spec import InstanceSpec
from isthmus.sim.step_counts import StepCounts
from isthmus.sim.step_model import Leap
from isthmus.sim.step_timer import StepTimer

STEP_SMOOTHING = 0.1


class Instance:
    """One instance at one epoch; dies with ``kill``. ``noise()`` scales every plan's duration."""

    def __init__(
        self,
        spec: InstanceSpec,
        queue: EventQueue,
        listener: Listener,
        noise: Callable[[], float] | None = None,
    ) -> None:
        self.spec = spec
        self.epoch = 1
        self.slowness = 1.0  # measured / modelled, for a while
        self.pool = KvPool(spec.num_blocks, spec.block_size)
        self.num_steps = 0
        self.num_preempted = 0
        self._queue = queue
        self._listener = listener
        self._noise = noise
        self._instance_id = spec.instance_id
        self._model = spec.model
        self._reserving = Line(spec.block_size)
        self._waiting = Line(spec.block_size)
        self._arrived = Line(spec.block_size)
        self._fetching = FetchLine(self.pool, spec.fetch_min_tokens)
        self._kept: dict[SimSequence, None] = {}  # RESERVED and HELD
        self._held_blocks = 0  # of the latter
        self._running: dict[SimSequence, None] = {}  # oldest first
        self._prefilling: dict[SimSequence, None] = {}  # of the running
        self._num_aborting = 0  # of the running
        self._decodes = DecodeBatch(self.pool)
        self._timer = StepTimer(queue, self._step_ended)
        self._is_settling = False  # a step has just ended and the next one is not planned yet
        self._chunks: list[tuple[SimSequence, int]] = []
        self._joined: list[SimSequence] = []
        self._step_ms = 0.0
        self._report_no = 0
        self._counts = StepCounts()

    # --- what others ask of it -----------------------------------------------------------------

    @property
    def busy_ns(self) -> int:
        return self._timer.busy_ns

    @property
    def num_sequences(self) -> int:
        lines = self._waiting.num_seqs + self._reserving.num_seqs + self._arrived.num_seqs
        return lines + len(self._fetching) + len(self._kept) + len(self._running)

    @property
    def num_prompts(self) -> int:
        in_line = self._waiting.num_prompts + self._fetching.num_prompts
        return in_line + sum([s.is_prompt for s in self._prefilling])

    def submit(self, sequence: SimSequence) -> None:
        """A prompt to compute here: for itself or, with ``is_for_peer``, for another instance."""
        self._listener.before_change(self)
        sequence.move_to(SeqState.WAITING)
        sequence.added_ns = self._queue.now_ns
        self._waiting.append(sequence)
        self._came()

    def fetch_prefix(self, sequence: SimSequence, num_held: int) -> int:
        """Tokens that a peer, which has the first ``num_held``, shall send before ``sequence`` is
        submitted (``prefix_ended``); 0 = none, submit it now."""
        self._listener.before_change(self)
        self._catch_up()
        missing = self._fetching.try_enter(sequence, num_held, self._waiting.num_blocks)
        if missing:
            sequence.move_to(SeqState.FETCHING)
            self._tell_cache()
            self._listener.load_changed(self)
        return missing

    def prefix_ended(self, sequence: SimSequence, *, has_arrived: bool) -> None:
        """What it waited for is there, or will not come."""
        self._listener.before_change(self)
        if has_arrived:
            self._fetching.arrived(sequence)
            self._tell_cache()
        else:
            self._fetching.leave(sequence)
        self.submit(sequence)

    def reserve(self, sequence: SimSequence) -> None:
        """Blocks for a prompt that another computes; ``reserved`` is called, now or later."""
        self._listener.before_change(self)
        sequence.move_to(SeqState.RESERVING)
        sequence.added_ns = self._queue.now_ns
        self._reserving.append(sequence)
        self._catch_up()
        self._grant()
        self._listener.load_changed(self)

    def arrived(self, sequence: SimSequence, first_ns: int) -> None:
        """The KV of a reserved sequence is there, and its first token since ``first_ns``."""
        self._listener.before_change(self)
        self._let_out(sequence)
        sequence.move_to(SeqState.ARRIVED)
        sequence.take_first_token(first_ns)
        sequence.num_computed = sequence.num_tokens - 1
        self._publish(sequence)
        self._arrived.append(sequence)
        self._tell_cache()
        self._came()

    def let_go(self, sequence: SimSequence) -> None:
        """A held sequence's KV has been sent."""
        self._listener.before_change(self)
        self._let_out(sequence)
        give_back(self.pool, sequence)
        sequence.move_to(SeqState.ENDED)
        self._freed()

    def abort(self, sequence: SimSequence) -> None:
        """Ends a sequence; one that runs does at the end of the step. Nobody is told."""
        state = sequence.state
        if state is SeqState.ENDED or sequence.is_aborting:
            return
        self._listener.before_change(self)
        if sequence in self._running:
            sequence.is_aborting = True
            self._num_aborting += 1
            self._timer.cut_short()
            return
        if state in (SeqState.RESERVED, SeqState.HELD):
            self._let_out(sequence)
        elif state is SeqState.ARRIVED:
            self._arrived.remove(sequence)
        elif state is SeqState.FETCHING:
            self._fetching.leave(sequence)
        elif state is SeqState.WAITING:
            self._waiting.remove(sequence)
        elif state is SeqState.RESERVING:
            self._reserving.remove(sequence)
        give_back(self.pool, sequence)
        sequence.move_to(SeqState.ENDED)
        self._freed()

    def kill(self) -> list[SimSequence]:
        """The process dies. Returns whom it takes along, with the tokens they have got."""
        self._catch_up()
        lost = [*self._running, *self._arrived, *self._kept, *self._waiting, *self._reserving]
        lost += self._fetching
        decodes = self._decodes
        in_leap = self._timer.is_running and not self._chunks
        done = max(decodes.grown_to, 0) if in_leap else decodes.steps
        for sequence in lost:
            if sequence.state is SeqState.DECODING:
                sequence.num_generated = sequence.base + done - sequence.num_prompt
            sequence.move_to(SeqState.ENDED)
        self._timer.stop()
        for part in (self._running, self._prefilling, self._kept):
            part.clear()
        for line in (self._arrived, self._waiting, self._reserving):
            line.clear()
        self._fetching.clear()
        self._held_blocks = 0
        decodes.clear()
        self.pool.clear()
        return lost

    def report(self, at_ns: int) -> LoadReport:
        """What it would tell a router, at a time since which it has not changed."""
        self._catch_up(at_ns)
        self._report_no += 1
        waiting, pool, decodes = self._waiting, self.pool, self._decodes
        reserving, arrived, fetching = self._reserving, self._arrived, self._fetching
        waiting_tokens = waiting.num_tokens + reserving.num_tokens + fetching.num_tokens
        computed = arrived.num_tokens - arrived.num_seqs
        num_prompts = waiting.num_prompts + fetching.num_prompts
        for sequence in self._prefilling:
            done = sequence.num_computed
            waiting_tokens += sequence.num_prompt + sequence.num_generated - done
            computed += done
            num_prompts += sequence.is_prompt
        head = waiting.head
        oldest_ns = head.added_ns if head is not None else at_ns
        progress = 0
        if decodes.grown_to > decodes.steps:
            progress = (decodes.grown_to - decodes.steps) * decodes.num_seqs
        return LoadReport(
            instance_id=self._instance_id,
            epoch=self.epoch,
            seq=self._report_no,
            at_ns=at_ns,
            waiting_seqs=waiting.num_seqs + reserving.num_seqs + len(fetching),
            waiting_tokens=waiting_tokens,
            oldest_wait_ms=(at_ns - oldest_ns) / NS_PER_MS,
            running_seqs=len(self._running) + arrived.num_seqs,
            running_context_tokens=decodes.context + progress + computed,
            num_blocks=pool.num_blocks,
            free_blocks=pool.num_blocks - pool.used,
            held_blocks=self._held_blocks,
            cached_blocks=pool.num_cached,
            step_ms=self._step_ms,
            steps=self.num_steps,
            totals=self._counts.known or self._counts.totals(),
            prompt_seqs=num_prompts,
        )

    def check_integrity(self) -> None:
        """AssertionError when counts disagree with the sequences. Between steps or in a leap."""
        self._catch_up()
        self.pool.check_integrity()
        for line in (self._waiting, self._reserving, self._arrived, self._fetching):
            line.check_integrity()
        assert self._held_blocks == sum(s.num_blocks for s in self._kept if s.is_for_peer)
        running = self._running
        self._decodes.check_integrity(s for s in running if s.state is SeqState.DECODING)
        assert self._num_aborting == sum(s.is_aborting for s in running)
        owned: set[bytes] = set()
        private = 0
        for sequence in [*running, *self._arrived, *self._kept, *self._fetching]:
            owned.update(sequence.refs)
            is_decoding = sequence.state is SeqState.DECODING
            num = self._decodes.blocks_of(sequence) if is_decoding else sequence.num_blocks
            private += num - len(sequence.refs)
        assert private + len(owned) == self.pool.used, "blocks without an owner"

    # --- steps ---------------------------------------------------------------------------------

    def _came(self) -> None:
        """A newcomer: a step begins, or the leap ends early if there may be room for it."""
        if not self._timer.is_running:
            self._plan()
        elif len(self._running) < self.spec.max_num_seqs:
            self._timer.cut_short()
        self._listener.load_changed(self)

    def _plan(self) -> None:
        """Decides and starts the next step, or the next leap; does nothing when nobody can run."""
        if self._is_settling:
            return
        self._grow_decodes()
        self._enter_all_arrived()
        budget = self._budget()
        chunks: list[tuple[SimSequence, int]] = []
        for sequence in self._prefilling:
            if budget.is_spent:
                break
            chunks.append((sequence, budget.take(sequence.num_left, sequence.num_computed)))
        while not budget.is_spent and len(self._running) < self.spec.max_num_seqs:
            entered = self._enter_next()
            if entered is None:
                break
            if entered.state is SeqState.PREFILLING:
                chunks.append((entered, budget.take(entered.num_left, entered.num_computed)))
            else:
                budget.take(1, entered.num_tokens)
        self._chunks = chunks
        if chunks:
            self._start_step(chunks)
        elif self._decodes.num_seqs:
            self._start_leap()

    def _budget(self) -> ChunkBudget:
        """As the engine's ``Pacer`` says."""
        model, decodes = self._model, self._decodes
        num_tokens = self.spec.max_num_batched_tokens - decodes.num_seqs
        if not self._prefilling and self._waiting.head is None:
            return ChunkBudget(num_tokens)
        step_ms = model.mixed_ms(0.0, decodes.num_seqs, decodes.context)
        limit_ms = min(self._paces(step_ms), default=inf)
        left_ms = max(0.0, limit_ms - step_ms)
        return ChunkBudget(num_tokens, left_ms, model.prefill_token, model.prefill_pair)

    def _paces(self, step_ms: float) -> Iterator[float]:
        """How long the next step may take, for those who decode and those whose KV is coming."""
        now_ns, steps = self._queue.now_ns, self._decodes.steps
        for sequence in self._running if self._decodes.num_seqs else ():
            target_ms = sequence.tpot_ms
            if target_ms is not None and sequence.state is SeqState.DECODING:
                num_generated = sequence.base + steps - sequence.num_prompt
                yield longest_step_ms(
                    target_ms,
                    num_generated + 1 - sequence.num_first,
                    (now_ns - sequence.first_ns) / NS_PER_MS,
                    sequence.most_output - num_generated,
                    step_ms,
                )
        for sequence in self._kept:
            if sequence.tpot_ms is not None and sequence.state is SeqState.RESERVED:
                yield max(LONGEST_GAP * sequence.tpot_ms, 2 * step_ms)

    def _start_step(self, chunks: list[tuple[SimSequence, int]]) -> None:
        model, decodes = self._model, self._decodes
        chunk_ms = sum([model.chunk_ms(count, s.num_computed) for s, count in chunks])
        step_ms = model.mixed_ms(chunk_ms, decodes.num_seqs, decodes.context)
        total_ms = step_ms * self._scale()
        self._tell_joined(total_ms)
        self._smooth(step_ms)
        self._timer.start(total_ms)

    def _start_leap(self) -> None:
        decodes = self._decodes
        steps = decodes.longest_leap(decodes.steps_to_next_end())
        leap = Leap.of(self._model, decodes.num_seqs, decodes.context, self._scale())
        self._tell_joined(leap.first_ms)
        self._smooth(leap.first_ms)
        self._timer.start(leap.after_ms(steps), steps, leap)

    def _tell_joined(self, first_ms: float) -> None:
        """Those who are new in the batch have their second token when its next step ends."""
        if self._joined:
            second_ns = self._queue.now_ns + max(1, round(first_ms * NS_PER_MS))
            for sequence in self._joined:
                if sequence.state is SeqState.DECODING:
                    self._listener.second_token(sequence, second_ns)
            self._joined.clear()

    def _smooth(self, step_ms: float) -> None:
        self._step_ms += STEP_SMOOTHING * (step_ms - self._step_ms)

    def _scale(self) -> float:
        return self.slowness * self._noise() if self._noise is not None else self.slowness

    def _step_ended(self) -> None:
        self._listener.before_change(self)
        timer, decodes = self._timer, self._decodes
        timer.stop()
        self._is_settling = True
        counts, num_seqs, context = self._counts, decodes.num_seqs, decodes.context
        if self._chunks:
            counts.prefilled(self._chunks, num_seqs, context, timer.took_ms)
        else:
            counts.decoded(timer.num_steps, num_seqs, context, timer.took_ms)
        self.num_steps += timer.num_steps
        if decodes.num_seqs:
            decodes.advance(timer.num_steps)
            while (ended := decodes.take_ended()) is not None:
                self._finish(ended)
        for sequence, count in self._chunks:
            self._computed(sequence, count)
        self._chunks = []
        if self._num_aborting:
            self._drop_aborting()
        self._tell_cache()
        self._grant()
        self._is_settling = False
        self._plan()
        self._listener.load_changed(self)

    def _computed(self, sequence: SimSequence, count: int) -> None:
        """A chunk is done; after the last one a token is sampled."""
        sequence.num_computed += count
        self._publish(sequence)
        if sequence.num_left or sequence.is_aborting:
            return
        del self._prefilling[sequence]
        sequence.take_first_token(self._queue.now_ns)
        if sequence.is_for_peer:
            del self._running[sequence]
            sequence.move_to(SeqState.HELD)
            self._kept[sequence] = None
            self._held_blocks += sequence.num_blocks
            self._listener.sampled(sequence)
            return
        self._listener.sampled(sequence)
        self._join(sequence)
        if sequence.num_generated >= sequence.num_output:
            self._finish(sequence)

    # --- entering and leaving ------------------------------------------------------------------

    def _enter_all_arrived(self) -> None:
        """Before chunks of prompts; the last place goes to the older of the two lines' heads."""
        room = min(self.spec.max_num_batched_tokens, self.spec.max_num_seqs) - len(self._running)
        while self._arrived.head is not None and room > (1 if self._is_waiting_first() else 0):
            if self._enter_arrived() is None:
                return
            room -= 1

    def _is_waiting_first(self) -> bool:
        waiting, arrived = self._waiting.head, self._arrived.head
        if waiting is None:
            return False
        return arrived is None or waiting.added_ns <= arrived.added_ns

    def _enter_next(self) -> SimSequence | None:
        """The older of the two lines' heads, or the other one when that does not fit."""
        if self._is_waiting_first():
            return self._enter_waiting() or self._enter_arrived()
        return self._enter_arrived() or self._enter_waiting()

    def _enter_waiting(self) -> SimSequence | None:
        sequence = self._waiting.head
        if sequence is None:
            return None
        keep_free = self.spec.watermark_blocks if self._running else 0
        if not try_take(self.pool, sequence, keep_free):
            return None
        self._waiting.pop_head()
        sequence.move_to(SeqState.PREFILLING)
        sequence.started_ns = self._queue.now_ns
        self._running[sequence] = None
        self._prefilling[sequence] = None
        return sequence

    def _enter_arrived(self) -> SimSequence | None:
        sequence = self._arrived.head
        if sequence is None:
            return None
        needed = self.pool.blocks_for(sequence.num_tokens) - sequence.num_blocks
        if needed > self.pool.free:
            if self._running:
                return None
            # Nobody will free blocks for it: it gives its own back and computes them again later.
            self._arrived.pop_head()
            self._send_back(sequence)
            return None
        self.pool.grow(needed)
        sequence.num_blocks += needed
        self._arrived.pop_head()
        self._running[sequence] = None
        self._join(sequence)
        return sequence

    def _join(self, sequence: SimSequence) -> None:
        self._decodes.join(sequence)
        if sequence.num_generated == 1:
            self._joined.append(sequence)

    def _leave(self, sequence: SimSequence) -> None:
        """Runs no more; what it owns stays its own."""
        if sequence.state is SeqState.DECODING:
            self._decodes.leave(sequence)
        else:
            del self._prefilling[sequence]
        del self._running[sequence]
        self._num_aborting -= sequence.is_aborting

    def _finish(self, sequence: SimSequence) -> None:
        sequence.num_generated = sequence.num_output
        is_wanted = not sequence.is_aborting
        self._end(sequence)
        if is_wanted:
            self._listener.finished(sequence)

    def _end(self, sequence: SimSequence) -> None:
        """One that runs."""
        self._leave(sequence)
        give_back(self.pool, sequence)
        sequence.move_to(SeqState.ENDED)

    def _drop_aborting(self) -> None:
        for sequence in [s for s in self._running if s.is_aborting]:
            self._end(sequence)

    def _let_out(self, sequence: SimSequence) -> None:
        """One that was kept for another instance, or for KV from one."""
        del self._kept[sequence]
        if sequence.is_for_peer:
            self._held_blocks -= sequence.num_blocks

    def _preempt_youngest(self) -> None:
        victim = next(reversed(self._running))
        self._leave(victim)
        self._send_back(victim)

    def _send_back(self, sequence: SimSequence) -> None:
        """To the head of the line, without blocks."""
        give_back(self.pool, sequence)
        sequence.num_computed = 0
        sequence.move_to(SeqState.WAITING)
        self._waiting.append_first(sequence)
        self.num_preempted += 1

    # --- blocks --------------------------------------------------------------------------------

    def _freed(self) -> None:
        """Blocks came free between steps."""
        self._catch_up()
        self._grant()
        if not self._timer.is_running:
            self._plan()
        self._listener.load_changed(self)

    def _grant(self) -> None:
        """Reservations in line, as far as there are blocks that the waiting do not want."""
        if not self._reserving.num_seqs:
            return
        keep_free = self._waiting.num_blocks + self.spec.watermark_blocks
        while (sequence := self._reserving.head) is not None:
            if not try_take(self.pool, sequence, keep_free):
                break
            self._reserving.pop_head()
            sequence.move_to(SeqState.RESERVED)
            self._kept[sequence] = None
            self._listener.reserved(sequence)
        if self._timer.is_leaping:
            last = self._decodes.steps + self._timer.num_steps - 1
            if self._decodes.blocks_until(last) > self.pool.free:
                self._timer.cut_short()

    def _publish(self, sequence: SimSequence) -> None:
        if self.spec.has_prefix_cache:
            publish(self.pool, sequence)

    def _tell_cache(self) -> None:
        events = self.pool.take_events()
        if events:
            self._listener.cache_changed(self, events)

    def _grow_decodes(self) -> None:
        """A block for whoever needs one for the next step; the youngest give way."""
        decodes = self._decodes
        decodes.grown_to = max(decodes.grown_to, decodes.steps - 1)
        while decodes.num_seqs and decodes.blocks_until(decodes.steps) > self.pool.free:
            self._preempt_youngest()
        decodes.own(decodes.steps)

    def _catch_up(self, at_ns: int | None = None) -> None:
        """Takes the blocks that the steps of a leap have needed by then, or by now."""
        timer = self._timer
        if timer.leap is not None and timer.is_running:
            begun = timer.begun(self._queue.now_ns if at_ns is None else at_ns)
            self._decodes.own(self._decodes.steps + begun - 1)
