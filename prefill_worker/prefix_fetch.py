"""KV of a prompt's first tokens, brought from the decode instance before the prompt is computed.

A conversation's last answer was made on a decode instance: there its KV is, and here it is not. A
ticket says how much of the prompt the decode instance holds (its ``first_block``). Where that is
enough more than this instance's prefix cache has, this instance asks for the rest::

    prompt      │ cached here │ fetched: held there, missing here │ computed │
                              └ reserved here, written by the peer

    WANTED ──▶ ARRIVED    the blocks enter the prefix cache, where the request finds them
       └─────▶ GIVEN_UP   the prompt is computed from what is cached; the blocks rest until no write
                          can land in them

Nothing depends on it but time: whatever goes wrong, the prompt is computed as if nobody had asked.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from enum import Enum

from isthmus.common.clock import NS_PER_MS
from isthmus.common.errors import IsthmusError
from isthmus.common.ids import RequestId, new_transfer_id
from isthmus.common.kv_layout import KvLayout
from isthmus.common.logging import get_logger
from isthmus.common.state_machine import Transitions
from isthmus.common.tasks import tell_if_broken
from isthmus.common.transfer import TransferTicket
from isthmus.common.types import Request
from isthmus.engine.types import Reservation
from isthmus.kvtransfer.receive_session import ReceiveSession
from isthmus.worker.load_reporter import OutsideLoad
from isthmus.worker.role import WorkerRuntime

_PROBE_S = 5.0

log = get_logger("prefix_fetch")


class FetchState(Enum):
    WANTED = "wanted"
    ARRIVED = "arrived"
    GIVEN_UP = "given_up"


FETCH_TRANSITIONS: Transitions[FetchState] = Transitions(
    {
        FetchState.WANTED: frozenset({FetchState.ARRIVED, FetchState.GIVEN_UP}),
        FetchState.ARRIVED: frozenset(),
        FetchState.GIVEN_UP: frozenset(),
    }
)


def num_fetchable_tokens(num_prompt_tokens: int, num_held_tokens: int, block_size: int) -> int:
    """Tokens in whole blocks of this instance that a peer holds; one token at least is left to
    compute."""
    return min(num_held_tokens, num_prompt_tokens - 1) // block_size * block_size


class PrefixFetch:
    """One fetch. Lives on the event loop; ``close`` must be called, whatever has become of it."""

    def __init__(
        self,
        owner: PrefixFetches,
        request: Request,
        reservation: Reservation,
        session: ReceiveSession,
    ) -> None:
        self.ticket = session.ticket
        self.state = FetchState.WANTED
        self._owner = owner
        self._request = request
        self._reservation = reservation
        self._session = session

    async def wait(self) -> None:
        """Returns when the blocks are in the prefix cache, or when it is better not to wait any
        more. Raises nothing."""
        try:
            await self._session.wait_complete()
        except IsthmusError as error:
            log.info(
                "prefix not fetched",
                request_id=self._request.request_id,
                peer=self.ticket.source.instance_id,
                reason=error.message,
            )
            self.close()
            return
        self.state = FETCH_TRANSITIONS.check(self.state, FetchState.ARRIVED)
        self._owner.arrived(self._reservation, self._request)

    def close(self) -> None:
        """Gives up what has not arrived. Idempotent."""
        if self.state is FetchState.WANTED:
            self.state = FETCH_TRANSITIONS.check(self.state, FetchState.GIVEN_UP)
            self._session.cancel()
            self._owner.given_up(self._reservation, self._session)


class PrefixFetches:
    """Begins fetches and owns the blocks that a peer may still write to."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime
        self._resting: Counter[RequestId] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[RequestId, int] = {}  # for a prefix: tokens to be computed behind it

    def begin(self, request: Request, ticket: TransferTicket) -> PrefixFetch | None:
        """None where there is nothing to gain, or no way: unlike KV formats, no room, no peer."""
        least = self._runtime.config.transfer.fetch_min_tokens
        theirs = self._runtime.transfers.layout_of(ticket.target)
        mine = self._runtime.engine.kv_layout
        if not least or theirs is None or theirs.dtype != mine.dtype:
            return None
        if mine.windows:
            return None  # a transfer leaves out what no window sees, and a prefix needs it whole
        if request.sampling.prompt_logprobs is not None:
            return None  # every position is computed, whatever is cached
        wanted = self._num_wanted(request, ticket, theirs, mine)
        if wanted < least:
            return None
        try:
            reservation = self._runtime.engine.reserve_prefix(request, wanted, least)
        except IsthmusError:
            return None  # whoever admits the request says what is wrong with it
        if reservation is None:
            return None
        try:
            session = self._runtime.transfers.open_receive(
                self._ticket(request, ticket, reservation, wanted)
            )
        except IsthmusError as error:
            log.info("prefix cannot be fetched", reason=error.message)
            self._runtime.engine.cancel_reservation(reservation, quarantine=False)
            return None
        self._waiting[request.request_id] = len(request.token_ids) - wanted
        self._runtime.load.changed()
        return PrefixFetch(self, request, reservation, session)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def is_waiting(self, request_id: RequestId) -> bool:
        """Whether this request waits for its prefix."""
        return request_id in self._waiting

    def waiting(self) -> OutsideLoad:
        """Requests that the engine does not know of yet."""
        return OutsideLoad(
            waiting_seqs=len(self._waiting),
            prompt_seqs=len(self._waiting),
            waiting_tokens=sum(self._waiting.values()),
        )

    @staticmethod
    def _num_wanted(
        request: Request, ticket: TransferTicket, theirs: KvLayout, mine: KvLayout
    ) -> int:
        held = ticket.first_block * theirs.block_size
        return num_fetchable_tokens(len(request.token_ids), held, mine.block_size)

    def _ticket(
        self, request: Request, ticket: TransferTicket, reservation: Reservation, wanted: int
    ) -> TransferTicket:
        runtime = self._runtime
        patience_ns = runtime.config.transfer.fetch_timeout_ms * NS_PER_MS
        return TransferTicket(
            transfer_id=new_transfer_id(),
            request_id=request.request_id,
            source=ticket.target,
            target=runtime.me,
            first_block=len(reservation.cached_block_ids),
            target_block_ids=reservation.block_ids,
            num_tokens=wanted,
            layout_hash=runtime.engine.kv_layout.compat_hash,
            deadline_ns=min(ticket.deadline_ns, runtime.clock.now_ns() + patience_ns),
            checksum=runtime.transfers.checksum_with(ticket.target),
        )

    # --- what a fetch says ---------------------------------------------------------------------

    def arrived(self, reservation: Reservation, request: Request) -> None:
        del self._waiting[request.request_id]
        self._runtime.engine.publish_reservation(reservation, request)
        self._runtime.cache_changed()
        size = self._runtime.engine.kv_layout.block_size
        self._runtime.metrics.prefix_fetched(len(reservation.block_ids) * size)

    def given_up(self, reservation: Reservation, session: ReceiveSession) -> None:
        del self._waiting[reservation.request_id]
        self._runtime.metrics.prefix_given_up()
        is_quiet = session.is_quiescent
        self._runtime.engine.cancel_reservation(reservation, quarantine=not is_quiet)
        self._runtime.cache_changed()
        if is_quiet:
            return
        self._resting[reservation.request_id] += 1
        task = asyncio.create_task(
            self._settle(reservation.request_id, session), name=f"rest {reservation.request_id}"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(tell_if_broken(log, "blocks of a given up fetch rest for ever"))

    async def _settle(self, request_id: RequestId, session: ReceiveSession) -> None:
        """Until the sender has said that it is quiet, or its last possible write is long past."""
        while not await session.quiesced(_PROBE_S):
            log.debug("blocks of a given up fetch rest", request_id=request_id)
        self._resting[request_id] -= 1
        # A request may have been tried twice: its blocks are released when all are quiet.
        if not self._resting[request_id]:
            del self._resting[request_id]
            self._runtime.engine.release_quarantine(request_id)
            self._runtime.cache_changed()

    @property
    def num_resting(self) -> int:
        """Given up fetches that the peer may still write to."""
        return len(self._tasks)

    async def close(self, timeout_s: float) -> None:
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
            for task in late:  # the process ends, and its memory with it
                task.cancel()
