"""One instance's engine: sequences in, tokens out. It knows nothing of peers, sockets or clients.

Threads: the engine thread alone calls ``step``; everything else may be called from any thread and
returns within microseconds. One lock guards queues, sequences and blocks. It is held while a step
is planned and while its results are entered, not while the model runs::

    step   [lock: plan] ─── forward, sample ─── [lock: enter results]
                             abort, reserve, release_hold, … come in here

While the model runs, the tables of the step's sequences are *in flight*: whoever lets go of one
only marks it, and its blocks return to the pool when the step ends. So no block is ever handed out
while a forward pass may still write to it.

A PREFILL_ONLY sequence's blocks may be read by a transfer from its first chunk on. However it ends,
they stay HELD until ``release_hold`` (or ``expire_holds``).
"""

from __future__ import annotations

import threading

from isthmus.common.clock import NS_PER_MS, Clock
from isthmus.common.config import EngineConfig, ModelConfig
from isthmus.common.errors import InternalError, OutOfBlocksError
from isthmus.common.hashing import block_hashes, root_hash
from isthmus.common.ids import BlockHash, BlockId, RequestId
from isthmus.common.kv_events import KvEvent
from isthmus.common.logging import get_logger
from isthmus.common.types import FinishReason, Request
from isthmus.engine.admission import check_request
from isthmus.engine.block_table import BlockTable, TableState
from isthmus.engine.kv_manager import KvCacheManager
from isthmus.engine.kv_store import KvStore, count_blocks, layout_of
from isthmus.engine.models.types import LanguageModel
from isthmus.engine.runner import ModelRunner, StepTokens
from isthmus.engine.sampler import SampledToken
from isthmus.engine.scheduler import Scheduler, StepPlan
from isthmus.engine.sequence import SeqStatus, Sequence
from isthmus.engine.stop_rules import find_finish_reason
from isthmus.engine.types import (
    EngineLoad,
    Reservation,
    SequenceMode,
    SequenceUpdate,
    StepOutput,
)

MAX_FAILED_STEPS = 3  # in a row; then the fault is not the requests' but ours
_STEP_MS_WEIGHT = 0.1  # of the newest step in the moving average

_log = get_logger("engine")


class EngineCore:
    """See the module docstring for threads and ownership."""

    def __init__(
        self, model: LanguageModel, config: EngineConfig, clock: Clock, max_model_len: int = 0
    ) -> None:
        """``max_model_len`` 0 = the model's own; never more than the KV store holds."""
        self.spec = model.spec
        self.kv_layout = layout_of(model.spec, config.block_size)
        self.kv_store = KvStore(self.kv_layout, count_blocks(config, self.kv_layout), config.device)
        self._runner = ModelRunner(model, self.kv_store, config.device)
        self._clock = clock
        self._kv = KvCacheManager(
            self.kv_store.num_blocks,
            config.block_size,
            config.watermark,
            config.enable_prefix_cache,
        )
        self._scheduler = Scheduler(self._kv, config.max_num_batched_tokens, config.max_num_seqs)
        longest = min(max_model_len or self.spec.max_model_len, self.spec.max_model_len)
        self.max_model_len = min(longest, self._kv.num_blocks * config.block_size)

        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._may_have_work = False
        self._is_closed = False
        self._sequences: dict[RequestId, Sequence] = {}  # waiting, running, preempted
        self._held: dict[RequestId, Sequence] = {}
        self._reserved: dict[RequestId, BlockTable] = {}
        self._quarantined: dict[RequestId, list[BlockTable]] = {}
        self._in_flight: set[BlockTable] = set()
        self._free_after_step: list[BlockTable] = []
        self._failed_steps = 0
        self._num_steps = 0
        self._step_ms = 0.0

    @classmethod
    def build(cls, model: ModelConfig, engine: EngineConfig, clock: Clock) -> EngineCore:
        """Loads the model and allocates the KV store. Raises ModelError and ConfigError."""
        from isthmus.engine.models.loader import load_model

        loaded = load_model(model, engine.device, engine.num_threads)
        return cls(loaded, engine, clock, model.max_model_len)

    @property
    def num_blocks(self) -> int:
        """Blocks of the store, the null block included: what peers may address."""
        return self.kv_store.num_blocks

    # --- requests ------------------------------------------------------------------------------

    def add(self, request: Request, mode: SequenceMode = SequenceMode.FULL) -> None:
        """Queues a request. Raises ContextLengthError and InvalidRequestError.

        A prompt that could never fit in the KV store is beyond ``max_model_len``."""
        check_request(request, self.max_model_len, self.spec.vocab_size)
        sequence = self._new_sequence(request, mode)
        with self._lock:
            self._check_is_new(request.request_id)
            self._sequences[request.request_id] = sequence
            self._scheduler.add(sequence)
            self._wake()

    def reserve(self, request: Request) -> Reservation:
        """Sets blocks aside for a prompt that a peer will compute. Raises ContextLengthError,
        InvalidRequestError, and OutOfBlocksError when there are too few blocks *now*: those that
        waiting sequences need and the watermark are not given away."""
        check_request(request, self.max_model_len, self.spec.vocab_size)
        hashes = self._hash_blocks(request)
        with self._lock:
            self._check_is_new(request.request_id)
            table = self._kv.try_allocate(
                len(request.token_ids),
                hashes,
                state=TableState.RESERVED,
                keep_free=self._scheduler.num_wanted_blocks(),
            )
            if table is None:
                raise OutOfBlocksError(
                    f"{self._kv.num_free_blocks} of {self._kv.num_blocks} KV blocks are free, too "
                    f"few for {len(request.token_ids)} tokens",
                    stage="reserve",
                    retry_after_ms=max(1, round(self._step_ms)),
                )
            self._reserved[request.request_id] = table
            num_cached = table.num_cached_blocks
            return Reservation(
                request_id=request.request_id,
                num_cached_tokens=num_cached * self._kv.block_size,
                cached_block_ids=tuple(table.block_ids[:num_cached]),
                block_ids=tuple(table.block_ids[num_cached:]),
            )

    def admit_with_kv(self, reservation: Reservation, request: Request, first_token: int) -> None:
        """Goes on decoding after ``first_token``, which was delivered already and did not end the
        request. KV of all ``request.token_ids`` is in the reserved blocks, which enter the prefix
        cache now."""
        sequence = self._new_sequence(request, SequenceMode.FULL)
        sequence.append_token(first_token)
        if find_finish_reason(sequence, self.max_model_len) is not None:
            raise InternalError(
                f"request {request.request_id} is over with its first token", stage="admit"
            )
        with self._lock:
            table = self._reserved.pop(reservation.request_id, None)
            if table is None:
                raise InternalError(f"request {request.request_id} has no reservation")
            self._kv.move(table, TableState.USED)
            self._kv.publish(table, sequence.block_hashes, len(sequence.block_hashes))
            sequence.table = table
            sequence.num_computed_tokens = len(request.token_ids)
            sequence.num_cached_tokens = reservation.num_cached_tokens
            self._sequences[request.request_id] = sequence
            self._scheduler.add_with_kv(sequence)
            self._wake()

    def cancel_reservation(self, reservation: Reservation, quarantine: bool) -> None:
        """Gives the blocks back, or keeps those a peer may still write to out of the pool until
        ``release_quarantine``. Idempotent."""
        with self._lock:
            table = self._reserved.pop(reservation.request_id, None)
            if table is None:
                return
            if quarantine:
                self._kv.quarantine(table)
                self._quarantined.setdefault(reservation.request_id, []).append(table)
            else:
                self._kv.free(table)
            self._wake()

    def release_quarantine(self, request_id: RequestId) -> None:
        """No write can land any more. Idempotent."""
        with self._lock:
            for table in self._quarantined.pop(request_id, []):
                self._kv.free(table)
            self._wake()

    def abort(self, request_id: RequestId) -> bool:
        """Stops a queued or running sequence; its next SequenceUpdate will not come. False when it
        is unknown or over. Reservations and holds have their own ways out."""
        with self._lock:
            sequence = self._sequences.get(request_id)
            if sequence is None:
                return False
            self._finish(sequence, FinishReason.ABORT)
            self._wake()
            return True

    def release_hold(self, request_id: RequestId) -> None:
        """No transfer reads the blocks of this PREFILL_ONLY sequence any more. One that still
        computes is aborted. Idempotent."""
        with self._lock:
            sequence = self._sequences.get(request_id)
            if sequence is not None and sequence.mode is SequenceMode.PREFILL_ONLY:
                self._finish(sequence, FinishReason.ABORT)
            held = self._held.get(request_id)
            if held is not None:
                self._release(held)
            self._wake()

    def expire_holds(self, now_ns: int, hold_ms: int) -> list[RequestId]:
        """Releases holds older than ``hold_ms``: the backstop for a worker that forgot."""
        with self._lock:
            oldest_ns = now_ns - hold_ms * NS_PER_MS
            expired = [s for s in self._held.values() if s.held_at_ns <= oldest_ns]
            for sequence in expired:
                self._release(sequence)
            if expired:
                self._wake()
            return [s.request_id for s in expired]

    def block_table(self, request_id: RequestId) -> tuple[BlockId, ...]:
        """Blocks of a running or held sequence, in order; empty while it has none."""
        with self._lock:
            sequence = self._sequences.get(request_id) or self._held.get(request_id)
            if sequence is None or sequence.table is None:
                return ()
            return tuple(sequence.table.block_ids)

    # --- stepping ------------------------------------------------------------------------------

    def wait_for_work(self, timeout_s: float) -> bool:
        """Blocks until ``step`` may find something to do; False on timeout or once closed."""
        with self._work:
            self._work.wait_for(lambda: self._may_have_work or self._is_closed, timeout_s)
            return self._may_have_work and not self._is_closed

    def step(self) -> StepOutput | None:
        """Plans, runs and enters one step; None = nothing to do until something changes.

        When the model fails, the step's sequences end with InternalError and the engine goes on.
        After MAX_FAILED_STEPS failures in a row this raises InternalError: restart the process."""
        with self._lock:
            if self._failed_steps >= MAX_FAILED_STEPS:
                raise InternalError(f"{self._failed_steps} engine steps in a row failed")
            plan = None if self._is_closed else self._scheduler.schedule()
            if plan is None:
                self._may_have_work = False
                return None
            started_ns, began_ns = self._clock.now_ns(), self._clock.monotonic_ns()
            for sequence in plan.scheduled:
                assert sequence.table is not None
                self._in_flight.add(sequence.table)
                sequence.scheduled_ns = sequence.scheduled_ns or started_ns
        outcome = self._run(plan)
        with self._lock:
            self._end_flight()
            updates = self._enter(plan, outcome)
            self._count_step(began_ns)
            return StepOutput(
                step_id=plan.step_id,
                updates=updates,
                started_ns=started_ns,
                ended_ns=self._clock.now_ns(),
                num_prefill_tokens=plan.num_prefill_tokens,
                num_decode_tokens=plan.num_decode_tokens,
                num_preempted=plan.num_preempted,
            )

    def close(self) -> None:
        """Ends stepping and wakes whoever waits. The KV store lives as long as this object."""
        with self._work:
            self._is_closed = True
            self._work.notify_all()

    # --- what others see -----------------------------------------------------------------------

    def load(self) -> EngineLoad:
        with self._lock:
            waiting, running = self._scheduler.waiting, self._scheduler.running
            now_ns = self._clock.monotonic_ns()
            oldest_ns = min((s.added_ns for s in waiting), default=now_ns)
            chunked = [s.num_uncomputed_tokens for s in running if s.num_uncomputed_tokens > 1]
            return EngineLoad(
                waiting_seqs=len(waiting),
                waiting_tokens=sum(s.num_uncomputed_tokens for s in waiting) + sum(chunked),
                oldest_wait_ms=(now_ns - oldest_ns) / NS_PER_MS,
                running_seqs=len(running),
                running_context_tokens=sum(s.num_computed_tokens for s in running),
                num_blocks=self._kv.num_blocks,
                free_blocks=self._kv.num_free_blocks,
                held_blocks=self._kv.num_blocks_in(TableState.HELD),
                cached_blocks=self._kv.num_free_cached_blocks,
                quarantined_blocks=self._kv.num_blocks_in(TableState.QUARANTINED),
                steps=self._num_steps,
                step_ms=self._step_ms,
            )

    def take_kv_events(self) -> list[KvEvent]:
        """Changes of the prefix cache since the last call, in order."""
        with self._lock:
            return self._kv.take_events()

    def cached_hashes(self) -> list[BlockHash]:
        """Everything in the prefix cache: what a snapshot is made of."""
        with self._lock:
            return self._kv.cached_hashes()

    def flush_cache(self) -> int:
        """Forgets every cached block; returns how many. Running sequences keep theirs."""
        with self._lock:
            return self._kv.clear_cache()

    def check_integrity(self) -> None:
        """AssertionError naming the block or owner that is wrong: every block is exactly one of
        free, used, held, reserved and quarantined, and every owner is one the engine knows."""
        with self._lock:
            self._kv.check_integrity()
            known = [s.table for s in (*self._sequences.values(), *self._held.values())]
            known += [*self._reserved.values(), *self._free_after_step]
            known += [table for tables in self._quarantined.values() for table in tables]
            owners = {table for table in known if table is not None}
            leaked = self._kv.live_tables() ^ owners
            assert not leaked, f"blocks without owner: {[t.block_ids for t in leaked]}"
            queued = {*self._scheduler.running, *self._scheduler.waiting}
            assert queued == set(self._sequences.values()), "queues and sequences differ"

    # --- inside --------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Something changed that may let a step run. Under the lock."""
        self._may_have_work = True
        self._work.notify_all()

    def _check_is_new(self, request_id: RequestId) -> None:
        known = (self._sequences, self._held, self._reserved)
        if any(request_id in owners for owners in known):
            raise InternalError(f"request {request_id} is in the engine already", stage="admit")

    def _hash_blocks(self, request: Request) -> list[BlockHash]:
        if not self._kv.enable_prefix_cache:
            return []
        root = root_hash(self.spec.fingerprint, request.cache_salt)
        return block_hashes(request.token_ids, self._kv.block_size, root)

    def _new_sequence(self, request: Request, mode: SequenceMode) -> Sequence:
        hashes = self._hash_blocks(request)
        return Sequence(request, mode, hashes, added_ns=self._clock.monotonic_ns())

    def _run(self, plan: StepPlan) -> StepTokens | InternalError:
        try:
            tokens = self._runner.run(plan)
        except Exception as error:  # noqa: BLE001 - whatever a model raises ends these sequences, not the engine
            self._failed_steps += 1
            _log.exception("step failed", step_id=plan.step_id, failed_in_a_row=self._failed_steps)
            return InternalError(f"engine step failed: {error}", stage="step")
        self._failed_steps = 0
        return tokens

    def _end_flight(self) -> None:
        self._in_flight.clear()
        for table in self._free_after_step:
            self._kv.free(table)
        self._free_after_step.clear()

    def _enter(
        self, plan: StepPlan, outcome: StepTokens | InternalError
    ) -> tuple[SequenceUpdate, ...]:
        """Updates of the step's sequences, those apart that were stopped while it ran."""
        alive = [s for s in plan.scheduled if s.status is SeqStatus.RUNNING]
        if isinstance(outcome, InternalError):
            return tuple(self._fail(sequence, outcome) for sequence in alive)
        return tuple(self._advance(sequence, outcome.get(sequence)) for sequence in alive)

    def _advance(self, sequence: Sequence, sampled: SampledToken | None) -> SequenceUpdate:
        if sampled is not None and sampled.error is not None:
            return self._fail(sequence, sampled.error)
        sequence.num_computed_tokens += sequence.num_scheduled_tokens
        self._publish_full_blocks(sequence)
        if sampled is None:
            return self._update(sequence)
        prompt_logprobs = ()
        if sequence.wants_prompt_logprobs:
            prompt_logprobs = tuple(sequence.prompt_logprobs)
        sequence.append_token(sampled.token_id)
        reason = find_finish_reason(sequence, self.max_model_len)
        if reason is not None:
            self._finish(sequence, reason)
        elif sequence.mode is SequenceMode.PREFILL_ONLY:
            self._hold(sequence)
        return SequenceUpdate(
            request_id=sequence.request_id,
            num_computed_tokens=sequence.num_computed_tokens,
            num_cached_tokens=sequence.num_cached_tokens,
            token_ids=(sampled.token_id,),
            logprobs=() if sampled.logprob is None else (sampled.logprob,),
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_token_id=sampled.token_id if reason is FinishReason.STOP else None,
            scheduled_ns=sequence.scheduled_ns,
        )

    def _fail(self, sequence: Sequence, error: InternalError) -> SequenceUpdate:
        self._finish(sequence, FinishReason.ERROR)
        return self._update(sequence, FinishReason.ERROR, error)

    def _update(
        self,
        sequence: Sequence,
        reason: FinishReason | None = None,
        error: InternalError | None = None,
    ) -> SequenceUpdate:
        return SequenceUpdate(
            request_id=sequence.request_id,
            num_computed_tokens=sequence.num_computed_tokens,
            num_cached_tokens=sequence.num_cached_tokens,
            finish_reason=reason,
            error=error,
            scheduled_ns=sequence.scheduled_ns,
        )

    def _publish_full_blocks(self, sequence: Sequence) -> None:
        table = sequence.table
        assert table is not None
        num_full = sequence.num_computed_tokens // self._kv.block_size
        if num_full > table.num_published_blocks and self._kv.enable_prefix_cache:
            root = root_hash(self.spec.fingerprint, sequence.request.cache_salt)
            sequence.extend_block_hashes(self._kv.block_size, root)
            self._kv.publish(table, sequence.block_hashes, num_full)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence that has not ended; a PREFILL_ONLY one with blocks goes on hold."""
        sequence.finish_reason = reason
        if sequence.mode is SequenceMode.PREFILL_ONLY and sequence.table is not None:
            self._hold(sequence)
            return
        self._scheduler.remove(sequence)
        del self._sequences[sequence.request_id]
        sequence.move_to(SeqStatus.FINISHED)
        if sequence.table is not None:
            self._free(sequence.table)

    def _hold(self, sequence: Sequence) -> None:
        assert sequence.table is not None
        self._scheduler.remove(sequence)
        del self._sequences[sequence.request_id]
        sequence.move_to(SeqStatus.HELD)
        sequence.held_at_ns = self._clock.now_ns()
        self._kv.move(sequence.table, TableState.HELD)
        self._held[sequence.request_id] = sequence

    def _release(self, sequence: Sequence) -> None:
        assert sequence.table is not None
        del self._held[sequence.request_id]
        sequence.move_to(SeqStatus.FINISHED)
        self._free(sequence.table)

    def _free(self, table: BlockTable) -> None:
        if table in self._in_flight:
            self._free_after_step.append(table)
        else:
            self._kv.free(table)

    def _count_step(self, began_ns: int) -> None:
        elapsed_ms = (self._clock.monotonic_ns() - began_ns) / NS_PER_MS
        weight = _STEP_MS_WEIGHT if self._num_steps else 1.0
        self._step_ms += weight * (elapsed_ms - self._step_ms)
        self._num_steps += 1
