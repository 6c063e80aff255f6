"""One Prefill call: a prompt that is computed here and whose KV is pushed to a decode instance.

::

    COMPUTING ──▶ SENDING ──▶ FINISHED
        │            │
        └────────────┴──────▶ FAILED

COMPUTING owns the sequence, its blocks and the send session; SENDING the blocks (as a hold) and
the session. Whatever the end, the order is: stop computing, end the session, wait until none of
its writes is in flight (a peer whose writes do not end is dropped), release the hold. Only then is
the call settled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from enum import Enum

from isthmus.common.clock import Clock
from isthmus.common.errors import CancelledError, InternalError, IsthmusError
from isthmus.common.ids import BlockId
from isthmus.common.layer_progress import LayerProgress
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
from isthmus.kvtransfer.chunks import LayerPart
from isthmus.kvtransfer.send_session import SendSession
from isthmus.prefill_worker.chunk_feed import ChunkFeed, LayerSteps, Piece


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


@dataclass(frozen=True, slots=True)
class _AreFinal:
    """Whether the first ``stop`` layers of a piece are. A block may be begun by one step and filled
    by the next, which runs even when the first has failed: so all steps are asked. Called on the
    connector's thread."""

    steps: tuple[LayerProgress, ...]
    stop: int

    def __call__(self) -> bool:
        return all(step.num_final_layers >= self.stop for step in self.steps)


class PrefillCall:
    """Lives on the event loop. ``updates`` is what the stream says next; None ends it."""

    def __init__(
        self,
        request: Request,
        ticket: TransferTicket,
        session: SendSession,
        engine: EngineCore,
        clock: Clock,
        layers_per_push: int = 0,
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
        target = session.target_layout  # its blocks may be of another size than the engine's
        layers = LayerSteps(target.num_layers, target.layer_bytes, layers_per_push)
        self._feed = ChunkFeed(
            len(request.token_ids), target.block_size, ticket.first_block, layers
        )
        self._under_way: deque[LayerProgress] = deque()  # of steps that have not landed
        self._timeline = Timeline()
        self._timeline.mark(Event.PREFILL_QUEUED, clock.now_ns())
        self._has_started = False
        self._num_chunks = 0

    @property
    def is_open(self) -> bool:
        return not CALL_TRANSITIONS.is_terminal(self.state)

    # --- from the engine -------------------------------------------------------------------------

    def on_launch(self, num_tokens: int, progress: LayerProgress) -> None:
        """A step has begun that computes the prompt up to ``num_tokens``: layers that it finishes
        leave while it runs."""
        if self.state is not CallState.COMPUTING:
            return
        self._under_way.append(progress)
        self._push(self._feed.launch(num_tokens), tuple(self._under_way))

    def on_update(self, update: SequenceUpdate, ended_ns: int) -> None:
        """What a step did, which ended at ``ended_ns`` (unix time): says so, and sends what is
        final now."""
        if self.state is not CallState.COMPUTING:
            return
        if self._under_way:
            self._under_way.popleft()
        if update.error is not None or update.finish_reason is FinishReason.ERROR:
            self.fail(update.error or InternalError("the engine gave up", stage="prefill"))
            return
        if not self._has_started:
            self._has_started = True
            self._timeline.mark(Event.SCHEDULED, update.scheduled_ns)
            self.updates.put_nowait(PrefillAccepted(update.num_cached_tokens))
        if update.token_ids:
            self._on_first_token(update, ended_ns)
        if self.is_open:
            self._on_landed(update.num_computed_tokens)

    def _on_first_token(self, update: SequenceUpdate, ended_ns: int) -> None:
        self._timeline.mark(Event.PREFILLED, ended_ns)
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

    def _on_landed(self, num_computed_tokens: int) -> None:
        pieces = self._feed.land(num_computed_tokens)
        self._push(pieces)
        if pieces and self.is_open:
            self.updates.put_nowait(PrefillChunkSent(self._num_chunks, num_computed_tokens))
            self._num_chunks += 1

    def _push(self, pieces: list[Piece], steps: tuple[LayerProgress, ...] = ()) -> None:
        """``steps`` are those that make the pieces final; none where they are."""
        if not pieces:
            return
        table = self._engine.block_table(self.request.request_id)  # copied once for all pieces
        try:
            for piece in pieces:
                self._push_piece(piece, table, steps)
        except IsthmusError as error:
            self.fail(error)

    def _push_piece(
        self, piece: Piece, table: tuple[BlockId, ...], steps: tuple[LayerProgress, ...]
    ) -> None:
        first, stop = (index - self.ticket.first_block for index in (piece.first, piece.stop))
        own = self.session.source_blocks(first, stop)
        part = LayerPart(piece.layers, _AreFinal(steps, piece.layers.stop) if steps else None)
        self.session.push(first, table[own.start : own.stop], piece.is_last, stop - first, part)

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
        """Ends the call, and its session at once: nothing that waits is posted any more. Later
        reasons do not count."""
        if self.is_open:
            self.error = error
            self._end(CallState.FAILED)
            self.session.cancel()

    def cancel(self, reason: str) -> None:
        self.fail(CancelledError(reason, stage="prefill"))

    def _end(self, state: CallState) -> None:
        self.state = CALL_TRANSITIONS.check(self.state, state)
        if not self.is_open:
            self.updates.put_nowait(None)

    def finished(self) -> PrefillFinished:
        return PrefillFinished(self.session.num_chunks, self.session.num_bytes, self._timeline)

    async def settle(self) -> bool:
        """Gives back everything that this call holds, once its session reads no block any more;
        nothing when it is cancelled before.

        True is a proof that nothing of it can land at the peer."""
        self._engine.abort(self.request.request_id)
        self.session.cancel()
        is_quiet = await self.session.quiesce()
        await self.session.at_rest()
        self._engine.release_hold(self.request.request_id)
        return is_quiet
