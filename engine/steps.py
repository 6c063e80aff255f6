"""The steps of one engine, from plan to results.

::

    step   [lock: plan] ─── launch … land ─── [lock: enter results]

With asynchronous scheduling the step after that is planned and launched before the wait for this
one (see ``flight``): then up to two steps are in flight, and what the second computes for sequences
that end with the first is void.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from isthmus.common.clock import NS_PER_MS, Clock
from isthmus.common.cluster import NO_STEPS
from isthmus.common.errors import InternalError
from isthmus.common.ids import BlockHash, RequestId
from isthmus.common.types import FinishReason, Request, TokenLogprob
from isthmus.engine.flight import Flight, FlightState
from isthmus.engine.kv_manager import KvCacheManager
from isthmus.engine.owners import BlockOwners
from isthmus.engine.runner import Runner, StepTokens
from isthmus.engine.sampler import Sampled, SampledToken
from isthmus.engine.scheduler import Scheduler, StepPlan
from isthmus.engine.sequence import SeqStatus, Sequence
from isthmus.engine.step_totals import add_step
from isthmus.engine.stop_rules import find_finish_reason
from isthmus.engine.types import SequenceMode, SequenceUpdate, StepLaunch, StepOutput

MAX_FAILED_STEPS = 3  # in a row; then the fault is not the requests' but ours
_STEP_MS_WEIGHT = 0.1  # of the newest step in the moving average


class WorkSignal:
    """Whether a step may find something to do, and the lock that guards what it would find."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._may_have_work = False
        self.is_closed = False

    def wake(self) -> None:
        """Something changed that may let a step run. Under the lock."""
        self._may_have_work = True
        self._changed.notify_all()

    def rest(self, *, is_busy: bool) -> None:
        """Nothing can be planned until something changes. Under the lock."""
        self._may_have_work = is_busy

    def wait(self, timeout_s: float) -> bool:
        """False on timeout or once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._may_have_work or self.is_closed, timeout_s)
            return self._may_have_work and not self.is_closed

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()


class Steps:
    """``run`` and ``watch`` belong to the engine thread. Figures are read under the lock."""

    def __init__(
        self,
        signal: WorkSignal,
        scheduler: Scheduler,
        owners: BlockOwners,
        kv: KvCacheManager,
        runner: Runner,
        clock: Clock,
        root_of: Callable[[Request], BlockHash],
        max_flights: int,
    ) -> None:
        """``root_of``: where the chain of a request's block hashes begins."""
        self._signal = signal
        self._lock = signal.lock
        self._scheduler = scheduler
        self._owners = owners
        self._kv = kv
        self._runner = runner
        self._clock = clock
        self._root_of = root_of
        self._flights: deque[Flight] = deque()  # oldest first; the engine thread's own
        self._max_flights = max_flights
        self._on_launch: Callable[[StepLaunch], None] | None = None
        self._landed_ns = (0, 0)  # when the last step landed: unix time, monotonic
        self._failed_steps = 0  # in a row
        self.num_steps = 0
        self.step_ms = 0.0
        self.totals = NO_STEPS

    def run(self) -> StepOutput | None:
        """See ``EngineCore.step``."""
        self._launch_steps()
        if not self._flights:
            return None
        flight = self._flights.popleft()
        outcome = flight.land()
        ended = self._clock.now_ns(), self._clock.monotonic_ns()
        # A step that was launched behind another began when that one ended.
        started_ns = max(flight.launched_ns, self._landed_ns[0])
        began_ns = max(flight.began_ns, self._landed_ns[1])
        self._landed_ns = ended
        with self._lock:
            self._owners.end_flight(flight.tables)
            updates = self._enter(flight.plan, outcome, started_ns)
            self._count_step(flight.plan, (ended[1] - began_ns) / NS_PER_MS)
            self._scheduler.observe(self.totals)
        self._count_failure(outcome, any_entered=bool(updates))
        return StepOutput(
            step_id=flight.plan.step_id,
            updates=updates,
            started_ns=started_ns,
            ended_ns=ended[0],
            num_prefill_tokens=flight.plan.num_prefill_tokens,
            num_decode_tokens=flight.plan.num_decode_tokens,
            num_preempted=flight.plan.num_preempted,
            is_paced=flight.plan.is_paced,
        )

    def watch(self, on_launch: Callable[[StepLaunch], None]) -> None:
        """See ``EngineCore.watch_launches``."""
        self._on_launch = on_launch

    # --- inside --------------------------------------------------------------------------------

    def _launch_steps(self) -> None:
        """Puts steps in flight until there are as many as may be, or there is no work."""
        while len(self._flights) < self._max_flights:
            if self._flights and self._flights[-1].state is FlightState.LANDED:
                return  # its launch failed: nothing may count on its tokens
            with self._lock:
                if self._failed_steps >= MAX_FAILED_STEPS:
                    raise InternalError(f"{self._failed_steps} steps in a row failed", stage="step")
                flight = self._plan_flight()
            if flight is None:
                return
            self._flights.append(flight)
            num_tokens = self._watched_tokens(flight.plan)
            flight.launch(self._runner, self._clock, is_watched=bool(num_tokens))
            if self._on_launch is not None and flight.progress is not None:
                self._on_launch(StepLaunch(flight.plan.step_id, num_tokens, flight.progress))

    def _watched_tokens(self, plan: StepPlan) -> dict[RequestId, int]:
        """Of sequences that a peer waits for: tokens whose KV there is when the step has run."""
        if self._on_launch is None or not plan.num_prefill_tokens:
            return {}
        chunks = zip(plan.scheduled, plan.starts, plan.counts, strict=True)
        return {
            sequence.request_id: start + count
            for sequence, start, count in chunks
            if sequence.mode is SequenceMode.PREFILL_ONLY
        }

    def _plan_flight(self) -> Flight | None:
        """Under the lock."""
        plan = None
        if not self._signal.is_closed:
            plan = self._scheduler.schedule(self._owners.coming_ms(), can_preempt=not self._flights)
        if plan is None:
            self._signal.rest(is_busy=bool(self._flights))
            return None
        return Flight(plan, self._owners.begin_flight(plan.scheduled))

    def _count_failure(self, outcome: StepTokens | InternalError, *, any_entered: bool) -> None:
        if isinstance(outcome, InternalError):
            self._failed_steps += 1
        elif any_entered:  # a step that was void may not have run at all
            self._failed_steps = 0

    def _enter(
        self, plan: StepPlan, outcome: StepTokens | InternalError, started_ns: int
    ) -> tuple[SequenceUpdate, ...]:
        """Updates of the step's sequences, except those that were stopped while it ran."""
        updates: list[SequenceUpdate] = []
        for sequence, count in zip(plan.scheduled, plan.counts, strict=True):
            if sequence.status is not SeqStatus.RUNNING:
                continue
            sequence.scheduled_ns = sequence.scheduled_ns or started_ns
            if isinstance(outcome, InternalError):
                updates.append(self._fail(sequence, outcome))
            else:
                updates.append(self._advance(sequence, count, outcome.get(sequence)))
        return tuple(updates)

    def _advance(self, sequence: Sequence, count: int, sampled: Sampled | None) -> SequenceUpdate:
        """``sampled`` is None while tokens of the sequence are left to compute."""
        if isinstance(sampled, InternalError):
            return self._fail(sequence, sampled)
        sequence.land(count)
        self._publish_full_blocks(sequence)
        if sampled is None:
            return _update(sequence)
        prompt_logprobs = sequence.take_prompt_logprobs()
        sequence.land_token(sampled.token_id)
        if not sequence.paced_from_ns:
            sequence.pace_from(self._landed_ns[1], sequence.num_tokens)
        reason = find_finish_reason(sequence)
        if reason is not None:
            self._owners.finish(sequence, reason)
            self._scheduler.answered(sequence)
        elif sequence.mode is SequenceMode.PREFILL_ONLY:
            self._owners.hold(sequence)
        return _update(sequence, sampled, prompt_logprobs)

    def _fail(self, sequence: Sequence, error: InternalError) -> SequenceUpdate:
        self._owners.finish(sequence, FinishReason.ERROR)
        return _update(sequence, error=error)

    def _publish_full_blocks(self, sequence: Sequence) -> None:
        assert sequence.table is not None
        if sequence.mode is SequenceMode.PRIVATE or not self._kv.enable_prefix_cache:
            return
        num_full = sequence.num_computed_tokens // self._kv.block_size
        if num_full > sequence.table.num_published_blocks:
            sequence.extend_block_hashes(self._kv.block_size, self._root_of(sequence.request))
            self._kv.publish(sequence.table, sequence.block_hashes, num_full)

    def _count_step(self, plan: StepPlan, elapsed_ms: float) -> None:
        self.totals = add_step(self.totals, plan, elapsed_ms)
        weight = _STEP_MS_WEIGHT if self.num_steps else 1.0
        self.step_ms += weight * (elapsed_ms - self.step_ms)
        self.num_steps += 1


def _update(
    sequence: Sequence,
    sampled: SampledToken | None = None,
    prompt_logprobs: tuple[TokenLogprob, ...] = (),
    error: InternalError | None = None,
) -> SequenceUpdate:
    """What the step did to the sequence, as it stands now."""
    reason = sequence.finish_reason
    return SequenceUpdate(
        request_id=sequence.request_id,
        num_computed_tokens=sequence.num_computed_tokens,
        num_cached_tokens=sequence.num_cached_tokens,
        token_ids=() if sampled is None else (sampled.token_id,),
        logprobs=() if sampled is None or sampled.logprob is None else (sampled.logprob,),
        prompt_logprobs=prompt_logprobs,
        finish_reason=reason,
        stop_token_id=sequence.last_token_id if reason is FinishReason.STOP else None,
        error=error,
        scheduled_ns=sequence.scheduled_ns,
    )
