"""Blocks of this instance on their way in: waiting for them, and giving them back safely.

A request that finds too few free blocks waits in line, oldest first, so that a large one is not
overtaken for ever. Blocks whose transfer ended badly rest in quarantine until there is a proof that
no write can land in them any more: the sender's word, or a rest after the last moment at which it
may have posted one (it says that it has ended, it is dead, its ticket is over).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass

from isthmus.common.errors import IsthmusError, OutOfBlocksError
from isthmus.common.ids import RequestId
from isthmus.common.logging import get_logger
from isthmus.common.tasks import tell_if_broken
from isthmus.common.types import InstanceRef, Request
from isthmus.decode_worker.prefill_client import AbortReply, PrefillClient, lost
from isthmus.decode_worker.prefix_give import PrefixGive
from isthmus.engine.types import Reservation
from isthmus.kvtransfer.receive_session import ReceiveSession
from isthmus.worker.load_reporter import OutsideLoad
from isthmus.worker.role import WorkerRuntime

_FIRST_PROBE_S = 0.5
_LAST_PROBE_S = 5.0

log = get_logger("reservations")


@dataclass(slots=True, eq=False)
class _Waiter:
    request: Request
    granted: asyncio.Future[Reservation]


class Reservations:
    """Owns the line and the quarantines. Lives on the event loop."""

    def __init__(self, runtime: WorkerRuntime, prefill: PrefillClient, max_waiting: int) -> None:
        self._runtime = runtime
        self._prefill = prefill
        self._max_waiting = max_waiting
        self._line: deque[_Waiter] = deque()
        self._quarantined: Counter[RequestId] = Counter()
        self._settling: set[asyncio.Task[None]] = set()

    # --- getting blocks --------------------------------------------------------------------------

    async def acquire(self, request: Request) -> Reservation:
        """Blocks for all of the request's tokens. Waits as long as it takes: the caller has the
        deadline. Raises OutOfBlocksError when the line is too long, and what ``reserve`` raises."""
        if not self._line:
            try:
                return self._reserve(request)
            except OutOfBlocksError:
                load = self._runtime.engine.load()
                if load.free_blocks == load.num_blocks:
                    raise  # nothing that ends can free a block for it
        if len(self._line) >= self._max_waiting:
            raise OutOfBlocksError(
                f"{len(self._line)} requests wait for KV blocks already",
                stage="reserve",
                instance_id=self._runtime.me.instance_id,
                retry_after_ms=1000,
            )
        waiter = _Waiter(request, asyncio.get_running_loop().create_future())
        self._line.append(waiter)
        self._runtime.load.changed()
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.done() and not waiter.granted.cancelled():
                self.give_back(waiter.granted.result())
            raise
        finally:
            if waiter in self._line:
                self._line.remove(waiter)
                self.serve_line()

    def _reserve(self, request: Request) -> Reservation:
        reservation = self._runtime.engine.reserve(request)
        self._runtime.cache_changed()  # reserving may have evicted cached blocks
        return reservation

    def serve_line(self) -> None:
        """Called whenever blocks may have become free."""
        while self._line:
            waiter = self._line[0]
            if not waiter.granted.done():
                try:
                    waiter.granted.set_result(self._reserve(waiter.request))
                except OutOfBlocksError:
                    return
                except IsthmusError as error:
                    waiter.granted.set_exception(error)
            self._line.popleft()

    def waiting(self) -> OutsideLoad:
        return OutsideLoad(
            waiting_seqs=len(self._line),
            waiting_tokens=sum(len(waiter.request.token_ids) for waiter in self._line),
        )

    # --- giving them back ------------------------------------------------------------------------

    def give_back(self, reservation: Reservation) -> None:
        """For blocks that no peer was ever told of, or that are quiet."""
        self._runtime.engine.cancel_reservation(reservation, quarantine=False)
        self._freed()

    def retire(
        self,
        reservation: Reservation,
        session: ReceiveSession,
        source: InstanceRef,
        prefix: PrefixGive,
    ) -> None:
        """For blocks that a peer may write to, or is being sent (``prefix``): back to the pool once
        no write can land and none is read."""
        is_read = not prefix.is_quiet
        if session.is_quiescent and not is_read:
            session.cancel()
            self.give_back(reservation)
            return
        self._runtime.engine.cancel_reservation(reservation, quarantine=True, keeps_prefix=is_read)
        self._quarantined[reservation.request_id] += 1
        session.cancel()
        prefix.stop()
        settling = asyncio.create_task(
            self._settle(reservation.request_id, session, source, prefix),
            name=f"settle {reservation.request_id}",
        )
        self._settling.add(settling)
        settling.add_done_callback(self._settling.discard)
        settling.add_done_callback(tell_if_broken(log, "blocks of a request rest for ever"))

    async def _settle(
        self,
        request_id: RequestId,
        session: ReceiveSession,
        source: InstanceRef,
        prefix: PrefixGive,
    ) -> None:
        """Asks the sender to stop; a sender that does not answer is probed until it is proven
        gone or the session's own rest has passed."""
        probe_s = _FIRST_PROBE_S
        while not session.is_quiescent:
            reply = await self._prefill.abort(source, session.ticket.transfer_id)
            if reply is AbortReply.QUIET:
                session.peer_quiesced()
            elif reply is AbortReply.ENDED:
                session.peer_ended()
            elif await self._prefill.is_gone(source):
                log.warning("prefill instance is gone", instance=source.instance_id)
                session.peer_gone(lost(source, "its process has ended"), is_gone=True)
                if self._runtime.transfers.knows(source):
                    await self._runtime.transfers.forget(source.instance_id, is_gone=True)
            if await session.quiesced(probe_s):
                break
            probe_s = min(_LAST_PROBE_S, 2 * probe_s)
        await prefix.end()
        self._quarantined[request_id] -= 1
        # One id may have been tried twice: its blocks are released together, when all are quiet.
        if not self._quarantined[request_id]:
            del self._quarantined[request_id]
            self._runtime.engine.release_quarantine(request_id)
            self._freed()

    def _freed(self) -> None:
        self._runtime.cache_changed()
        self.serve_line()

    @property
    def num_quarantined(self) -> int:
        return len(self._settling)

    async def close(self, timeout_s: float) -> None:
        if self._settling:
            _, late = await asyncio.wait(self._settling, timeout=timeout_s)
            for task in late:  # the process ends, and its memory with it
                task.cancel()
