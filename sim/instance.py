"""A simulated instance: the engine on counts instead of tensors, on virtual time.

Who runs is its ``scheduler``'s to say; this is the rest: when steps begin and end, and who is told.
What it does not follow token by token is a batch that only decodes: such steps are crossed in one
leap (``step_timer``), which ends early, with a step, when somebody comes or goes. So the number of
events grows with requests and chunks, not with tokens.

Owns its scheduler, with the sequences and their blocks, and its timer. Invariant: the listener
hears ``before_change`` before anything of it changes but by the passing of time.
"""

from __future__ import annotations

from collections.abc import Callable

from isthmus.common.clock import NS_PER_MS
from isthmus.common.cluster import LoadReport
from isthmus.sim.events import EventQueue
from isthmus.sim.listener import Listener
from isthmus.sim.load import load_report
from isthmus.sim.scheduler import Chunk, Scheduler
from isthmus.sim.sequence import SeqState, SimSequence
from isthmus.sim.spec import InstanceSpec
from isthmus.sim.step_counts import StepCounts
from isthmus.sim.step_model import Leap
from isthmus.sim.step_timer import StepTimer

STEP_SMOOTHING = 0.1


class Instance:
    """A ``SimInstance``. ``noise()`` scales every plan's duration."""

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
        self._queue = queue
        self._listener = listener
        self._noise = noise
        self._model = spec.model
        self._scheduler = Scheduler(spec)
        self.pool = self._scheduler.pool
        self._lines = self._scheduler.lines
        self._decodes = self._scheduler.decodes
        self._timer = StepTimer(queue, self._step_ended)
        self._is_settling = False  # a step has just ended and the next one is not planned yet
        self._chunks: list[Chunk] = []
        self._step_ms = 0.0
        self._report_no = 0
        self._counts = StepCounts()

    # --- what others ask of it -----------------------------------------------------------------

    @property
    def busy_ns(self) -> int:
        return self._timer.busy_ns

    @property
    def num_steps(self) -> int:
        return self._counts.num_steps

    @property
    def num_preempted(self) -> int:
        return self._scheduler.num_preempted

    @property
    def num_sequences(self) -> int:
        return self._lines.num_seqs + len(self._scheduler.running)

    @property
    def num_prompts(self) -> int:
        return self._lines.num_prompts + sum([s.is_prompt for s in self._scheduler.prefilling])

    def submit(self, sequence: SimSequence) -> None:
        self._listener.before_change(self)
        sequence.move_to(SeqState.WAITING)
        sequence.added_ns = self._queue.now_ns
        self._lines.waiting.append(sequence)
        self._came()

    def fetch_prefix(self, sequence: SimSequence, num_held: int) -> int:
        self._listener.before_change(self)
        self._catch_up()
        lines = self._lines
        keep_free = lines.waiting.num_blocks + self._scheduler.kept_to_grow
        missing = lines.fetching.try_enter(sequence, num_held, keep_free)
        if missing:
            sequence.move_to(SeqState.FETCHING)
            self._tell_cache()
            self._listener.load_changed(self)
        return missing

    def prefix_ended(self, sequence: SimSequence, *, has_arrived: bool) -> None:
        self._listener.before_change(self)
        if has_arrived:
            self._lines.fetching.arrived(sequence)
            self._tell_cache()
        else:
            self._lines.fetching.leave(sequence)
        self.submit(sequence)

    def reserve(self, sequence: SimSequence) -> None:
        self._listener.before_change(self)
        sequence.move_to(SeqState.RESERVING)
        sequence.added_ns = self._queue.now_ns
        self._lines.reserving.append(sequence)
        self._catch_up()
        self._grant()
        self._listener.load_changed(self)

    def arrived(self, sequence: SimSequence, first_ns: int) -> None:
        self._listener.before_change(self)
        self._scheduler.arrived(sequence, first_ns)
        self._tell_cache()
        self._came()

    def let_go(self, sequence: SimSequence) -> None:
        self._listener.before_change(self)
        self._scheduler.drop(sequence)
        self._freed()

    def abort(self, sequence: SimSequence) -> None:
        """One that runs ends when the step does."""
        if sequence.state is SeqState.ENDED or sequence.is_aborting:
            return
        self._listener.before_change(self)
        if sequence in self._scheduler.running:
            self._scheduler.abort_later(sequence)
            self._timer.cut_short()
        else:
            self._scheduler.drop(sequence)
            self._freed()

    def kill(self) -> list[SimSequence]:
        self._catch_up()
        decodes = self._decodes
        in_leap = self._timer.is_running and not self._chunks
        lost = self._scheduler.clear(max(decodes.grown_to, 0) if in_leap else decodes.steps)
        self._timer.stop()
        return lost

    def report(self, at_ns: int) -> LoadReport:
        self._catch_up(at_ns)
        self._report_no += 1
        return load_report(
            self._scheduler,
            self._counts,
            at_ns,
            instance_id=self.spec.instance_id,
            epoch=self.epoch,
            seq=self._report_no,
            step_ms=self._step_ms,
        )

    def check_integrity(self) -> None:
        """Between steps or in a leap."""
        self._catch_up()
        self._scheduler.check_integrity()

    # --- steps ---------------------------------------------------------------------------------

    def _came(self) -> None:
        """A newcomer: a step begins, or the leap ends early if there may be room for it."""
        if not self._timer.is_running:
            self._plan()
        elif self._scheduler.has_room:
            self._timer.cut_short()
        self._listener.load_changed(self)

    def _plan(self) -> None:
        """Decides and starts the next step, or the next leap; does nothing when nobody can run."""
        if self._is_settling:
            return
        slowness = self.slowness  # an engine has learned of it by now
        model = self._model if slowness == 1.0 else self._model.scaled(slowness)
        self._chunks = self._scheduler.plan(self._queue.now_ns, model)
        if self._chunks:
            self._start_step()
        elif self._decodes.num_seqs:
            self._start_leap()

    def _start_step(self) -> None:
        model, decodes = self._model, self._decodes
        chunk_ms = sum([model.chunk_ms(count, s.num_computed) for s, count in self._chunks])
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
        joined = self._scheduler.take_joined()
        if joined:
            second_ns = self._queue.now_ns + max(1, round(first_ms * NS_PER_MS))
            for sequence in joined:
                self._listener.second_token(sequence, second_ns)

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
        if decodes.num_seqs:
            decodes.advance(timer.num_steps)
            while (ended := decodes.take_ended()) is not None:
                self._finish(ended)
        for sequence, count in self._chunks:
            if self._scheduler.computed(sequence, count):
                self._sampled(sequence)
        self._chunks = []
        self._scheduler.end_aborting()
        self._tell_cache()
        self._grant()
        self._is_settling = False
        self._plan()
        self._listener.load_changed(self)

    def _sampled(self, sequence: SimSequence) -> None:
        """The last chunk of its prompt is done."""
        sequence.take_first_token(self._queue.now_ns)
        if sequence.is_for_peer:
            self._scheduler.hold(sequence)
            self._listener.sampled(sequence)
            return
        self._listener.sampled(sequence)
        self._scheduler.join(sequence)
        if sequence.num_generated >= sequence.num_output:
            self._finish(sequence)

    def _finish(self, sequence: SimSequence) -> None:
        sequence.num_generated = sequence.num_output
        is_wanted = not sequence.is_aborting
        self._scheduler.end(sequence)
        if is_wanted:
            self._scheduler.answers.observe(sequence.num_output)
            self._listener.finished(sequence)

    # --- blocks --------------------------------------------------------------------------------

    def _freed(self) -> None:
        """Blocks came free between steps."""
        self._catch_up()
        self._grant()
        if not self._timer.is_running:
            self._plan()
        self._listener.load_changed(self)

    def _grant(self) -> None:
        """Reservations in line, as far as there are blocks for them."""
        if not self._lines.reserving.num_seqs:
            return
        while (sequence := self._scheduler.try_grant()) is not None:
            self._listener.reserved(sequence)
        if self._timer.is_leaping:
            last = self._decodes.steps + self._timer.num_steps - 1
            if self._decodes.blocks_until(last) > self.pool.free:
                self._timer.cut_short()

    def _tell_cache(self) -> None:
        events = self.pool.take_events()
        if events:
            self._listener.cache_changed(self, events)

    def _catch_up(self, at_ns: int | None = None) -> None:
        """Takes the blocks that the steps of a leap have needed by then, or by now."""
        timer = self._timer
        if timer.leap is not None and timer.is_running:
            begun = timer.begun(self._queue.now_ns if at_ns is None else at_ns)
            self._decodes.own(self._decodes.steps + begun - 1)
