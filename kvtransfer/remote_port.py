"""A follower's rank, driven from its leader over one connection. See ``port_wire``.

The connection belongs to transfers alone: a step never waits behind them, nor they behind a step.
A follower that is gone, or that answers nothing for long, is lost for good: its writes end as
FAILED, since any part of them may have landed, and whoever waits for it gets an InstanceLostError.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from contextlib import suppress
from typing import TypeVar

from isthmus.common.clock import Clock
from isthmus.common.errors import InstanceLostError, InternalError, IsthmusError, TransferError
from isthmus.common.transfer import Checksum, RankEndpoint
from isthmus.common.types import InstanceRef
from isthmus.kvtransfer import port_wire as wire
from isthmus.kvtransfer.checksums import ChunkContent
from isthmus.kvtransfer.copies import Copies
from isthmus.kvtransfer.driver import LONGEST_PAUSE_COMPUTING_S
from isthmus.kvtransfer.interface import PeerName
from isthmus.kvtransfer.lane import hopeless, may_go
from isthmus.kvtransfer.link import LinkEstimate, ToldEstimate
from isthmus.kvtransfer.writes import Outcome, Sweep, Write, WriteOwner

# Silence is counted in waits of this length: time in which this process was stopped is none.
_WAIT_S = 0.5

ResultT = TypeVar("ResultT", bound=wire.Result)


class RemotePort:
    """Implements ``RankPort``. Make it with ``open``."""

    def __init__(
        self,
        rank: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        clock: Clock,
        silence_s: float,
    ) -> None:
        """``silence_s``: so long a silence of the follower means that it is lost."""
        self._rank = rank
        self._writer = writer
        self._clock = clock
        self._num_waits = max(1, round(silence_s / _WAIT_S))
        self._clock_offset_ns = 0  # the follower's clock less this one's, or less
        self._last_number = wire.UNANSWERED
        self._calls: dict[int, asyncio.Future[wire.Result]] = {}
        self._writes: dict[int, Write] = {}
        self._open_bytes = 0
        self._owners: dict[WriteOwner, int] = {}  # of these; numbered as their first is
        self._num_of: Counter[WriteOwner] = Counter()  # how many of these each has
        self._unready: dict[int, Write] = {}  # of these; the follower has not been told yet
        self._links: dict[PeerName, LinkEstimate | ToldEstimate] = {}  # as the follower measures
        self._lost: InstanceLostError | None = None
        self._opened: wire.Opened | None = None
        self._receiver = asyncio.create_task(self._receive(reader), name=f"rank {rank}")

    async def open(self, me: InstanceRef) -> RemotePort:
        """Has the follower make its connector. Raises what it says, and InstanceLostError."""
        request = wire.Open(me.instance_id, me.epoch, me.address)
        self._opened = await self._ask(request, wire.Opened)
        return self

    # --- what it is ----------------------------------------------------------------------------

    @property
    def endpoint(self) -> RankEndpoint:
        return self._known.endpoint

    @property
    def checksum(self) -> Checksum:
        return self._known.checksum

    @property
    def _known(self) -> wire.Opened:
        assert self._opened is not None, "opened before it is used"
        return self._opened

    # --- writes --------------------------------------------------------------------------------

    @property
    def num_open_writes(self) -> int:
        return len(self._writes)

    @property
    def open_bytes(self) -> int:
        return self._open_bytes

    def bytes_per_s(self, peer: PeerName) -> float | None:
        return self._link(peer).bytes_per_s

    def max_write_bytes(self, peer: PeerName) -> int:
        return self._link(peer).max_write_bytes

    def check_in_time(self, peer: PeerName, num_bytes: int, deadline_ns: int) -> None:
        """By what the follower has told; of the rest it drops what it finds to be in vain."""
        link = self._link(peer)
        if link.is_too_slow(num_bytes, self._clock.monotonic_ns(), deadline_ns):
            raise hopeless(link, num_bytes)

    def _link(self, peer: PeerName) -> LinkEstimate | ToldEstimate:
        """One that knows nothing until the follower has told something."""
        return self._links.get(peer) or LinkEstimate()

    def submit(self, write: Write) -> None:
        """A step that is under way is the leader's to watch: until it has computed what is to be
        written, the follower is not told."""
        number = self._next_number()
        self._writes[number] = write
        self._num_of[write.owner] += 1
        self._owners.setdefault(write.owner, number)
        self._open_bytes += write.num_bytes
        if write.is_ready is None:
            self._send(number, write)
        else:
            self._unready[number] = write

    def _send(self, number: int, write: Write) -> None:
        assert isinstance(write.notification, bytes), "what travels is data"
        content, conversion = write.content, write.conversion
        self._tell(
            wire.Submit(
                write=number,
                owner=self._owners[write.owner],
                owner_bytes_left=write.owner.num_bytes_left,
                peer=write.peer,
                copies=wire.pack_copies(Copies.of(write.ops)),
                notification=write.notification,
                expires_ns=write.expires_ns + self._clock_offset_ns,
                content=wire.pack_content(content) if content is not None else None,
                conversion=wire.pack_conversion(conversion) if conversion is not None else None,
            )
        )

    def owner_ended(self, owner: WriteOwner) -> None:
        number = self._owners.get(owner)
        if number is not None:
            self._tell(wire.Withdraw(number))

    def wake(self) -> None:
        self._tell(wire.Wake())

    async def sweep(self, patience_s: float) -> Sweep:
        sweep = Sweep(self._clock.monotonic_ns())
        try:
            looking = self._call(wire.Look(patience_s))
            while self._unready and not looking.done():
                self._send_ready(sweep)
                await asyncio.wait({looking}, timeout=LONGEST_PAUSE_COMPUTING_S)
            seen = await self._answer(looking, wire.Seen)
        except InstanceLostError as error:
            sweep.error = error
            self._unready.clear()
            for number in list(self._writes):
                sweep.ended.append((self._take(number), Outcome.FAILED, error))
            return sweep
        for number, outcome, detail in seen.ended:
            problem = detail.to_error() if detail is not None else None
            sweep.ended.append((self._take(number), outcome, problem))
        sweep.notifications = [(PeerName(peer), payload) for peer, payload in seen.notifications]
        sweep.num_posted = seen.num_posted
        now_ns = self._clock.monotonic_ns()
        for name, rate in seen.rates:
            if (peer := PeerName(name)) in self._links:  # else it has been removed meanwhile
                self._links[peer] = ToldEstimate(rate, now_ns)
        if seen.error:
            sweep.error = TransferError(f"rank {self._rank}: {seen.error}", stage="transfer")
        return sweep

    def _take(self, number: int) -> Write:
        """A write that has ended."""
        write = self._writes.pop(number)
        self._open_bytes -= write.num_bytes
        self._num_of[write.owner] -= 1
        if not self._num_of[write.owner]:
            del self._num_of[write.owner], self._owners[write.owner]
        return write

    def _send_ready(self, sweep: Sweep) -> None:
        for number, write in list(self._unready.items()):
            try:
                if not may_go(write, self._clock.monotonic_ns()):
                    continue
                self._send(number, write)
            except IsthmusError as error:
                sweep.ended.append((self._take(number), Outcome.NOT_POSTED, error))
            del self._unready[number]

    # --- the rest ------------------------------------------------------------------------------

    async def add_peer(self, peer: RankEndpoint, connector: str, timeout_s: float) -> PeerName:
        adding = self._call(wire.AddPeer(peer, connector, timeout_s))
        try:
            added = await self._answer(adding, wire.Added, timeout_s)
        except asyncio.CancelledError:
            adding.add_done_callback(self._take_back)
            raise
        name = PeerName(added.peer)
        self._links[name] = LinkEstimate()
        return name

    def _take_back(self, adding: asyncio.Future[wire.Result]) -> None:
        """A peer that nobody waits for any more has come."""
        if adding.cancelled() or adding.exception() is not None:
            return
        added = adding.result()
        if isinstance(added, wire.Added):
            with suppress(InstanceLostError):
                self._call(wire.RemovePeer(added.peer, 0.0))

    async def remove_peer(self, peer: PeerName, timeout_s: float) -> None:
        self._links.pop(peer, None)
        with suppress(InstanceLostError):  # and its peers with it
            await self._answer(
                self._call(wire.RemovePeer(peer, timeout_s)), wire.Removed, timeout_s
            )

    async def count_corrupt(self, content: ChunkContent) -> int:
        request = wire.CountCorrupt(wire.pack_content(content))
        return (await self._ask(request, wire.Counted)).num_corrupt

    async def close(self, timeout_s: float) -> bool:
        in_time = True
        if self._lost is None:
            closing = self._call(wire.Close(timeout_s))
            await asyncio.wait({closing}, timeout=timeout_s + _WAIT_S)
            # A follower that ended meanwhile has closed, too.
            in_time = closing.done() and (
                closing.exception() is not None or closing.result() == wire.Closed(in_time=True)
            )
        self._lose("was closed")
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)
        return in_time

    # --- inside --------------------------------------------------------------------------------

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _tell(self, request: wire.Request, number: int = wire.UNANSWERED) -> None:
        if self._lost is None:
            self._writer.write(wire.encode(wire.Call(number, request)))

    def _call(self, request: wire.Request) -> asyncio.Future[wire.Result]:
        """Raises InstanceLostError."""
        if self._lost is not None:
            raise self._lost
        number = self._next_number()
        reply: asyncio.Future[wire.Result] = asyncio.get_running_loop().create_future()
        self._calls[number] = reply
        self._tell(request, number)
        return reply

    async def _ask(self, request: wire.Request, kind: type[ResultT]) -> ResultT:
        return await self._answer(self._call(request), kind)

    async def _answer(
        self, reply: asyncio.Future[wire.Result], kind: type[ResultT], timeout_s: float = 0.0
    ) -> ResultT:
        """Raises what the follower raised; InstanceLostError when it is gone, or silent for longer
        than it may itself wait for others (``timeout_s``)."""
        for _ in range(self._num_waits + math.ceil(timeout_s / _WAIT_S)):
            await asyncio.wait({reply}, timeout=_WAIT_S)
            if reply.done():
                break
        else:
            self._lose("answers nothing")
        result = await reply
        match result:
            case wire.Failed():
                raise result.error.to_error()
            case wire.TimedOut():
                raise TimeoutError
        if not isinstance(result, kind):
            raise InternalError(f"rank {self._rank} gave another answer", stage="transfer")
        return result

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                reply = await wire.receive(reader, wire.Reply)
                self._clock_offset_ns = reply.now_ns - self._clock.monotonic_ns()
                waiting = self._calls.pop(reply.number, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply.result)
        except EOFError:
            self._lose("has ended")
        except InternalError as error:
            self._lose(error.message)

    def _lose(self, reason: str) -> None:
        if self._lost is not None:
            return
        error = self._lost = InstanceLostError(
            f"rank {self._rank} of this instance is lost: it {reason}", stage="transfer"
        )
        self._writer.close()
        calls, self._calls = self._calls, {}
        for waiting in calls.values():
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # known, whoever asks for it
