"""The prefill role: admits calls, feeds them with what the engine did, and settles them.

Every call that was admitted is settled exactly once, by a task of this worker and not by the RPC
that may be cancelled at any await. A timer, not the next request, ends holds that are too old.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import closing
from dataclasses import replace

from isthmus.common.cluster import LinkRate
from isthmus.common.errors import (
    CancelledError,
    DrainingError,
    InvalidRequestError,
    IsthmusError,
    TransferTimeoutError,
)
from isthmus.common.ids import InstanceId, RequestId, TransferId
from isthmus.common.logging import get_logger
from isthmus.common.prefill import PrefillFailed, PrefillPrefixWanted, PrefillUpdate
from isthmus.common.tasks import end_task, tell_if_broken
from isthmus.common.transfer import TransferTicket
from isthmus.common.types import Request
from isthmus.engine.admission import check_request
from isthmus.engine.types import SequenceMode, StepLaunch, StepOutput
from isthmus.prefill_worker.call import PrefillCall
from isthmus.prefill_worker.prefix_fetch import PrefixFetches
from isthmus.worker.load_reporter import OutsideLoad
from isthmus.worker.role import WorkerRuntime

_MAX_RECENT = 4096
_HOLD_SWEEP_S = 1.0
_CLOSE_TIMEOUT_S = 2.0

log = get_logger("prefill")


class _Recent:
    """The last few thousand transfer ids added."""

    def __init__(self) -> None:
        self._ids: OrderedDict[TransferId, None] = OrderedDict()

    def add(self, transfer_id: TransferId) -> None:
        self._ids[transfer_id] = None
        if len(self._ids) > _MAX_RECENT:
            self._ids.popitem(last=False)

    def __contains__(self, transfer_id: TransferId) -> bool:
        return transfer_id in self._ids


class PrefillWorker:
    """Implements ``RoleWorker``."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime
        self._calls: dict[RequestId, PrefillCall] = {}
        # Transfers that were ended before their Prefill call arrived, and those that have ended
        # without a proof that nothing of them can land any more.
        self._refused = _Recent()
        self._unquiet = _Recent()
        self._fetches = PrefixFetches(runtime)
        self._sweeper: asyncio.Task[None] | None = None

    # --- one call --------------------------------------------------------------------------------

    async def prefill(
        self, request: Request, ticket: TransferTicket
    ) -> AsyncGenerator[PrefillUpdate, None]:
        """The updates of one call; the last is PrefillFinished or PrefillFailed.

        Closing the iterator cancels the work at the next chunk.
        """
        try:
            self._check(request, ticket)
            fetch = self._fetches.begin(request, ticket)
            if fetch is not None:
                with closing(fetch):
                    yield PrefillPrefixWanted(fetch.ticket)
                    await fetch.wait()
            call = self._admit(request, ticket)
        except IsthmusError as error:
            yield PrefillFailed(error, quiesced=True)
            return
        drained = asyncio.create_task(call.session.drained(), name=f"drained {request.request_id}")
        drained.add_done_callback(call.on_drained)
        try:
            while (update := await call.updates.get()) is not None:
                yield update
            is_settled = await self._wait_settled(call)
            if call.error is None and is_settled:
                yield call.finished()
            else:
                unsettled = TransferTimeoutError("a write does not end", stage="transfer")
                yield PrefillFailed(call.error or unsettled, quiesced=is_settled)
        finally:
            drained.cancel()
            call.cancel("the decode instance ended the call")
            self._settle(call)

    def _check(self, request: Request, ticket: TransferTicket) -> None:
        runtime = self._runtime
        runtime.lifecycle.check_accepting()
        check_request(request, runtime.engine.max_model_len, runtime.engine.spec.vocab_size)
        self._check_ticket(request, ticket)

    def _admit(self, request: Request, ticket: TransferTicket) -> PrefillCall:
        runtime = self._runtime
        self._check_ticket(request, ticket)  # again: a prefix may have been waited for
        session = runtime.transfers.open_send(ticket)
        call = PrefillCall(
            request,
            ticket,
            session,
            runtime.engine,
            runtime.clock,
            runtime.config.transfer.layers_per_push,
        )
        try:
            runtime.engine.add(request, SequenceMode.PREFILL_ONLY)
        except IsthmusError:
            session.cancel()
            raise
        self._calls[request.request_id] = call
        runtime.load.changed()
        return call

    def _check_ticket(self, request: Request, ticket: TransferTicket) -> None:
        if ticket.transfer_id in self._refused:
            raise CancelledError("the transfer was ended before it began", stage="prefill")
        if request.request_id in self._calls or self._fetches.is_waiting(request.request_id):
            raise InvalidRequestError(
                f"request {request.request_id} is already being computed here", stage="prefill"
            )
        # Whether its blocks hold the tokens is for the transfers, which know the target's layout.
        is_whole = ticket.num_tokens == len(request.token_ids)
        if ticket.request_id != request.request_id or not is_whole:
            raise InvalidRequestError(
                f"the ticket (request {ticket.request_id}, {ticket.num_tokens} tokens) does not "
                f"fit the request {request.request_id} of {len(request.token_ids)} tokens",
                stage="prefill",
            )

    def _settle(self, call: PrefillCall) -> asyncio.Task[bool]:
        """The task that gives back what the call holds; started once a call."""
        if call.settling is None:
            name = f"settle {call.request.request_id}"
            call.settling = asyncio.create_task(self._run_settle(call), name=name)
        return call.settling

    async def _run_settle(self, call: PrefillCall) -> bool:
        request_id = call.request.request_id
        is_quiet = False
        try:
            is_quiet = await call.settle()
            return is_quiet
        finally:
            if not is_quiet:
                self._unquiet.add(call.ticket.transfer_id)
            del self._calls[request_id]
            self._runtime.cache_changed()
            if call.error is not None:
                log.info(
                    "prefill ended early",
                    request_id=request_id,
                    stage=call.error.stage,
                    reason=call.error.message,
                )
            if isinstance(call.error, CancelledError):
                self._runtime.metrics.aborted()

    async def _wait_settled(self, call: PrefillCall) -> bool:
        """Settles the call. True is a proof that nothing of it can land at the peer any more;
        waits no longer than a peer would rest anyway."""
        settling = self._settle(call)
        timeout_s = max(1.0, self._runtime.config.transfer.quarantine_ms / 1000)
        await asyncio.wait({settling}, timeout=timeout_s)
        return settling.done() and not settling.cancelled() and settling.result()

    async def abort(self, transfer_id: TransferId, reason: str) -> bool:
        """Ends a transfer; True when none of its writes is in flight any more."""
        for call in self._calls.values():
            if call.ticket.transfer_id == transfer_id:
                call.cancel(reason)
                return await self._wait_settled(call)
        self._refused.add(transfer_id)
        return transfer_id not in self._unquiet

    # --- RoleWorker ------------------------------------------------------------------------------

    def start(self) -> None:
        self._sweeper = asyncio.create_task(self._expire_holds(), name="hold-expiry")
        self._sweeper.add_done_callback(tell_if_broken(log, "holds do not expire any more"))

    def on_launch(self, launch: StepLaunch) -> None:
        for request_id, num_tokens in launch.num_tokens.items():
            call = self._calls.get(request_id)
            if call is not None:
                call.on_launch(num_tokens, launch.progress)

    def on_step(self, output: StepOutput) -> None:
        for update in output.updates:
            call = self._calls.get(update.request_id)
            if call is not None:
                call.on_update(update, output.ended_ns)

    def outside_load(self) -> OutsideLoad:
        transfers = self._runtime.transfers
        links = tuple(LinkRate(*link) for link in transfers.bytes_per_s().items())
        return replace(
            self._fetches.waiting(), inflight_transfer_bytes=transfers.inflight_bytes, links=links
        )

    def num_running(self) -> int:
        return len(self._calls) + self._fetches.num_waiting

    def num_held(self) -> int:
        num_ended = sum(not call.is_open for call in self._calls.values())
        return num_ended + self._fetches.num_resting

    def idle_peers(self) -> set[InstanceId]:
        return set()

    async def forget(self, instance_id: InstanceId) -> None:
        """Decode instances call; nothing but their transfers is kept here."""

    async def _expire_holds(self) -> None:
        hold_ms = self._runtime.config.transfer.hold_ms
        while True:
            await asyncio.sleep(min(_HOLD_SWEEP_S, hold_ms / 4000))
            now_ns = self._runtime.clock.now_ns()
            for request_id in self._runtime.engine.expired_holds(now_ns, hold_ms):
                self._expire_hold(request_id)

    def _expire_hold(self, request_id: RequestId) -> None:
        """Ends the call that has the hold, which gives it back when no write reads its blocks any
        more; a hold without a call has been forgotten and is released here."""
        call = self._calls.get(request_id)
        if call is not None and call.settling is not None:
            return
        log.warning("hold expired", request_id=request_id, stage="transfer")
        self._runtime.metrics.hold_expired()
        if call is None:
            self._runtime.engine.release_hold(request_id)
            self._runtime.cache_changed()
            return
        call.fail(TransferTimeoutError("the hold expired", stage="transfer"))
        self._settle(call)

    async def close(self) -> None:
        await end_task(self._sweeper)
        for call in self._calls.values():
            call.fail(DrainingError("the prefill instance stops", stage="prefill"))
        settling = {self._settle(call) for call in self._calls.values()}
        if settling:
            _, late = await asyncio.wait(settling, timeout=_CLOSE_TIMEOUT_S)
            for task in late:  # the process ends, and its memory with it
                task.cancel()
        await self._fetches.close(_CLOSE_TIMEOUT_S)
