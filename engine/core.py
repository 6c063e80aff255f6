"""One instance's engine: sequences in, tokens out. It knows nothing of peers, sockets or clients.

Threads: the engine thread alone calls ``step``; everything else may be called from any thread and
returns within microseconds. One lock guards queues, sequences and blocks. It is held while a step
is planned and while its results are entered, not while the model runs::

    step   [lock: plan] ─── forward, sample ─── [lock: enter results]      (see ``steps``)
                             abort, reserve, release_hold, … come in here

No block is handed out while a forward pass may still write to it (see ``owners``), and none while a
transfer may: blocks of a PREFILL_ONLY sequence may be read by a peer from its first chunk on, so,
however it ends, they stay HELD until ``release_hold``.
"""

from __future__ import annotations

from collections.abc import Callable

from isthmus.common.clock import NS_PER_MS, Clock
from isthmus.common.cluster import LatencyModel
from isthmus.common.config import EngineConfig, ModelConfig
from isthmus.common.errors import InternalError, OutOfBlocksError
from isthmus.common.hashing import block_hashes, root_hash
from isthmus.common.ids import BlockHash, BlockId, RequestId
from isthmus.common.kv_events import KvEvent
from isthmus.common.types import FinishReason, Request
from isthmus.engine.admission import check_request
from isthmus.engine.block_table import BlockTable, TableState
from isthmus.engine.kv_manager import KvCacheManager
from isthmus.engine.kv_store import KvStore, count_blocks, is_shared, layout_of
from isthmus.engine.models.types import LanguageModel
from isthmus.engine.owners import BlockOwners
from isthmus.engine.pacer import Pacer
from isthmus.engine.runners import RunnerOf, is_asynchronous, make_runner, measured_kv_bytes
from isthmus.engine.scheduler import Scheduler
from isthmus.engine.sequence import Sequence
from isthmus.engine.steps import Steps, WorkSignal
from isthmus.engine.stop_rules import find_finish_reason
from isthmus.engine.types import (
    EngineLoad,
    Reservation,
    SequenceMode,
    StepLaunch,
    StepOutput,
)


class EngineCore:
    """See the module docstring for threads and ownership."""

    def __init__(
        self,
        model: LanguageModel,
        config: EngineConfig,
        clock: Clock,
        max_model_len: int = 0,
        runner_of: RunnerOf = make_runner,
        staging_bytes: int = 0,
    ) -> None:
        """``max_model_len`` 0 = the model's own; never more than the KV store holds.
        ``staging_bytes`` are added to the store's memory, for KV that is sent in another dtype.

        Raises ConfigError when the KV store would be too small to use."""
        self.spec = model.spec
        self.kv_layout = layout_of(model.spec, config.block_size, config.kv_dtype)
        num_blocks = count_blocks(config, self.kv_layout, measured_kv_bytes(model, config))
        self.kv_store = KvStore(
            *(self.kv_layout, num_blocks, config.device, is_shared(config)), staging_bytes
        )
        self._clock = clock
        self._kv = KvCacheManager(
            num_blocks, config.block_size, config.watermark, config.enable_prefix_cache
        )
        self._pacer = Pacer(clock)
        self._scheduler = Scheduler(
            self._kv, self._pacer, config.max_num_batched_tokens, config.max_num_seqs
        )
        self._owners = BlockOwners(self._kv, self._scheduler, clock)
        longest = max_model_len or self.spec.max_model_len
        capacity = self._kv.num_blocks * config.block_size
        self.max_model_len = min(longest, self.spec.max_model_len, capacity)
        runner = runner_of(model, self.kv_store, config, self.max_model_len)
        self._signal = WorkSignal()
        self._lock = self._signal.lock
        self._steps = Steps(
            self._signal,
            self._scheduler,
            self._owners,
            self._kv,
            runner,
            clock,
            self._root_hash,
            max_flights=2 if is_asynchronous(config) else 1,
        )

    @classmethod
    def build(
        cls, model: ModelConfig, engine: EngineConfig, clock: Clock, staging_bytes: int = 0
    ) -> EngineCore:
        """Loads the model and allocates the KV store. Raises ModelError and ConfigError."""
        from isthmus.engine.models.loader import load_model

        loaded = load_model(model, engine.device, engine.num_threads, kernels_by_op=engine.kernels)
        return cls(loaded, engine, clock, model.max_model_len, staging_bytes=staging_bytes)

    @property
    def num_blocks(self) -> int:
        """Blocks of the store, the null block included: what peers may address."""
        return self.kv_store.num_blocks

    # --- requests ------------------------------------------------------------------------------

    def add(self, request: Request, mode: SequenceMode = SequenceMode.FULL) -> None:
        """Queues a request. Raises ContextLengthError, InvalidRequestError.

        A prompt that could never fit in the KV store is longer than ``max_model_len``."""
        sequence = self._new_sequence(request, mode)
        is_resumed = request.num_resumed_tokens and request.first_token_ns is not None
        if is_resumed and mode is SequenceMode.FULL:
            self._pace(sequence)
        with self._lock:
            self._owners.add(sequence)
            self._signal.wake()

    def reserve(self, request: Request) -> Reservation:
        """Sets blocks aside for a prompt that a peer will compute.

        Raises ContextLengthError and InvalidRequestError, and OutOfBlocksError when there are too
        few blocks *now*: those that waiting sequences need and the watermark are not given away.
        """
        check_request(request, self.max_model_len, self.spec.vocab_size)
        hashes = self._hash_blocks(request)
        with self._lock:
            self._owners.check_is_new(request.request_id)
            table = self._kv.try_allocate(
                len(request.token_ids),
                hashes,
                state=TableState.RESERVED,
                keep_free=self._scheduler.num_wanted_blocks(),
            )
            if table is None:
                raise OutOfBlocksError(
                    f"{self._kv.num_free_blocks} of {self._kv.num_blocks} KV blocks are free, too "
                    f"few for {len(request.token_ids)} more tokens",
                    stage="reserve",
                    retry_after_ms=max(1, round(self._steps.step_ms)),
                )
            self._owners.add_reservation(request.request_id, table, request.slo.tpot_ms)
            return self._reservation(request.request_id, table)

    def admit_with_kv(self, reservation: Reservation, request: Request, first_token: int) -> None:
        """Goes on decoding after ``first_token``, which was delivered already and did not end the
        request: now, where ``request`` does not say when. KV of all ``request.token_ids`` is in the
        reserved blocks, but for blocks outside the window of every later token, layer by layer;
        where there are none of these, the full blocks enter the prefix cache now. Raises
        InternalError, changing nothing, when any of this is untrue."""
        assert reservation.request_id == request.request_id
        sequence = self._new_sequence(request, SequenceMode.FULL)
        sequence.append_token(first_token)
        if find_finish_reason(sequence) is not None:
            raise InternalError(
                f"request {request.request_id} is over with its first token", stage="admit"
            )
        self._pace(sequence)
        with self._lock:
            unmoved = self.kv_layout.unmoved_tokens(len(request.token_ids))
            self._owners.admit_reservation(sequence, unmoved)
            self._signal.wake()

    def reserve_prefix(
        self, request: Request, num_tokens: int, least_missing: int
    ) -> Reservation | None:
        """Sets blocks aside for the first ``num_tokens`` tokens of a prompt, a multiple of the
        block size, whose KV a peer has. None when fewer than ``least_missing`` of them are not in
        the prefix cache here, or there is no room for them *now*.

        Raises what ``reserve`` raises but OutOfBlocksError."""
        check_request(request, self.max_model_len, self.spec.vocab_size)
        hashes = self._hash_blocks(request)[: num_tokens // self._kv.block_size]
        if not hashes:
            return None
        with self._lock:
            self._owners.check_is_new(request.request_id)
            num_cached = self._kv.num_cached_blocks(hashes) * self._kv.block_size
            if num_tokens - num_cached < least_missing:
                return None
            table = self._kv.try_allocate(
                num_tokens,
                hashes,
                state=TableState.RESERVED,
                keep_free=self._scheduler.num_wanted_blocks(),
            )
            if table is None:
                return None
            self._owners.add_reservation(request.request_id, table)
            return self._reservation(request.request_id, table)

    def publish_reservation(self, reservation: Reservation, request: Request) -> None:
        """The reserved blocks, all full, hold KV of the request's first tokens: they enter the
        prefix cache, where this request or another finds them. InternalError if unknown."""
        num_blocks = len(reservation.cached_block_ids) + len(reservation.block_ids)
        hashes = self._hash_blocks(request)[:num_blocks]
        with self._lock:
            self._owners.publish_reservation(reservation.request_id, hashes)
            self._signal.wake()

    def _reservation(self, request_id: RequestId, table: BlockTable) -> Reservation:
        num_cached = table.num_cached_blocks
        return Reservation(
            request_id=request_id,
            num_cached_tokens=num_cached * self._kv.block_size,
            cached_block_ids=tuple(table.block_ids[:num_cached]),
            block_ids=tuple(table.block_ids[num_cached:]),
        )

    def cancel_reservation(
        self, reservation: Reservation, quarantine: bool, keeps_prefix: bool = False
    ) -> None:
        """Gives the blocks back or, with ``quarantine``, keeps those a peer may still write to out
        of the pool until ``release_quarantine``; with ``keeps_prefix`` the prefix hits as well,
        which are being read for one. Idempotent."""
        with self._lock:
            self._owners.cancel_reservation(reservation.request_id, quarantine, keeps_prefix)
            self._signal.wake()

    def release_quarantine(self, request_id: RequestId) -> None:
        """No write can land any more. Idempotent."""
        with self._lock:
            self._owners.release_quarantine(request_id)
            self._signal.wake()

    def abort(self, request_id: RequestId) -> bool:
        """Stops a queued or running sequence; no further SequenceUpdate comes. False when it is
        unknown or over. Reservations and holds have their own ways out."""
        with self._lock:
            sequence = self._owners.find(request_id)
            if sequence is None:
                return False
            self._owners.finish(sequence, FinishReason.ABORT)
            self._scheduler.answered(sequence)
            self._signal.wake()
            return True

    def release_hold(self, request_id: RequestId) -> None:
        """No transfer reads the blocks of this PREFILL_ONLY sequence any more. One that still
        computes is aborted. Idempotent."""
        with self._lock:
            sequence = self._owners.find(request_id)
            if sequence is not None and sequence.mode is SequenceMode.PREFILL_ONLY:
                self._owners.finish(sequence, FinishReason.ABORT)
            self._owners.release_hold(request_id)
            self._signal.wake()

    def expired_holds(self, now_ns: int, hold_ms: int) -> list[RequestId]:
        """Holds of ``hold_ms`` or older. They stay: whoever still reads the blocks has to be
        stopped before ``release_hold``."""
        with self._lock:
            return self._owners.holds_since(now_ns - hold_ms * NS_PER_MS)

    def block_table(self, request_id: RequestId) -> tuple[BlockId, ...]:
        """Blocks of a running or held sequence, in order; empty while it has none."""
        with self._lock:
            return self._owners.block_ids(request_id)

    # --- stepping ------------------------------------------------------------------------------

    def wait_for_work(self, timeout_s: float) -> bool:
        """Blocks until ``step`` may find something to do; False on timeout or once closed."""
        return self._signal.wait(timeout_s)

    def step(self) -> StepOutput | None:
        """Plans and launches what may be in flight, then lands the oldest step and enters its
        results; None = nothing to do until something changes.

        When the model fails, the step's sequences end with InternalError and the engine goes on.
        After MAX_FAILED_STEPS failures in a row this raises InternalError, and InstanceLostError
        when one of several ranks is gone: restart the process."""
        return self._steps.run()

    def expect(self, latency: LatencyModel) -> None:
        """How long steps take: from now on prompts beside decodes are computed in chunks that leave
        these the time that their TPOT targets ask for."""
        with self._lock:
            self._pacer.expect(latency)

    def watch_launches(self, on_launch: Callable[[StepLaunch], None]) -> None:
        """From now on ``on_launch`` hears, on the engine thread and without the lock, of every step
        that computes for PREFILL_ONLY sequences, before the wait for it. Before the first step."""
        self._steps.watch(on_launch)

    def close(self) -> None:
        """No step begins any more; wakes whoever waits. Steps in flight still land, one by each
        call of ``step``; whoever does not call it leaves the device to end them by itself. The KV
        store lives as long as this object."""
        self._signal.close()

    # --- what others see -----------------------------------------------------------------------

    def load(self) -> EngineLoad:
        with self._lock:
            waiting, running = self._scheduler.waiting, self._scheduler.running
            now_ns = self._clock.monotonic_ns()
            oldest_ns = min((s.added_ns for s in waiting), default=now_ns)
            chunks = [s.num_uncomputed_tokens for s in running if s.num_uncomputed_tokens > 1]
            return EngineLoad(
                waiting_seqs=len(waiting),
                waiting_tokens=sum(s.num_uncomputed_tokens for s in waiting) + sum(chunks),
                oldest_wait_ms=(now_ns - oldest_ns) / NS_PER_MS,
                running_seqs=len(running),
                running_context_tokens=sum(s.num_computed_tokens for s in running),
                prompt_seqs=sum(s.is_prompt for s in waiting) + sum(s.is_prompt for s in running),
                num_blocks=self._kv.num_blocks,
                free_blocks=self._kv.num_free_blocks,
                held_blocks=self._kv.num_blocks_in(TableState.HELD),
                cached_blocks=self._kv.num_free_cached_blocks,
                quarantined_blocks=self._kv.num_blocks_in(TableState.QUARANTINED),
                steps=self._steps.num_steps,
                step_ms=self._steps.step_ms,
                totals=self._steps.totals,
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
            self._owners.check_integrity()

    # --- inside --------------------------------------------------------------------------------

    def _root_hash(self, request: Request) -> BlockHash:
        return root_hash(self.spec.fingerprint, request.cache_salt)

    def _hash_blocks(self, request: Request) -> list[BlockHash]:
        if not self._kv.enable_prefix_cache:
            return []
        return block_hashes(request.token_ids, self._kv.block_size, self._root_hash(request))

    def _pace(self, sequence: Sequence) -> None:
        """TPOT counts from the request's first token, whichever instance sampled it."""
        request, now_ns = sequence.request, self._clock.now_ns()
        first_ns = now_ns if request.first_token_ns is None else request.first_token_ns
        began_ns = self._clock.monotonic_ns() - max(0, now_ns - first_ns)
        sequence.pace_from(began_ns, request.num_prompt_tokens + 1)

    def _new_sequence(self, request: Request, mode: SequenceMode) -> Sequence:
        check_request(request, self.max_model_len, self.spec.vocab_size)
        hashes = [] if mode is SequenceMode.PRIVATE else self._hash_blocks(request)
        return Sequence(request, mode, hashes, self._clock.monotonic_ns(), self.max_model_len)
