"""A simulated instance: the engine's scheduler on counts instead of tensors.

It follows ``isthmus.engine.scheduler``: one token budget a step, decodes first, then newcomers with
KV, chunks of prompts, waiting newcomers; blocks for all tokens on entry, growth later, and the
youngest is preempted when none is left. What it does not follow token by token is a batch that only
decodes: such steps are crossed in one leap (``step_model.Leap``), which ends early, with a step,
when somebody comes or goes. So the number of events grows with requests and chunks, not with
tokens.

::

    steps      _steps              _steps + _leap_steps
                 ├──┬──┬──┬──┬──┬──┤
    now          └ done ┘^ in progress: found when someone asks (``_catch_up``)

Invariant between steps: every decoding sequence owns the blocks of the tokens that it had when
decode step ``_grown_to`` began. ``_bins[s % block_size]`` counts those that need one more for
step s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush
from typing import Protocol

from isthmus.common.clock import NS_PER_MS
from isthmus.common.cluster import NO_STEPS, LoadReport
from isthmus.common.kv_events import KvEvent
from isthmus.sim.events import EventQueue
from isthmus.sim.kv_pool import KvPool
from isthmus.sim.sequence import SeqState, SimSequence
from isthmus.sim.spec import InstanceSpec
from isthmus.sim.step_model import Leap

STEP_SMOOTHING = 0.1


class AnyInstance(Protocol):
    """What a listener may ask of an instance, however it makes its batches."""

    spec: InstanceSpec
    epoch: int

    @property
    def num_sequences(self) -> int: ...

    def report(self) -> LoadReport: ...


class Listener(Protocol):
    """Whoever follows sequences through instances. Called at the end of a step."""

    def sampled(self, sequence: SimSequence) -> None:
        """The first token that this instance computes for it."""

    def second_token(self, sequence: SimSequence, at_ns: int) -> None:
        """When the token after the first one will be there (a little ahead of time)."""

    def reserved(self, sequence: SimSequence) -> None: ...

    def finished(self, sequence: SimSequence) -> None: ...

    def cache_changed(self, instance: AnyInstance, events: list[KvEvent]) -> None: ...

    def load_changed(self, instance: AnyInstance) -> None: ...


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
        self.busy_ns = 0
        self.num_steps = 0
        self.num_preempted = 0
        self.is_alive = True
        self._queue = queue
        self._listener = listener
        self._noise = noise
        self._model = spec.model
        self._reserving: deque[SimSequence] = deque()
        self._waiting: deque[SimSequence] = deque()
        self._arrived: deque[SimSequence] = deque()
        self._kept: dict[SimSequence, None] = {}  # RESERVED and HELD
        self._running: dict[SimSequence, None] = {}  # oldest first
        self._prefilling: dict[SimSequence, None] = {}  # of the running
        self._num_decodes = 0
        self._context = 0  # Σ tokens of the decodes when step ``_steps`` begins
        self._steps = 0  # decode steps done
        self._grown_to = -1
        self._bins = [0] * spec.block_size
        self._ends: list[tuple[int, int, SimSequence]] = []
        self._order = 0
        self._plan_no = 0
        self._is_stepping = False
        self._is_settling = False  # a step has just ended and the next one is not planned yet
        self._started_ns = 0
        self._ends_ns = 0
        self._factor = 1.0
        self._chunks: list[tuple[SimSequence, int]] = []
        self._leap: Leap | None = None
        self._leap_steps = 0
        self._joined: list[SimSequence] = []
        self._step_ms = 0.0
        self._report_no = 0
        self._totals = NO_STEPS

    # --- what others ask of it -----------------------------------------------------------------

    def submit(self, sequence: SimSequence) -> None:
        """A prompt to compute here: for itself or, with ``is_for_peer``, for another instance."""
        sequence.move_to(SeqState.WAITING)
        sequence.added_ns = self._queue.now_ns
        self._waiting.append(sequence)
        self._came()

    def reserve(self, sequence: SimSequence) -> None:
        """Blocks for a prompt that another computes; ``reserved`` is called, now or later."""
        sequence.move_to(SeqState.RESERVING)
        sequence.added_ns = self._queue.now_ns
        self._reserving.append(sequence)
        self._catch_up()
        self._grant()
        self._listener.load_changed(self)

    def arrived(self, sequence: SimSequence) -> None:
        """The KV of a reserved sequence is there, and its first token."""
        del self._kept[sequence]
        sequence.move_to(SeqState.ARRIVED)
        sequence.num_generated += 1
        sequence.num_computed = sequence.num_tokens - 1
        self._publish(sequence)
        self._arrived.append(sequence)
        self._tell_cache()
        self._came()

    def let_go(self, sequence: SimSequence) -> None:
        """A held sequence's KV has been sent."""
        del self._kept[sequence]
        self._free(sequence)
        sequence.move_to(SeqState.ENDED)
        self._freed()

    def abort(self, sequence: SimSequence) -> None:
        """Ends a sequence; one that runs does at the end of the step. Nobody is told."""
        state = sequence.state
        if state is SeqState.ENDED:
            return
        if sequence in self._running:
            sequence.is_aborting = True
            self._cut_short()
            return
        if state in (SeqState.RESERVED, SeqState.HELD):
            del self._kept[sequence]
        elif state is SeqState.ARRIVED:
            self._arrived.remove(sequence)
        elif state is SeqState.WAITING:
            self._waiting.remove(sequence)
        elif state is SeqState.RESERVING:
            self._reserving.remove(sequence)
        self._free(sequence)
        sequence.move_to(SeqState.ENDED)
        self._freed()

    def kill(self) -> list[SimSequence]:
        """The process dies. Returns whom it takes along, with the tokens they have got."""
        self._catch_up()
        lost = [*self._running, *self._arrived, *self._kept, *self._waiting, *self._reserving]
        done = max(self._grown_to, 0) if self._is_stepping and not self._chunks else self._steps
        for sequence in lost:
            if sequence.state is SeqState.DECODING:
                sequence.num_generated = sequence.base + done - sequence.num_prompt
            sequence.move_to(SeqState.ENDED)
        self._plan_no += 1
        self._is_stepping = False
        if self._ends_ns > self._queue.now_ns:
            self.busy_ns -= self._ends_ns - self._queue.now_ns
        for part in (self._running, self._prefilling, self._kept):
            part.clear()
        for line in (self._arrived, self._waiting, self._reserving):
            line.clear()
        self._num_decodes = 0
        self.pool.clear()
        self.is_alive = False
        return lost

    def report(self) -> LoadReport:
        """What it would tell a router now."""
        self._catch_up()
        self._report_no += 1
        now_ns = self._queue.now_ns
        waiting = self._waiting
        waiting_tokens = sum([sequence.num_left for sequence in waiting])
        waiting_tokens += sum([sequence.num_left for sequence in self._prefilling])
        waiting_tokens += sum([sequence.num_tokens for sequence in self._reserving])
        oldest_ns = min(waiting[0].added_ns, now_ns) if waiting else now_ns
        computed = sum([sequence.num_computed for sequence in self._prefilling])
        computed += sum([sequence.num_computed for sequence in self._arrived])
        progress = max(0, self._grown_to - self._steps) * self._num_decodes
        return LoadReport(
            instance_id=self.spec.instance_id,
            epoch=self.epoch,
            seq=self._report_no,
            at_ns=now_ns,
            waiting_seqs=len(waiting) + len(self._reserving),
            waiting_tokens=waiting_tokens,
            oldest_wait_ms=(now_ns - oldest_ns) / NS_PER_MS,
            running_seqs=len(self._running) + len(self._arrived),
            running_context_tokens=self._context + progress + computed,
            num_blocks=self.pool.num_blocks,
            free_blocks=self.pool.free,
            held_blocks=sum([s.num_blocks for s in self._kept if s.is_for_peer]),
            cached_blocks=self.pool.num_cached,
            step_ms=self._step_ms,
            steps=self.num_steps,
            totals=self._totals,
            prompt_seqs=len(waiting) + len(self._prefilling),
        )

    @property
    def num_sequences(self) -> int:
        lines = len(self._waiting) + len(self._reserving) + len(self._arrived)
        return lines + len(self._kept) + len(self._running)

    def check_integrity(self) -> None:
        """AssertionError when counts disagree with the sequences. Between steps or in a leap."""
        self._catch_up()
        self.pool.check_integrity()
        decodes = [s for s in self._running if s.state is SeqState.DECODING]
        assert len(decodes) == self._num_decodes
        assert sum(s.base + self._steps for s in decodes) == self._context
        assert sum(self._bins) == len(decodes)
        owned: set[bytes] = set()
        private = 0
        for sequence in [*self._running, *self._arrived, *self._kept]:
            owned.update(sequence.refs)
            private += self._blocks_of(sequence) - len(sequence.refs)
        assert private + len(owned) == self.pool.used, "blocks without an owner"

    # --- steps ---------------------------------------------------------------------------------

    def _came(self) -> None:
        """A newcomer: a step begins, or the leap ends early if there may be room for it."""
        if not self._is_stepping:
            self._plan()
        elif len(self._running) < self.spec.max_num_seqs:
            self._cut_short()
        self._listener.load_changed(self)

    def _plan(self) -> None:
        """Decides and starts the next step, or the next leap; does nothing when nobody can run."""
        if self._is_settling:
            return
        self._grow_decodes()
        self._enter_all_arrived()
        budget = self.spec.max_num_batched_tokens - self._num_decodes
        chunks: list[tuple[SimSequence, int]] = []
        for sequence in self._prefilling:
            if budget <= 0:
                break
            count = min(sequence.num_left, budget)
            chunks.append((sequence, count))
            budget -= count
        while budget > 0 and len(self._running) < self.spec.max_num_seqs:
            entered = self._enter_next()
            if entered is None:
                break
            count = 1
            if entered.state is SeqState.PREFILLING:
                count = min(entered.num_left, budget)
                chunks.append((entered, count))
            budget -= count
        self._chunks = chunks
        if chunks:
            self._start_step(chunks)
        elif self._num_decodes:
            self._start_leap()

    def _start_step(self, chunks: list[tuple[SimSequence, int]]) -> None:
        model = self._model
        chunk_ms = sum([model.chunk_ms(count, s.num_computed) for s, count in chunks])
        step_ms = model.mixed_ms(chunk_ms, self._num_decodes, self._context)
        self._leap, self._leap_steps = None, 1
        self._start(step_ms * self._scale(), step_ms)

    def _start_leap(self) -> None:
        steps = self._next_end() - self._steps
        free = self.pool.free
        if self._num_decodes * (steps // self.spec.block_size + 1) > free:
            steps = self._longest_leap(steps, free)
        self._leap = Leap.of(self._model, self._num_decodes, self._context, self._scale())
        self._leap_steps = steps
        self._start(self._leap.after_ms(steps), self._leap.first_ms)

    def _start(self, total_ms: float, first_ms: float) -> None:
        now_ns = self._queue.now_ns
        self._is_stepping = True
        self._started_ns = now_ns
        first_ns = now_ns + max(1, round(first_ms * NS_PER_MS))
        if self._leap is None:
            first_ns = now_ns + max(1, round(total_ms * NS_PER_MS))
        for sequence in self._joined:
            if sequence.state is SeqState.DECODING:
                self._listener.second_token(sequence, first_ns)
        self._joined.clear()
        self._step_ms += STEP_SMOOTHING * (first_ms - self._step_ms)
        self._ends_at(now_ns + max(1, round(total_ms * NS_PER_MS)))
        self.busy_ns += self._ends_ns - now_ns

    def _ends_at(self, ends_ns: int) -> None:
        self._plan_no += 1
        self._ends_ns = ends_ns
        self._queue.at(ends_ns, self._step_ended, self._plan_no)

    def _scale(self) -> float:
        return self.slowness * self._noise() if self._noise is not None else self.slowness

    def _step_ended(self, plan_no: int) -> None:
        if plan_no != self._plan_no:
            return
        self._is_stepping, self._is_settling = False, True
        self._count_steps()
        if self._num_decodes:
            self._decoded(self._leap_steps)
        else:
            self.num_steps += 1
        for sequence, count in self._chunks:
            self._computed(sequence, count)
        self._chunks = []
        self._drop_aborting()
        self._tell_cache()
        self._grant()
        self._is_settling = False
        self._plan()
        self._listener.load_changed(self)

    def _count_steps(self) -> None:
        """What was measured, for whoever fits a model to it."""
        old, took_ms = self._totals, (self._ends_ns - self._started_ns) / NS_PER_MS
        seqs, steps = self._num_decodes, self._leap_steps
        if not self._chunks:
            growth = seqs * steps * (steps - 1) // 2
            self._totals = replace(
                old,
                decode_steps=old.decode_steps + steps,
                decode_seqs=old.decode_seqs + steps * seqs,
                decode_context=old.decode_context + steps * self._context + growth,
                decode_ms=old.decode_ms + took_ms,
            )
            return
        pairs = sum([count * (s.num_computed + count / 2) for s, count in self._chunks])
        self._totals = replace(
            old,
            prefill_steps=old.prefill_steps + 1,
            prefill_tokens=old.prefill_tokens + sum([count for _, count in self._chunks]),
            prefill_pairs=old.prefill_pairs + pairs,
            beside_seqs=old.beside_seqs + seqs,
            beside_context=old.beside_context + self._context,
            prefill_ms=old.prefill_ms + took_ms,
        )

    def _decoded(self, steps: int) -> None:
        self.num_steps += steps
        self._own(self._steps + steps - 1)
        self._steps += steps
        self._context += self._num_decodes * steps
        while self._ends and self._ends[0][0] <= self._steps:
            end_step, _, sequence = heappop(self._ends)
            if sequence.state is SeqState.DECODING and sequence.end_step == end_step:
                self._finish(sequence)

    def _computed(self, sequence: SimSequence, count: int) -> None:
        """A chunk is done; after the last one a token is sampled."""
        sequence.num_computed += count
        self._publish(sequence)
        if sequence.num_left:
            return
        if sequence.is_aborting:
            return
        del self._prefilling[sequence]
        if sequence.is_for_peer:
            del self._running[sequence]
            sequence.move_to(SeqState.HELD)
            self._kept[sequence] = None
            sequence.num_generated += 1
            self._listener.sampled(sequence)
            return
        sequence.num_generated += 1
        self._listener.sampled(sequence)
        self._join(sequence)
        if sequence.num_generated >= sequence.num_output:
            self._finish(sequence)

    def _finish(self, sequence: SimSequence) -> None:
        sequence.num_generated = sequence.num_output
        self._leave(sequence)
        self._free(sequence)
        sequence.move_to(SeqState.ENDED)
        if not sequence.is_aborting:
            self._listener.finished(sequence)

    def _drop_aborting(self) -> None:
        for sequence in [s for s in self._running if s.is_aborting]:
            if sequence.state is SeqState.DECODING:
                self._leave(sequence)
            else:
                del self._prefilling[sequence]
                del self._running[sequence]
            self._free(sequence)
            sequence.move_to(SeqState.ENDED)

    # --- entering and leaving ------------------------------------------------------------------

    def _enter_all_arrived(self) -> None:
        """Before chunks of prompts; the last place goes to the older of the two lines' heads."""
        room = min(self.spec.max_num_batched_tokens, self.spec.max_num_seqs) - len(self._running)
        while self._arrived and room > (1 if self._is_waiting_first() else 0):
            if self._enter_arrived() is None:
                return
            room -= 1

    def _is_waiting_first(self) -> bool:
        waiting, arrived = self._waiting, self._arrived
        return bool(waiting) and (not arrived or waiting[0].added_ns <= arrived[0].added_ns)

    def _enter_next(self) -> SimSequence | None:
        """The older of the two lines' heads, or the other one when that does not fit."""
        if self._is_waiting_first():
            return self._enter_waiting() or self._enter_arrived()
        return self._enter_arrived() or self._enter_waiting()

    def _enter_waiting(self) -> SimSequence | None:
        if not self._waiting:
            return None
        sequence = self._waiting[0]
        keep_free = self.spec.watermark_blocks if self._running else 0
        if not self._take_blocks(sequence, keep_free):
            return None
        self._waiting.popleft()
        sequence.move_to(SeqState.PREFILLING)
        sequence.started_ns = self._queue.now_ns
        self._running[sequence] = None
        self._prefilling[sequence] = None
        return sequence

    def _enter_arrived(self) -> SimSequence | None:
        if not self._arrived:
            return None
        sequence = self._arrived[0]
        needed = self.pool.blocks_for(sequence.num_tokens) - sequence.num_blocks
        if needed > self.pool.free:
            if self._running:
                return None
            # Nobody will free blocks for it: it gives its own back and computes them again later.
            self._arrived.popleft()
            self._send_back(sequence)
            return None
        self.pool.grow(needed)
        sequence.num_blocks += needed
        self._arrived.popleft()
        self._running[sequence] = None
        self._join(sequence)
        return sequence

    def _take_blocks(self, sequence: SimSequence, keep_free: int) -> bool:
        """All blocks of its tokens, the cached prefix first."""
        pool = self.pool
        num_tokens = sequence.num_tokens
        hits = pool.match(sequence.hashes, (num_tokens - 1) // pool.block_size)
        prefix = list(sequence.hashes[:hits])
        needed = pool.blocks_for(num_tokens)
        if not pool.try_take(prefix, needed, keep_free):
            return False
        sequence.refs = prefix
        sequence.num_blocks = needed
        sequence.num_computed = hits * pool.block_size
        if not sequence.num_generated:
            sequence.num_cached = sequence.num_computed
        return True

    def _join(self, sequence: SimSequence) -> None:
        """Into the decode batch. Its blocks hold the tokens up to ``_grown_to`` from here on."""
        base = sequence.num_tokens - self._steps
        if not self._num_decodes:  # ``_grown_to`` says something of decodes only
            is_new = sequence.state is SeqState.PREFILLING
            self._grown_to = self._steps - 1 if is_new else self._steps
        owned = self.pool.blocks_for(base + self._grown_to)
        assert owned == sequence.num_blocks, "blocks and tokens disagree"
        sequence.move_to(SeqState.DECODING)
        sequence.base = base
        sequence.end_step = self._steps + sequence.num_output - sequence.num_generated
        self._bins[(1 - base) % self.spec.block_size] += 1
        self._num_decodes += 1
        self._context += sequence.num_tokens
        self._order += 1
        heappush(self._ends, (sequence.end_step, self._order, sequence))
        if sequence.num_generated == 1:
            self._joined.append(sequence)

    def _leave(self, sequence: SimSequence) -> None:
        """Out of the decode batch, between steps."""
        sequence.num_blocks = self._blocks_of(sequence)
        sequence.num_generated = sequence.base + self._steps - sequence.num_prompt
        self._bins[(1 - sequence.base) % self.spec.block_size] -= 1
        self._num_decodes -= 1
        self._context -= sequence.base + self._steps
        del self._running[sequence]

    def _preempt_youngest(self) -> None:
        victim = next(reversed(self._running))
        if victim.state is SeqState.DECODING:
            self._leave(victim)
        else:
            del self._running[victim]
            del self._prefilling[victim]
        self._send_back(victim)

    def _send_back(self, sequence: SimSequence) -> None:
        """To the head of the line, without blocks."""
        self._free(sequence)
        sequence.num_computed = 0
        sequence.move_to(SeqState.WAITING)
        self._waiting.appendleft(sequence)
        self.num_preempted += 1

    # --- blocks --------------------------------------------------------------------------------

    def _blocks_of(self, sequence: SimSequence) -> int:
        if sequence.state is SeqState.DECODING:
            return self.pool.blocks_for(sequence.base + self._grown_to)
        return sequence.num_blocks

    def _free(self, sequence: SimSequence) -> None:
        if sequence.num_blocks:
            self.pool.release(sequence.refs, sequence.num_blocks - len(sequence.refs))
            sequence.refs = []
            sequence.num_blocks = 0

    def _freed(self) -> None:
        """Blocks came free between steps."""
        self._catch_up()
        self._grant()
        if not self._is_stepping:
            self._plan()
        self._listener.load_changed(self)

    def _grant(self) -> None:
        """Reservations in line, as far as there are blocks that the waiting do not want."""
        if not self._reserving:
            return
        wanted = sum([self.pool.blocks_for(s.num_tokens) for s in self._waiting])
        keep_free = wanted + self.spec.watermark_blocks
        while self._reserving and self._take_blocks(self._reserving[0], keep_free):
            sequence = self._reserving.popleft()
            sequence.move_to(SeqState.RESERVED)
            self._kept[sequence] = None
            self._listener.reserved(sequence)
        if self._leap is not None and self._is_stepping:
            last = self._steps + self._leap_steps - 1
            if self._crossings(self._grown_to, last) > self.pool.free:
                self._cut_short()

    def _publish(self, sequence: SimSequence) -> None:
        """Full blocks that are computed enter the prefix cache."""
        full = sequence.num_computed // self.spec.block_size
        known = len(sequence.refs)
        if sequence.hashes and full > known and self.spec.has_prefix_cache:
            sequence.refs += self.pool.publish(sequence.hashes[known:full])

    def _tell_cache(self) -> None:
        events = self.pool.take_events()
        if events:
            self._listener.cache_changed(self, events)

    def _grow_decodes(self) -> None:
        """A block for whoever needs one for the next step; the youngest give way."""
        self._grown_to = max(self._grown_to, self._steps - 1)
        while self._num_decodes:
            needed = self._crossings(self._grown_to, self._steps)
            if needed <= self.pool.free:
                break
            self._preempt_youngest()
        self._own(self._steps)

    def _own(self, step: int) -> None:
        """The blocks that the decodes need up to ``step``."""
        if step > self._grown_to:
            if self._num_decodes:
                self.pool.grow(self._crossings(self._grown_to, step))
            self._grown_to = step

    def _crossings(self, after: int, upto: int) -> int:
        """Blocks that the decodes need for steps ``after + 1 … upto``."""
        if upto <= after:
            return 0
        size = self.spec.block_size
        rounds, rest = divmod(upto - after, size)
        needed = rounds * self._num_decodes
        if rest:
            first = (after + 1) % size
            last = first + rest
            needed += sum(self._bins[first:last])
            if last > size:
                needed += sum(self._bins[: last - size])
        return needed

    def _longest_leap(self, steps: int, free: int) -> int:
        """Most steps, one at least, for which there are blocks."""
        low, high = 1, steps
        while low < high:
            middle = (low + high + 1) // 2
            if self._crossings(self._grown_to, self._steps + middle - 1) <= free:
                low = middle
            else:
                high = middle - 1
        return low

    # --- leaps ---------------------------------------------------------------------------------

    def _next_end(self) -> int:
        ends = self._ends
        while True:
            end_step, _, sequence = ends[0]
            if sequence.state is SeqState.DECODING and sequence.end_step == end_step:
                return end_step
            heappop(ends)

    def _begun(self) -> int:
        """Steps of the leap that have begun by now."""
        assert self._leap is not None
        elapsed_ms = (self._queue.now_ns - self._started_ns) / NS_PER_MS
        return min(self._leap_steps, self._leap.steps_until(elapsed_ms))

    def _catch_up(self) -> None:
        """Takes the blocks that the steps of a leap have needed so far."""
        if self._is_stepping and self._leap is not None:
            self._own(self._steps + self._begun() - 1)

    def _cut_short(self) -> None:
        """Ends a leap with the step in progress."""
        if not self._is_stepping or self._leap is None:
            return
        steps = self._begun()
        if steps < self._leap_steps:
            self._leap_steps = steps
            now_ns, old_ns = self._queue.now_ns, self._ends_ns
            ends_ns = self._started_ns + round(self._leap.after_ms(steps) * NS_PER_MS)
            self._ends_at(max(now_ns, ends_ns))
            self.busy_ns += self._ends_ns - old_ns
