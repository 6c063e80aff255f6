"""The decode side of one transfer: which target blocks are written, and when they are safe.

::

    RESERVED ──▶ RECEIVING ──▶ COMPLETE                 every block × layer is there on every route,
        │            │                                  exactly once, as it was sent (checksums)
        └────────────┴────────▶ FAILED │ CANCELLED │ EXPIRED

Two questions are kept apart. *Did it arrive?* is the state. *Can a write still land?* is
quiescence: the target blocks belong to the transfer until there is a proof that none can, on any
rank, whatever the state. A session that ends badly stays in its manager's table until that proof is
there.

A session waits as long as its ticket allows for a prompt to be computed, but only ``stall_ns`` for
bytes: while blocks are *owed* (the sender has begun to write them and they have not arrived) a
timer runs, which starts again with every chunk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from isthmus.common.clock import NS_PER_MS
from isthmus.common.errors import (
    CancelledError,
    ChecksumError,
    IsthmusError,
    TransferError,
    TransferTimeoutError,
)
from isthmus.common.state_machine import Transitions
from isthmus.common.transfer import TransferTicket
from isthmus.kvtransfer.arrivals import Arrivals
from isthmus.kvtransfer.checksums import ChunkContent
from isthmus.kvtransfer.notification import Flags, Notification
from isthmus.kvtransfer.routes import Ranks, Route

# Rest is counted in time between sweeps, and no gap counts for more than this: while this process
# was stopped nothing drained, so such time is no rest.
_MAX_REST_STEP_NS = 100_000_000


class ReceiveState(Enum):
    RESERVED = "reserved"  # the ticket may be out; nothing has arrived
    RECEIVING = "receiving"
    COMPLETE = "complete"  # the caller owns the blocks again, with their KV
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


_BAD_ENDS = frozenset({ReceiveState.FAILED, ReceiveState.CANCELLED, ReceiveState.EXPIRED})
RECEIVE_TRANSITIONS: Transitions[ReceiveState] = Transitions(
    {
        ReceiveState.RESERVED: frozenset({ReceiveState.RECEIVING}) | _BAD_ENDS,
        ReceiveState.RECEIVING: frozenset({ReceiveState.COMPLETE}) | _BAD_ENDS,
        ReceiveState.COMPLETE: frozenset(),
        ReceiveState.FAILED: frozenset(),
        ReceiveState.CANCELLED: frozenset(),
        ReceiveState.EXPIRED: frozenset(),
    }
)


class Proof(Enum):
    """Why no write of a transfer can land any more."""

    ALL_ARRIVED = "all_arrived"
    SENDER_CONFIRMED = "sender_confirmed"  # each of its writes was done or never posted
    QUARANTINE_PASSED = "quarantine_passed"  # rest after the sender's last possible write


class Ignored(Enum):
    """Why a notification changed nothing."""

    MALFORMED = "malformed"
    UNKNOWN = "unknown"  # no such transfer, or one that is long over
    FOREIGN = "foreign"  # not from the instance and epoch that the ticket names
    DUPLICATE = "duplicate"
    LATE = "late"  # after the session's end


class ReceiveHost(Protocol):
    """The manager, as a session sees it."""

    def receive_ended(self, session: ReceiveSession) -> None: ...

    def receive_quiescent(self, session: ReceiveSession) -> None: ...

    def receive_needs_poll(self) -> None: ...

    def receive_owed(self) -> None:
        """``expires_ns`` of a session has come nearer."""
        ...

    def monotonic_ns(self) -> int: ...


class _Rest:
    """How long one rank's connector has to be driven yet until nothing can land there."""

    def __init__(self, needed_ns: int) -> None:
        self._needed_ns = needed_ns
        self._last_swept_ns: int | None = None

    @property
    def is_over(self) -> bool:
        return self._last_swept_ns is not None and self._needed_ns <= 0

    def swept(self, started_ns: int) -> None:
        if self._last_swept_ns is not None:
            step_ns = started_ns - self._last_swept_ns
            self._needed_ns -= min(step_ns, _MAX_REST_STEP_NS)
        self._last_swept_ns = started_ns


class ReceiveSession:
    """Made by TransferManager.open_receive; lives on its event loop. Times are monotonic."""

    def __init__(
        self,
        ticket: TransferTicket,
        routes: Sequence[Route],
        deadline_ns: int,
        stall_ns: int,
        quarantine_ns: int,
        host: ReceiveHost,
    ) -> None:
        self.ticket = ticket
        self.num_bytes = 0
        self.proof: Proof | None = None
        self._state = ReceiveState.RESERVED
        self._error: IsthmusError | None = None
        self._host = host
        self._arrivals = Arrivals(ticket, routes)
        self._deadline_ns = deadline_ns
        self._stall_ns = stall_ns
        self._num_owed = 0  # leading target blocks that the sender has begun to write
        self._stalls_at_ns: int | None = None  # only while some of those are missing
        self._rest_from_ns = deadline_ns
        self._rests = {route.target.tp_rank: _Rest(quarantine_ns) for route in routes}
        self._ended = asyncio.Event()
        self._quiescent = asyncio.Event()

    @property
    def state(self) -> ReceiveState:
        return self._state

    @property
    def is_open(self) -> bool:
        return not RECEIVE_TRANSITIONS.is_terminal(self._state)

    @property
    def is_quiescent(self) -> bool:
        """True when no write can still land in the target blocks. It stays true."""
        return self.proof is not None

    @property
    def error(self) -> IsthmusError | None:
        return self._error

    @property
    def expires_ns(self) -> int:
        """The ticket's deadline, or the end of patience with blocks that are owed."""
        if self._stalls_at_ns is None:
            return self._deadline_ns
        return min(self._stalls_at_ns, self._deadline_ns)

    # --- for the worker ------------------------------------------------------------------------

    def announced(self, num_tokens: int) -> None:
        """The sender has begun to write the KV of the prompt's first ``num_tokens`` tokens."""
        is_whole = num_tokens >= self.ticket.num_tokens
        num_full = num_tokens // self._arrivals.layout.block_size - self.ticket.first_block
        self._owe(self.ticket.num_blocks if is_whole else num_full)

    def expect(self, num_chunks: int) -> None:
        """The sender's own count, as told over RPC; a contradiction fails the session."""
        if self.is_open:
            self._learn_num_chunks(num_chunks)
            self._complete_if_all_arrived()
        self._host.receive_needs_poll()

    async def wait_complete(self) -> None:
        """Returns when every block is there, else raises what ended the session: TransferError,
        TransferTimeoutError, InstanceLostError, StaleEpochError, CancelledError, or the error
        given to ``fail``."""
        await self._ended.wait()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        self._end(ReceiveState.CANCELLED, CancelledError("transfer cancelled", stage="transfer"))

    def fail(self, error: IsthmusError) -> None:
        self._end(ReceiveState.FAILED, error)

    def peer_ended(self) -> None:
        """The sender said that it posts nothing any more, but not that all it posted has ended:
        rest begins with this session's end instead of at the deadline."""
        self._rest_from_ns = 0

    def peer_quiesced(self) -> None:
        """The sender said over RPC that none of its writes can still land."""
        self._prove(Proof.SENDER_CONFIRMED)

    async def quiesced(self, timeout_s: float) -> bool:
        """Waits for ``is_quiescent``; False when it did not come in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._quiescent.wait()
        except TimeoutError:
            return False
        return True

    # --- for the manager -----------------------------------------------------------------------

    def content_of(self, note: Notification, ranks: Ranks) -> ChunkContent | None:
        """What has to be compared before ``accept``; None when nothing has to."""
        if not self.is_open or Flags.ABORTED in note.flags:
            return None
        return self._arrivals.content_of(note, ranks)

    def accept(self, note: Notification, ranks: Ranks, num_corrupt: int = 0) -> Ignored | None:
        """A notification from the right peer: from its rank to ours (``ranks``); ``num_corrupt`` of
        its blocks are not what was sent. None when it counted."""
        if Flags.ABORTED in note.flags:
            return self._accept_abort(note)
        was_open = self.is_open
        if self._arrivals.has_chunk(note, ranks):
            return Ignored.DUPLICATE
        violation = self._arrivals.violation(note, ranks)
        if violation is not None:
            self.fail(TransferError(f"chunk {note.chunk}: {violation}", stage="transfer"))
            return None if was_open else Ignored.LATE
        if num_corrupt:
            self.fail(self._corruption(note, num_corrupt))
        elif self._state is ReceiveState.RESERVED:
            self._state = RECEIVE_TRANSITIONS.check(self._state, ReceiveState.RECEIVING)
        self.num_bytes += self._arrivals.cover(note, ranks)
        self._watch()
        if Flags.LAST in note.flags:
            self._learn_num_chunks(note.chunk + 1)
        self._complete_if_all_arrived()
        return None if was_open else Ignored.LATE

    def expire(self) -> None:
        self._end(
            ReceiveState.EXPIRED,
            TransferTimeoutError(
                f"{self.ticket.num_blocks - self._arrivals.num_missing} of "
                f"{self.ticket.num_blocks} blocks had arrived {self._when_expired()}",
                stage="transfer",
                instance_id=self.ticket.source.instance_id,
            ),
        )

    def peer_gone(self, error: IsthmusError, is_gone: bool) -> None:
        """The peer was forgotten. ``is_gone``: its process has ended, so only what is already on
        its way can land and rest begins now instead of at the deadline."""
        self.fail(error)
        if is_gone:
            self.peer_ended()

    def swept(self, rank: int, started_ns: int) -> None:
        """A rank's connector was driven once more; ``started_ns`` is when that began."""
        if self.is_open or self.is_quiescent or started_ns < self._rest_from_ns:
            return
        if rank in self._rests:
            self._rests[rank].swept(started_ns)
        if all(rest.is_over for rest in self._rests.values()):
            self._prove(Proof.QUARANTINE_PASSED)

    # --- inside --------------------------------------------------------------------------------

    def _accept_abort(self, note: Notification) -> Ignored | None:
        was_open = self.is_open
        self.fail(
            TransferError(
                "the sender gave up",
                stage="transfer",
                instance_id=self.ticket.source.instance_id,
            )
        )
        self.peer_ended()
        if Flags.QUIET in note.flags:
            self._prove(Proof.SENDER_CONFIRMED)
        return None if was_open else Ignored.LATE

    def _corruption(self, note: Notification, num_corrupt: int) -> ChecksumError:
        return ChecksumError(
            f"chunk {note.chunk}: {num_corrupt} of {note.num_blocks} blocks are not what was sent",
            stage="transfer",
            instance_id=self.ticket.source.instance_id,
        )

    def _learn_num_chunks(self, num_chunks: int) -> None:
        if contradiction := self._arrivals.contradiction(num_chunks):
            self.fail(TransferError(contradiction, stage="transfer"))
            return
        self._arrivals.num_chunks = num_chunks
        self._owe(self.ticket.num_blocks)

    def _owe(self, num_blocks: int) -> None:
        """An announcement is no progress: it does not prolong a patience that has begun."""
        self._num_owed = max(self._num_owed, num_blocks)
        if self._stalls_at_ns is None:
            self._watch()

    def _watch(self) -> None:
        """Patience begins (again) while something is owed, and ends when nothing is."""
        was_watched = self._stalls_at_ns is not None
        is_owed = self.is_open and self._arrivals.num_leading < self._num_owed
        self._stalls_at_ns = self._host.monotonic_ns() + self._stall_ns if is_owed else None
        if is_owed and not was_watched:
            self._host.receive_owed()

    def _when_expired(self) -> str:
        if self.expires_ns == self._deadline_ns:
            return "at the deadline"
        return f"when none had come for {self._stall_ns // NS_PER_MS} ms"

    def _complete_if_all_arrived(self) -> None:
        if not self._arrivals.has_all_chunks:
            return
        if self._arrivals.is_whole:
            if self.is_open:
                self._end(ReceiveState.COMPLETE, None)
            self._prove(Proof.ALL_ARRIVED)
        else:
            missing = self._arrivals.num_missing
            self.fail(
                TransferError(f"{missing} blocks are in none of the chunks", stage="transfer")
            )

    def _end(self, state: ReceiveState, error: IsthmusError | None) -> None:
        if not self.is_open:
            return
        self._state = RECEIVE_TRANSITIONS.check(self._state, state)
        self._error = error
        self._ended.set()
        self._host.receive_ended(self)
        if self.is_quiescent:  # the sender confirmed before this end
            self._host.receive_quiescent(self)

    def _prove(self, proof: Proof) -> None:
        if self.is_quiescent:
            return
        self.proof = proof
        self._quiescent.set()
        if not self.is_open:
            self._host.receive_quiescent(self)
