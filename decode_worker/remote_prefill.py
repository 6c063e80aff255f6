"""One attempt to have a prompt computed elsewhere and its KV put into this instance's blocks.

::

    handshake ─ open_receive ─┬─ stream:  first token ─ … ─ finished     (reader task)
                              └─ session: chunk, chunk, … complete

Both run side by side: the first token is handed on the moment it comes, and the blocks are admitted
the moment the last chunk is there, whether or not the stream has said its last word. What fails on
either side fails the session, so that there is one place to wait at.

Waiting in the prefill instance's queue and being computed there take as long as the request's own
deadline allows, while the stream lives. The session's shorter patience is for bytes only, so it
begins when the stream says that some are on their way.

The attempt owns the reservation until ``run`` returns; on any other end it is retired, and goes
back to the pool once no write can land.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from isthmus.common.errors import IsthmusError
from isthmus.common.ids import new_transfer_id
from isthmus.common.prefill import (
    PrefillAccepted,
    PrefillChunkSent,
    PrefillFailed,
    PrefillFinished,
    PrefillFirstToken,
    PrefillPrefixWanted,
    PrefillUpdate,
)
from isthmus.common.timeline import Timeline
from isthmus.common.transfer import TransferTicket
from isthmus.common.types import InstanceRef, Request
from isthmus.decode_worker.prefill_client import PrefillClient, lost
from isthmus.decode_worker.prefix_give import PrefixGive
from isthmus.decode_worker.reservations import Reservations
from isthmus.engine.types import Reservation
from isthmus.kvtransfer.receive_session import ReceiveSession
from isthmus.worker.role import WorkerRuntime


class RemotePrefill:
    """Used once. Lives on the event loop."""

    def __init__(
        self,
        runtime: WorkerRuntime,
        client: PrefillClient,
        reservations: Reservations,
        request: Request,
        source: InstanceRef,
        timeline: Timeline,
    ) -> None:
        self._runtime = runtime
        self._client = client
        self._reservations = reservations
        self._request = request
        self._source = source
        self._timeline = timeline
        self._session: ReceiveSession | None = None
        self._first: asyncio.Future[PrefillFirstToken] = asyncio.get_running_loop().create_future()

    @property
    def num_bytes(self) -> int:
        return self._session.num_bytes if self._session is not None else 0

    async def run(
        self, reservation: Reservation, on_first_token: Callable[[PrefillFirstToken], None]
    ) -> bool:
        """True when the KV is in the reserved blocks, which are the caller's again; False when the
        request ended with its first token and the blocks are given back.

        Raises IsthmusError: what went wrong, with ``on_first_token`` called or not. The blocks are
        taken care of then, as they are when this is cancelled.
        """
        is_admitted = False
        prefix = PrefixGive(self._runtime.transfers, reservation)
        try:
            await self._client.ensure_handshake(self._source)
            ticket = self._ticket(reservation)
            session = self._session = self._runtime.transfers.open_receive(ticket)
            # It ends with the stream, also after this attempt: its last word is of use then, too.
            self._client.spawn(self._read(session, prefix), f"prefill {self._request.request_id}")
            first = await self._first_token(session)
            self._timeline.merge(first.timeline)  # not before: the attempt counts from here on
            on_first_token(first)
            if first.finish_reason is None:
                await session.wait_complete()
                # A prompt that was computed waits for no prefix: what is not sent yet need not be.
                prefix.stop()
                is_admitted = True
            return is_admitted
        finally:
            if not is_admitted:
                self._retire(reservation, prefix)

    def _ticket(self, reservation: Reservation) -> TransferTicket:
        runtime = self._runtime
        return TransferTicket(
            transfer_id=new_transfer_id(),
            request_id=self._request.request_id,
            source=self._source,
            target=runtime.me,
            first_block=len(reservation.cached_block_ids),
            target_block_ids=reservation.block_ids,
            num_tokens=len(self._request.token_ids),
            layout_hash=runtime.engine.kv_layout.compat_hash,
            deadline_ns=self._request.deadline_ns,
            checksum=runtime.transfers.checksum_with(self._source),
        )

    async def _first_token(self, session: ReceiveSession) -> PrefillFirstToken:
        """Whichever comes first: the token, or the end of the session."""
        ended = asyncio.ensure_future(session.wait_complete())
        waiting: set[asyncio.Future[PrefillFirstToken] | asyncio.Future[None]]
        waiting = {ended, self._first}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not self._first.done():
                ended.result()  # raises, unless the KV overtook the token
            return await self._first
        finally:
            ended.cancel()
            if ended.done() and not ended.cancelled():
                ended.exception()  # seen: the session keeps it

    # --- the stream ------------------------------------------------------------------------------

    async def _read(self, session: ReceiveSession, prefix: PrefixGive) -> None:
        """Reads to the stream's end. A failure of it is a failure of the session."""
        is_ended = False
        try:
            updates = self._client.prefill(self._source, self._request, session.ticket)
            async with aclosing(updates):
                async for update in updates:
                    if isinstance(update, PrefillPrefixWanted):
                        if session.is_open:
                            prefix.give(update.ticket)
                        continue
                    is_ended = self._on_update(session, update) or is_ended
            if not is_ended:
                raise lost(self._source, "the prefill stream ended early")
        except IsthmusError as error:
            self._fail(session, error)

    def _on_update(self, session: ReceiveSession, update: PrefillUpdate) -> bool:
        """True for the last update of a stream."""
        match update:
            case PrefillPrefixWanted() | PrefillAccepted():
                return False
            case PrefillChunkSent():
                session.announced(update.num_tokens)
                return False
            case PrefillFirstToken():
                self._on_first_token(session, update)
                return False
            case PrefillFinished():
                self._on_finished(session, update)
                return True
            case PrefillFailed():
                session.peer_ended()
                if update.quiesced:
                    session.peer_quiesced()
                self._fail(session, update.error)
                return True

    def _on_first_token(self, session: ReceiveSession, update: PrefillFirstToken) -> None:
        if update.finish_reason is None:
            session.announced(session.ticket.num_tokens)
        if not self._first.done():
            self._first.set_result(update)

    def _on_finished(self, session: ReceiveSession, update: PrefillFinished) -> None:
        if session.error is None:  # else the request goes on without what was sent here
            self._timeline.merge(update.timeline)
        if session.is_open:
            session.expect(update.num_chunks)
        else:
            session.peer_quiesced()

    def _fail(self, session: ReceiveSession, error: IsthmusError) -> None:
        session.fail(error)
        if not self._first.done():
            self._first.set_exception(error)
            self._first.exception()  # seen, even when nobody waits any more

    # --- the end ---------------------------------------------------------------------------------

    def _retire(self, reservation: Reservation, prefix: PrefixGive) -> None:
        if self._session is None:
            self._reservations.give_back(reservation)
        else:
            self._reservations.retire(reservation, self._session, self._source, prefix)
