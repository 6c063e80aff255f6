"""One Prefill call: a prompt that is computed here and whose KV is pushed to a decode instance.

::

    COMPUTING ──▶ SENDING ──▶ FINISHED
        │            │
        └────────────┴──────▶ FAILED

COMPUTING owns the sequence, its blocks and the send session; SENDING the blocks (as a hold) and
the session. Whatever the end, the order is: stop computing, end the session, wait until none of
its writes is in flight, release the hold. Only then is the call settled.
"""

from __future__ import annotations

import asyncio
from enum import Enum

from isthmus.common.clock import Clock
from isthmus.common.errors import CancelledError, InternalError, IsthmusError
from isthmus.common.prefill import (
    PrefillAccepted,
    PrefillChunkSent,
    PrefillFinished,
    PrefillFirstToken,
    PrefillUpdate,
)
from isthmus.common.state_machine import Transitions
from isthmus.common.timeline import Event, Timeline
from isthmus.common.transfer import TransferTicket
from isthmus.common.types import FinishReason, Request
from isthmus.engine.core import EngineCore
from isthmus.engine.types import SequenceUpdate
from isthmus.kvtransfer.send_session import SendSession
from isthmus.prefill_worker.chunk_feed import ChunkFeed


class CallState(Enum):
    COMPUTING = "computing"
    SENDING = "sending"
    FINISHED = "finished"
    FAILED = "failed"


CALL_TRANSITIONS: Transitions[CallState] = Transitions(
    {
        CallState.COMPUTING: frozenset(
            {CallState.SENDING, CallState.FINISHED, CallState.FAILED}  # FINISHED: with one token
        ),
        CallState.SENDING: frozenset({CallState.FINISHED, CallState.FAILED}),
        CallState.FINISHED: frozenset(),
        CallState.FAILED: frozenset(),
    }
)


class PrefillCall:
    """Lives on the event loop. ``updates`` is what the stream says next; None ends it."""

    def __init__(
        self,
        request: Request,
        ticket: TransferTicket,
        session: SendSession,
        engine: EngineCore,
        clock: Clock,
    ) -> None:
        self.request = request
        self.ticket = ticket
        self.session = session
        self.state = CallState.COMPUTING
        self.error: IsthmusError | None = None
        self.settling: asyncio.Task[bool] | None = None
        self.updates: asyncio.Queue[PrefillUpdate | None] = asyncio.Queue()
        self._engine = engine
        self._clock = clock
        # In blocks of the target, which may be of another size than the engine's.
        self._feed = ChunkFeed(
            len(request.token_ids), session.target_block_size, ticket.first_block
        )
        self._timeline = Timeline()
        self._timeline.mark(Event.PREFILL_QUEUED, clock.now_ns())
        self._has_started = False
        self._num_chunks = 0

    @property
    def is_open(self) -> bool:
        return not CALL_TRANSITIONS.is_terminal(self.state)

    # --- from the engine -------------------------------------------------------------------------

    def on_update(self, update: SequenceUpdate) -> None:
        """What a step did: says so, and sends the blocks that are final now."""
        if self.state is not CallState.COMPUTING:
            return
        if update.error is not None or update.finish_reason is FinishReason.ERROR:
            self.fail(update.error or InternalError("the engine gave up", stage="prefill"))
            return
        if not self._has_started:
            self._has_started = True
            self._timeline.mark(Event.SCHEDULED, update.scheduled_ns)
            self.updates.put_nowait(PrefillAccepted(update.num_cached_tokens))
        if update.token_ids:
            self._on_first_token(update)
        if self.is_open:
            self._push(update.num_computed_tokens)

    def _on_first_token(self, update: SequenceUpdate) -> None:
        self._timeline.mark(Event.PREFILLED, self._clock.now_ns())
        self.updates.put_nowait(
            PrefillFirstToken(
                token_id=update.token_ids[0],
                num_cached_tokens=update.num_cached_tokens,
                logprob=update.logprobs[0] if update.logprobs else None,
                prompt_logprobs=update.prompt_logprobs,
                finish_reason=update.finish_reason,
                timeline=self._timeline,
            )
        )
        # A request that is over needs no KV on the other side: the rest is not sent.
        self._end(CallState.FINISHED if update.finish_reason else CallState.SENDING)

    def _push(self, num_computed_tokens: int) -> None:
        blocks = self._feed.take(num_computed_tokens)
        if blocks is None:
            return
        table = self._engine.block_table(self.request.request_id)
        first, stop = (index - self.ticket.first_block for index in (blocks.first, blocks.stop))
        own = self.session.source_blocks(first, stop)
        try:
            self.session.push(first, table[own.start : own.stop], blocks.is_last, stop - first)
        except IsthmusError as error:
            self.fail(error)
            return
        self.updates.put_nowait(PrefillChunkSent(self._num_chunks, num_computed_tokens))
        self._num_chunks += 1

    # --- ends ------------------------------------------------------------------------------------

    def on_drained(self, drained: asyncio.Task[None]) -> None:
        """The session's end: every write confirmed, or the reason why not."""
        if drained.cancelled():
            return
        error = drained.exception()
        if not self.is_open:
            return
        if error is None:
            self._timeline.mark(Event.KV_SENT, self._clock.now_ns())
            self._end(CallState.FINISHED)
        elif isinstance(error, IsthmusError):
            self.fail(error)
        else:
            self.fail(InternalError(f"transfer: {error}", stage="transfer"))

    def fail(self, error: IsthmusError) -> None:
        """Ends the call; later reasons do not count."""
        if self.is_open:
            self.error = error
            self._end(CallState.FAILED)

    def cancel(self, reason: str) -> None:
        self.fail(CancelledError(reason, stage="prefill"))

    def _end(self, state: CallState) -> None:
        self.state = CALL_TRANSITIONS.check(self.state, state)
        if not self.is_open:
            self.updates.put_nowait(None)

    def finished(self) -> PrefillFinished:
        return PrefillFinished(self.session.num_chunks, self.session.num_bytes, self._timeline)

    async def settle(self) -> bool:
        """Gives back everything that this call holds, once its session reads no block any more.

        True is a proof that nothing of it can land at the peer."""
        self._engine.abort(self.request.request_id)
        self.session.cancel()
        try:
            return await self.session.quiesce()
        finally:
            self._engine.release_hold(self.request.request_id)
