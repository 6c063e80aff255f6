"""The prefill side of one transfer: what has been pushed, and whether anything is still on its way.

::

    CONNECTED ──▶ STREAMING ──▶ DRAINING_NIC ──▶ DONE      every pushed byte is in the peer's memory
        └────────────┴───────────────┴─────────▶ FAILED │ CANCELLED │ EXPIRED

A session is made only towards a peer that has shaken hands, so it begins CONNECTED. It reads its
source blocks until it is quiet: the worker keeps its hold on them until ``drained`` or ``at_rest``
has returned. Ending badly stops every write that is not yet posted and, once the posted ones have
ended, tells the receiver so (ABORTED), with QUIET when nothing of them can still land. Posted ones
that do not end by themselves (a stopped peer, a dead link) are ended by the manager, which takes
their peer from the connector at ``rests_by_ns``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Protocol

from isthmus.common.clock import NS_PER_S
from isthmus.common.errors import (
    CancelledError,
    IsthmusError,
    TransferTimeoutError,
)
from isthmus.common.ids import BlockId
from isthmus.common.kv_layout import KvLayout
from isthmus.common.state_machine import Transitions
from isthmus.common.transfer import TransferTicket
from isthmus.kvtransfer.chunks import Chunks, LayerPart, SourceStores
from isthmus.kvtransfer.interface import PeerName
from isthmus.kvtransfer.link import LANDING_NS
from isthmus.kvtransfer.notification import Flags, Notification
from isthmus.kvtransfer.plan import blocks_of
from isthmus.kvtransfer.routes import Route
from isthmus.kvtransfer.writes import Outcome, Write

# What is in flight on a link that is well lands within half of it.
_LEAST_REST_NS = 2 * LANDING_NS


class SendState(Enum):
    CONNECTED = "connected"
    STREAMING = "streaming"
    DRAINING_NIC = "draining_nic"  # everything is pushed; writes are in flight
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


_BAD_ENDS = frozenset({SendState.FAILED, SendState.CANCELLED, SendState.EXPIRED})
SEND_TRANSITIONS: Transitions[SendState] = Transitions(
    {
        SendState.CONNECTED: frozenset({SendState.STREAMING}) | _BAD_ENDS,
        SendState.STREAMING: frozenset({SendState.DRAINING_NIC}) | _BAD_ENDS,
        SendState.DRAINING_NIC: frozenset({SendState.DONE}) | _BAD_ENDS,
        SendState.DONE: frozenset(),
        SendState.FAILED: frozenset(),
        SendState.CANCELLED: frozenset(),
        SendState.EXPIRED: frozenset(),
    }
)


class SendHost(Protocol):
    """The manager, as a session sees it."""

    def submit(self, write: Write) -> None: ...

    def max_write_bytes(self, rank: int, peer: PeerName) -> int:
        """How large one write of that rank should be at most, which depends on the link."""
        ...

    def send_ended(self, session: SendSession) -> None: ...

    def send_quiet(self, session: SendSession) -> None: ...

    def monotonic_ns(self) -> int: ...


class SendSession:
    """Made by TransferManager.open_send; lives on its event loop. Times are monotonic."""

    def __init__(
        self,
        ticket: TransferTicket,
        routes: Mapping[Route, PeerName],
        stores: SourceStores,
        expires_ns: int,
        quarantine_ns: int,
        host: SendHost,
    ) -> None:
        self.ticket = ticket
        self.expires_ns = expires_ns
        self.num_bytes = 0  # of writes that are done
        self._state = SendState.CONNECTED
        self._error: IsthmusError | None = None
        self._routes = routes
        self._any_route = next(iter(routes))
        self._stores = stores
        self._host = host
        self._quarantine_ns = quarantine_ns
        self._ended_ns = expires_ns
        self._chunks = Chunks(ticket, routes, stores, expires_ns, host.max_write_bytes)
        self._next_index = [0] * self._any_route.source.num_layers  # first block not pushed yet
        self._pushed_bytes = 0
        self._num_open_writes = 0
        self._may_still_land = False
        self._ended = asyncio.Event()
        self._quiet = asyncio.Event()

    @property
    def state(self) -> SendState:
        return self._state

    @property
    def is_open(self) -> bool:
        return not SEND_TRANSITIONS.is_terminal(self._state)

    @property
    def error(self) -> IsthmusError | None:
        return self._error

    @property
    def num_chunks(self) -> int:
        """Pushed so far."""
        return self._chunks.count

    @property
    def target_layout(self) -> KvLayout:
        """Of one of its ranks: blocks and layers are those of all."""
        return self._any_route.target

    @property
    def num_bytes_left(self) -> int:
        """Of the whole ticket on the route that has most of it (they carry it side by side), as far
        as the blocks pushed so far tell what one takes."""
        sizes = [route.layer_bytes for route in self._routes]
        num_pushed = sum(self._next_index)  # blocks × layers
        num_wanted = self.ticket.num_blocks * len(self._next_index)
        if not num_pushed:
            return num_wanted * max(sizes)
        num_left = self._pushed_bytes * num_wanted // num_pushed - self.num_bytes
        return num_left * max(sizes) // sum(sizes)

    @property
    def rests_by_ns(self) -> int:
        """Of an ended session: when its writes should long have ended."""
        return self._ended_ns + max(self._quarantine_ns, _LEAST_REST_NS)

    @property
    def is_quiet(self) -> bool:
        """True when the session has ended and reads no source block any more."""
        return self._quiet.is_set()

    # --- for the worker ------------------------------------------------------------------------

    def push(
        self,
        first_index: int,
        source_block_ids: Sequence[BlockId],
        is_last: bool,
        num_blocks: int | None = None,
        part: LayerPart | None = None,
    ) -> None:
        """Writes ``num_blocks`` target blocks from ``ticket.target_block_ids[first_index]`` on, all
        their layers or a ``part`` of them, in one or more chunks. ``source_block_ids`` hold their
        tokens (see ``source_blocks``): as many where both sides' blocks are of one size. Pushes of
        a layer come in order without gaps; the last push completes the ticket.

        Raises what ended the session when it has ended, and ValueError for a push that breaks the
        order or names a block that is not there.
        """
        if self._error is not None:
            raise self._error
        num_blocks = len(source_block_ids) if num_blocks is None else num_blocks
        end = first_index + num_blocks
        part = part or LayerPart(range(self._any_route.source.num_layers))
        self._check_push(first_index, end, source_block_ids, part.layers)
        next_index = [*self._next_index]
        next_index[part.layers.start : part.layers.stop] = [end] * len(part.layers)
        if is_last != (min(next_index) == self.ticket.num_blocks):
            raise ValueError(f"is_last={is_last} at block {end} of {self.ticket.num_blocks}")
        self._next_index = next_index
        if self._state is SendState.CONNECTED:
            self._state = SEND_TRANSITIONS.check(self._state, SendState.STREAMING)
        if is_last:
            self._state = SEND_TRANSITIONS.check(self._state, SendState.DRAINING_NIC)
        size = self._any_route.source.block_size
        first_token = self.source_blocks(first_index, end).start * size
        indices = range(first_index, end)
        for write in self._chunks.writes(
            self, indices, source_block_ids, first_token, part, is_last=is_last
        ):
            self._num_open_writes += 1
            self._pushed_bytes += write.num_bytes
            self._host.submit(write)

    def source_blocks(self, first_index: int, stop_index: int) -> range:
        """Which blocks of the sequence hold, on this side, the tokens of the ticket's target blocks
        ``[first_index, stop_index)``."""
        size = self._any_route.target.block_size
        tokens = self.ticket.tokens_of(first_index, stop_index, size)
        return blocks_of(tokens, self._any_route.source.block_size)

    async def drained(self) -> None:
        """Returns when every write is done after the last push, else raises what ended the
        session: TransferError, TransferTimeoutError, InstanceLostError or CancelledError."""
        await self._ended.wait()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        self._end(SendState.CANCELLED, CancelledError("transfer cancelled", stage="transfer"))

    def fail(self, error: IsthmusError) -> None:
        self._end(SendState.FAILED, error)

    async def quiesce(self) -> bool:
        """For an ended session: waits until none of its writes is in flight.

        True is a proof: each write was done or never posted, so nothing of this transfer can still
        land (``PrefillFailed.quiesced``). False when a write failed half-way or did not end within
        the quarantine after the session's end; the receiver then waits out its own quarantine.
        """
        limit_ns = self._ended_ns + self._quarantine_ns - self._host.monotonic_ns()
        try:
            async with asyncio.timeout(max(0, limit_ns) / NS_PER_S):
                await self._quiet.wait()
        except TimeoutError:
            return False
        return not self._may_still_land

    async def at_rest(self) -> None:
        """For an ended session: returns when none of its writes is in flight."""
        await self._quiet.wait()

    # --- for the manager -----------------------------------------------------------------------

    def expire(self) -> None:
        self._end(
            SendState.EXPIRED,
            TransferTimeoutError(
                f"{min(self._next_index)} of {self.ticket.num_blocks} blocks pushed, "
                f"{self._num_open_writes} writes unfinished at the deadline",
                stage="transfer",
                instance_id=self.ticket.target.instance_id,
            ),
        )

    def write_ended(self, write: Write, outcome: Outcome, error: IsthmusError | None) -> None:
        self._num_open_writes -= 1
        if outcome is Outcome.DONE:
            self.num_bytes += write.num_bytes
        elif outcome is Outcome.FAILED:
            self._may_still_land = True
        if isinstance(error, TransferTimeoutError):
            self.expire()
        elif error is not None:
            self.fail(error)
        if self._num_open_writes == 0:
            self._come_to_rest()

    # --- inside --------------------------------------------------------------------------------

    def _check_push(
        self, first_index: int, end: int, block_ids: Sequence[BlockId], layers: range
    ) -> None:
        if self._state is SendState.DRAINING_NIC or self._state is SendState.DONE:
            raise ValueError("push after the last push")
        num_layers = len(self._next_index)
        if not 0 <= layers.start < layers.stop <= num_layers or layers.step != 1:
            raise ValueError(f"push of {layers} of {num_layers} layers")
        expected = set(self._next_index[layers.start : layers.stop])
        if expected != {first_index}:
            raise ValueError(f"push of {layers} at block {first_index}, expected {expected}")
        if not first_index < end <= self.ticket.num_blocks:
            raise ValueError(f"push of blocks [{first_index}, {end}) of {self.ticket.num_blocks}")
        if len(block_ids) != len(self.source_blocks(first_index, end)):
            raise ValueError(
                f"{len(block_ids)} source blocks for target blocks [{first_index}, {end})"
            )
        if not all(0 <= block < self._stores.num_blocks for block in block_ids):
            raise ValueError(f"source blocks outside the store: {list(block_ids)}")

    def _come_to_rest(self) -> None:
        if self._state is SendState.DRAINING_NIC:
            self._end(SendState.DONE, None)
        elif not self.is_open and not self.is_quiet:
            self._quiet.set()
            self._host.send_quiet(self)

    def _end(self, state: SendState, error: IsthmusError | None) -> None:
        if not self.is_open:
            return
        self._state = SEND_TRANSITIONS.check(self._state, state)
        self._error = error
        self._ended_ns = self._host.monotonic_ns()
        self._ended.set()
        self._host.send_ended(self)
        if self._num_open_writes == 0:
            self._come_to_rest()

    def abort_note(self) -> Notification | None:
        """What to tell the receiver once quiet; nothing after DONE."""
        if self._state is SendState.DONE:
            return None
        flags = Flags.ABORTED if self._may_still_land else Flags.ABORTED | Flags.QUIET
        return Notification(self.ticket.transfer_id, flags=flags)
