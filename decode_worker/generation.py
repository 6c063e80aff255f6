"""One request on its decode instance, from submission to its last token.

::

    QUEUED ──▶ PREFILLING ──▶ RECEIVING ──▶ RUNNING ──▶ FINISHED
      │            │              │            ▲
      │         ◀──┘ asks another │            │
      │            └──────────────┴─ falls back┤
      └── no prefill instance ────────────────┘
    any ──▶ FAILED (told to the client) │ ABORTED (nobody listens any more)

    state        owns                                            first token
    QUEUED       a place in the line for blocks                  no
    PREFILLING   the attempt (reservation, session, stream)      no
    RECEIVING    the attempt                                     delivered
    RUNNING      a sequence of the engine                        either

Whatever a state owns is given back on every way out of it, by the code that runs the state. The
deadline is a timer around all of them.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from enum import Enum

from isthmus.common.clock import NS_PER_S
from isthmus.common.errors import (
    DeadlineError,
    InternalError,
    IsthmusError,
    OutOfBlocksError,
    PrefillFailedError,
)
from isthmus.common.logging import get_logger
from isthmus.common.prefill import PrefillFirstToken
from isthmus.common.state_machine import Transitions
from isthmus.common.timeline import Event
from isthmus.common.types import (
    FinishReason,
    InstanceRef,
    LocalPrefillReason,
    Remedy,
    Request,
    RouteDecision,
)
from isthmus.decode_worker.answer import Answer
from isthmus.decode_worker.canary import Served
from isthmus.decode_worker.events import Outbox, TokenDelta
from isthmus.decode_worker.fallback import can_fall_back, has_time, remedy_for, resumed
from isthmus.decode_worker.prefill_client import PrefillClient
from isthmus.decode_worker.remote_prefill import RemotePrefill
from isthmus.decode_worker.reservations import Reservations
from isthmus.engine.admission import check_request
from isthmus.engine.types import Reservation, SequenceUpdate
from isthmus.worker.role import WorkerRuntime

log = get_logger("generation")


class GenerationState(Enum):
    QUEUED = "queued"
    PREFILLING = "prefilling"
    RECEIVING = "receiving"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"


_ENDS = frozenset({GenerationState.FINISHED, GenerationState.FAILED, GenerationState.ABORTED})
GENERATION_TRANSITIONS: Transitions[GenerationState] = Transitions(
    {
        GenerationState.QUEUED: frozenset({GenerationState.PREFILLING, GenerationState.RUNNING})
        | _ENDS - {GenerationState.FINISHED},
        # QUEUED: another prefill instance is asked, for which there must be blocks again.
        GenerationState.PREFILLING: frozenset(
            {GenerationState.QUEUED, GenerationState.RECEIVING, GenerationState.RUNNING}
        )
        | _ENDS - {GenerationState.FINISHED},
        # FINISHED: the first token was the last.
        GenerationState.RECEIVING: frozenset({GenerationState.RUNNING}) | _ENDS,
        GenerationState.RUNNING: _ENDS,
        GenerationState.FINISHED: frozenset(),
        GenerationState.FAILED: frozenset(),
        GenerationState.ABORTED: frozenset(),
    }
)


class Generation:
    """Lives on the event loop; ``run`` is its life."""

    def __init__(
        self,
        runtime: WorkerRuntime,
        client: PrefillClient,
        reservations: Reservations,
        request: Request,
        decision: RouteDecision,
        outbox: Outbox,
    ) -> None:
        self.request = request
        self.state = GenerationState.QUEUED
        self._runtime = runtime
        self._client = client
        self._reservations = reservations
        self._decision = decision
        self._answer = Answer(request, outbox, runtime.clock)
        self._timeline = self._answer.timeline
        self._first_reason: FinishReason | None = None
        self._source: InstanceRef | None = None  # whose KV is in the blocks
        self._has_ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Ends with the request. Cancelling it aborts the request in whatever state it is."""
        try:
            async with asyncio.timeout(self._seconds_left()):
                await self._serve()
        except TimeoutError:
            self.fail(self._deadline_error())
        except IsthmusError as error:
            self.fail(error)
        except asyncio.CancelledError:
            self._runtime.metrics.aborted()
            if not GENERATION_TRANSITIONS.is_terminal(self.state):
                log.info("aborted", request_id=self.request.request_id, stage=self.state.value)
                self._move(GenerationState.ABORTED)
            raise

    async def _serve(self) -> None:
        engine = self._runtime.engine
        check_request(self.request, engine.max_model_len, engine.spec.vocab_size)
        source = self._decision.prefill
        if source is None:
            reason = self._decision.local_reason
            if reason is LocalPrefillReason.NONE:
                reason = LocalPrefillReason.MIXED_ROLE
            await self._run_here(self.request, reason)
            return
        try:
            reservation = await self._prefill_at(source)
        except IsthmusError as error:
            remedy = self._remedy(source, error, self._decision.alternate)
            if remedy is Remedy.REPREFILL:
                await self._prefill_again()
            else:
                await self._recompute()
            return
        await self._go_on(reservation)

    @property
    def served_from_elsewhere(self) -> Served | None:
        """What the client was given on the strength of another instance's KV; None when the request
        has not finished, or not so."""
        if self.state is not GenerationState.FINISHED or self._source is None:
            return None
        return Served(self.request, self._answer.delivered, self._source)

    # --- prompt computed elsewhere ---------------------------------------------------------------

    async def _prefill_at(
        self, source: InstanceRef, patience_s: float | None = None
    ) -> Reservation | None:
        """The reservation with all KV in it, or None when the first token was the last.

        ``patience_s``: longest wait for blocks, where the request's deadline is too long a one."""
        try:
            async with asyncio.timeout(patience_s):
                reservation = await self._reservations.acquire(self.request)
        except TimeoutError:
            message = "no KV blocks in time for another attempt"
            raise OutOfBlocksError(message, stage="reserve") from None
        self._timeline.mark(Event.ADMITTED, self._now())
        self._move(GenerationState.PREFILLING)
        attempt = RemotePrefill(
            self._runtime, self._client, self._reservations, self.request, source, self._timeline
        )
        try:
            has_kv = await attempt.run(reservation, self._on_first_token)
        finally:
            self._answer.transferred_bytes += attempt.num_bytes
        if not has_kv:
            return None
        self._source = source
        return reservation

    def _on_first_token(self, first: PrefillFirstToken) -> None:
        self._move(GenerationState.RECEIVING)
        if self.request.first_token_ns is None:
            self.request = replace(self.request, first_token_ns=self._now())
        self._first_reason = first.finish_reason
        self._answer.start(first.num_cached_tokens)
        self._answer.deliver(
            TokenDelta(
                self.request.request_id,
                (first.token_id,),
                (first.logprob,) if first.logprob is not None else (),
                first.prompt_logprobs,
            )
        )

    def _finish_with_first_token(self) -> None:
        reason = self._first_reason or FinishReason.LENGTH
        token_id = self._answer.last_token_id
        is_stop = reason is FinishReason.STOP and token_id in self.request.sampling.stop_token_ids
        self._finish(reason, token_id if is_stop else None)

    async def _decode(self, reservation: Reservation) -> None:
        self._timeline.mark(Event.KV_READY, self._now())
        exposed_s = self._timeline.seconds(Event.PREFILLED, Event.KV_READY)
        if exposed_s is not None:
            self._runtime.metrics.kv_ready(exposed_s)
        try:
            self._runtime.engine.admit_with_kv(
                reservation, self.request, self._answer.last_token_id
            )
        except BaseException:
            self._reservations.give_back(reservation)
            raise
        self._runtime.cache_changed()
        await self._run_in_engine()

    async def _go_on(self, reservation: Reservation | None) -> None:
        if reservation is None:
            self._finish_with_first_token()
        else:
            await self._decode(reservation)

    def _remedy(
        self, source: InstanceRef, error: IsthmusError, alternate: InstanceRef | None
    ) -> Remedy:
        """What to do after ``source`` failed. Raises ``error`` when nothing is to be done."""
        if self._now() >= self.request.deadline_ns:
            raise self._deadline_error() from error
        if self.state is GenerationState.QUEUED or not can_fall_back(error):
            raise error  # no blocks, so that nobody was asked yet; or the request's own fault
        can_reprefill = (
            alternate is not None
            and self.state is GenerationState.PREFILLING
            and has_time(self._now(), self.request.deadline_ns, self._decision.predicted_ttft_ms)
        )
        policy = self.request.slo.on_failure
        if policy is None:
            policy = Remedy(self._runtime.config.transfer.on_failure)
        remedy = remedy_for(policy, can_reprefill)
        self._answer.failed_prefills.append(source.instance_id)
        self._runtime.metrics.prefill_failed(policy.value, remedy.value, error.code)
        log.warning(
            "prefill failed",
            request_id=self.request.request_id,
            stage=error.stage or self.state.value,
            instance=source.instance_id,
            reason=error.message,
            slo_class=self.request.slo.class_name,
            remedy=remedy.value,
        )
        if remedy is not Remedy.FAIL:
            return remedy
        raise PrefillFailedError(  # final: whoever asked must not try elsewhere either
            f"{error.message}; on_failure is fail",
            stage=error.stage or self.state.value,
            instance_id=source.instance_id,
        ) from error

    async def _prefill_again(self) -> None:
        """Asks the decision's other prefill instance; computes the prompt here when that fails."""
        alternate = self._decision.alternate
        assert alternate is not None, "there was somebody to ask"
        self._move(GenerationState.QUEUED)
        self._timeline.forget(Event.ADMITTED)
        try:
            spare_s = self._seconds_left() - 2 * self._decision.predicted_ttft_ms / 1000
            reservation = await self._prefill_at(alternate, max(0.0, spare_s))
        except IsthmusError as error:
            if self.state is GenerationState.QUEUED:  # it was not asked: there were no blocks
                log.warning(
                    "no second attempt", request_id=self.request.request_id, reason=error.message
                )
            else:
                self._remedy(alternate, error, None)
            await self._recompute()
            return
        await self._go_on(reservation)

    async def _recompute(self) -> None:
        """Computes the prompt here, or what is left of it after the first token."""
        if not self._answer.delivered:
            self._timeline.forget(Event.ADMITTED)
        request = resumed(self.request, self._answer.delivered)
        await self._run_here(request, LocalPrefillReason.PREFILL_FAILED)

    # --- in this engine --------------------------------------------------------------------------

    async def _run_here(self, request: Request, reason: LocalPrefillReason) -> None:
        self._answer.local_reason = reason
        self._timeline.mark(Event.ADMITTED, self._now())
        self._timeline.mark(Event.PREFILL_QUEUED, self._now())
        self._runtime.engine.add(request)
        self._runtime.load.changed()
        await self._run_in_engine()

    async def _run_in_engine(self) -> None:
        self._move(GenerationState.RUNNING)
        try:
            await self._has_ended
        finally:
            self._runtime.engine.abort(self.request.request_id)  # unknown once it has finished
            self._runtime.load.changed()

    def on_update(self, update: SequenceUpdate) -> None:
        """What a step did to this request's sequence."""
        if self.state is not GenerationState.RUNNING or self._has_ended.done():
            return
        if update.error is not None or update.finish_reason is FinishReason.ERROR:
            error = update.error or InternalError("the engine gave up", stage="engine")
            self._has_ended.set_exception(error)
            return
        self._timeline.mark(Event.SCHEDULED, update.scheduled_ns)
        self._answer.start(update.num_cached_tokens)
        if update.token_ids:
            self._timeline.mark(Event.PREFILLED, self._now())
            self._answer.deliver(
                TokenDelta(
                    self.request.request_id,
                    update.token_ids,
                    update.logprobs,
                    update.prompt_logprobs,
                )
            )
        if update.finish_reason is not None:
            self._finish(update.finish_reason, update.stop_token_id)
            self._has_ended.set_result(None)

    # --- its end ---------------------------------------------------------------------------------

    def _finish(self, reason: FinishReason, stop_token_id: int | None) -> None:
        self._move(GenerationState.FINISHED)
        self._answer.finish(reason, stop_token_id)

    def fail(self, error: IsthmusError) -> None:
        """Tells the client, unless it was told the end already."""
        if GENERATION_TRANSITIONS.is_terminal(self.state):
            return
        log.warning(
            "request failed",
            request_id=self.request.request_id,
            stage=error.stage or self.state.value,
            code=error.code,
            reason=error.message,
        )
        self._move(GenerationState.FAILED)
        self._answer.fail(error)

    def _deadline_error(self) -> DeadlineError:
        return DeadlineError(
            f"the deadline passed while the request was {self.state.value}",
            stage=self.state.value,
        )

    def _move(self, state: GenerationState) -> None:
        self.state = GENERATION_TRANSITIONS.check(self.state, state)

    def _now(self) -> int:
        return self._runtime.clock.now_ns()

    def _seconds_left(self) -> float:
        return max(0.0, (self.request.deadline_ns - self._now()) / NS_PER_S)
