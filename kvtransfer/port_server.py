"""A follower's side of a RemotePort: its rank's LocalPort, told over one connection what to do.

It decides nothing and keeps no session. What it must not do is go on by itself: when the leader's
connection ends, nothing more is posted, and the connector is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from isthmus.common.clock import Clock
from isthmus.common.errors import ErrorDetail, InternalError, IsthmusError
from isthmus.common.ids import InstanceId
from isthmus.common.logging import get_logger
from isthmus.common.types import InstanceRef
from isthmus.kvtransfer import port_wire as wire
from isthmus.kvtransfer.interface import PeerName
from isthmus.kvtransfer.rank_port import LocalPort
from isthmus.kvtransfer.writes import Outcome, Write

PortOpener = Callable[[InstanceRef], LocalPort]
_CLOSE_TIMEOUT_S = 2.0

log = get_logger("kvtransfer")


class _Owner:
    """Stands for a session, which is the leader's, while writes of it are open here."""

    def __init__(self) -> None:
        self.is_open = True
        self.num_bytes_left = 0  # as of its last write
        self.num_writes = 0

    def write_ended(self, write: Write, outcome: Outcome, error: IsthmusError | None) -> None:
        """Never called: the leader is told by the reply to its sweep."""


class PortServer:
    """Serves one leader, on the event loop that ``serve`` runs on."""

    def __init__(self, open_port: PortOpener, clock: Clock) -> None:
        self._open_port = open_port
        self._clock = clock
        self._port: LocalPort | None = None
        self._owners: dict[int, _Owner] = {}
        self._numbers: dict[Write, tuple[int, int]] = {}  # of an open write and its owner
        self._answers: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Returns when the connection has ended. Raises InternalError for what is no call."""
        try:
            while True:
                call = await wire.receive(reader, wire.Call)
                if call.number == wire.UNANSWERED:
                    self._take(call.request)
                else:
                    answer = asyncio.create_task(self._answer(call, writer))
                    self._answers.add(answer)
                    answer.add_done_callback(self._answers.discard)
        except EOFError:
            log.debug("the leader has hung up")
        finally:
            await self._stop()
            writer.close()

    async def _stop(self) -> None:
        for owner in self._owners.values():
            owner.is_open = False
        for answer in self._answers:
            answer.cancel()
        await asyncio.gather(*self._answers, return_exceptions=True)
        if self._port is not None:
            await self._port.close(_CLOSE_TIMEOUT_S)

    # --- calls without an answer: in the order in which they come ------------------------------

    def _take(self, request: wire.Request) -> None:
        match request:
            case wire.Submit():
                self._submit(request)
            case wire.Withdraw():
                if request.owner in self._owners:
                    self._owners[request.owner].is_open = False
            case wire.Wake():
                if self._port is not None:  # else it has been closed: nothing is to be seen
                    self._port.wake()
            case _:
                raise InternalError(f"{type(request).__name__} wants a number", stage="transfer")

    def _submit(self, request: wire.Submit) -> None:
        port = self._opened
        owner = self._owners.setdefault(request.owner, _Owner())
        owner.num_bytes_left = request.owner_bytes_left
        owner.num_writes += 1
        content, conversion, layout = None, None, port.endpoint.layout
        if request.conversion is not None:
            conversion = wire.unpack_conversion(request.conversion, layout)
            layout = conversion.staged
        if request.content is not None:
            content = wire.unpack_content(request.content, layout)
        write = Write(
            rank=port.endpoint.tp_rank,
            peer=PeerName(request.peer),
            ops=wire.unpack_copies(request.copies),
            notification=request.notification,
            content=content,
            conversion=conversion,
            expires_ns=request.expires_ns,
            owner=owner,
        )
        self._numbers[write] = request.write, request.owner
        port.submit(write)

    # --- calls with one ------------------------------------------------------------------------

    async def _answer(self, call: wire.Call, writer: asyncio.StreamWriter) -> None:
        try:
            result = await self._result(call.request)
        except IsthmusError as error:
            result = wire.Failed(ErrorDetail.of(error))
        except TimeoutError:
            result = wire.TimedOut()
        except Exception as error:
            log.exception("a call of the leader failed")
            problem = InternalError(f"{type(error).__name__}: {error}", stage="transfer")
            result = wire.Failed(ErrorDetail.of(problem))
        writer.write(wire.encode(wire.Reply(call.number, self._clock.monotonic_ns(), result)))

    async def _result(self, request: wire.Request) -> wire.Result:
        match request:
            case wire.Open():
                return self._open(request)
            case wire.Look():
                return await self._look(request.patience_s)
            case wire.AddPeer():
                return wire.Added(
                    await self._opened.add_peer(request.peer, request.connector, request.timeout_s)
                )
            case wire.RemovePeer():
                await self._opened.remove_peer(PeerName(request.peer), request.timeout_s)
                return wire.Removed()
            case wire.CountCorrupt():
                layout = self._opened.endpoint.layout
                content = wire.unpack_content(request.content, layout)
                return wire.Counted(await self._opened.count_corrupt(content))
            case wire.Close():
                port, self._port = self._opened, None
                return wire.Closed(await port.close(request.timeout_s))
            case _:
                raise InternalError(f"{type(request).__name__} has no answer", stage="transfer")

    @property
    def _opened(self) -> LocalPort:
        if self._port is None:
            raise InternalError("the rank's port is not open", stage="transfer")
        return self._port

    def _open(self, request: wire.Open) -> wire.Opened:
        me = InstanceRef(InstanceId(request.instance_id), request.epoch, request.address)
        port = self._port = self._open_port(me)
        return wire.Opened(port.endpoint, port.checksum)

    async def _look(self, patience_s: float) -> wire.Seen:
        sweep = await self._opened.sweep(patience_s)
        ended = []
        peers = {write.peer for write, outcome, _ in sweep.ended if outcome is Outcome.DONE}
        rates = [(peer, self._opened.bytes_per_s(peer)) for peer in peers]
        for write, outcome, error in sweep.ended:
            number, owner_number = self._numbers.pop(write)
            owner = self._owners[owner_number]
            owner.num_writes -= 1
            if not owner.num_writes:
                del self._owners[owner_number]
            ended.append((number, outcome, ErrorDetail.of(error) if error is not None else None))
        return wire.Seen(
            ended=tuple(ended),
            notifications=tuple(sweep.notifications),
            num_posted=sweep.num_posted,
            error=repr(sweep.error) if sweep.error is not None else "",
            rates=tuple((peer, rate) for peer, rate in rates if rate is not None),
        )
