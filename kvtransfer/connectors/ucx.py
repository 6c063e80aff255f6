"""UCX by ucxx: messages of two sides between processes and machines, host and GPU memory.

ucxx has no remote memory in Python, so both ends take part. Each direction of a pair is an endpoint
of its own, over which the writer says what comes::

    writer                                    target
    ──join: name, token─────────────────▶     checks who it is
    ──header: rows──────────────────────▶     checks the rows against its own memory
    ══ the bytes, from their places ════▶     receives them into theirs, small ones packed
                                    ◀──ack──  all have landed
    ──note: the notification────────────▶     can be taken
                                    ◀──ack──

- There is no thread: like ``nixl`` it makes progress only inside ``poll`` and
  ``take_notifications``, on either side, so bytes land only while the *target* takes
  notifications. None lands once it has closed.
- Where UCX reads the writer's memory from the target's side (RDMA), it reads on when the writer has
  given the write up. Hence the notification, without which nothing is believed, leaves only after
  the acknowledgement, and never of a write that was given up.
- Within a host UCX 1.21 goes over the loopback device: CMA and shared memory are for endpoints that
  do not notice a peer's death.
- A killed peer fails open writes; a stopped one leaves them in progress for ever.
- Nobody waits in ``add_peer``: a peer that cannot be reached fails the writes to it.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from isthmus.common.addresses import join_address
from isthmus.common.errors import HandshakeError, TransferError
from isthmus.common.logging import get_logger
from isthmus.kvtransfer.connectors.local import check_bounds
from isthmus.kvtransfer.connectors.ucx_library import (
    Feature,
    UCXContext,
    UCXListener,
    UCXWorker,
)
from isthmus.kvtransfer.connectors.ucx_line import Store, UcxLine, line_errors
from isthmus.kvtransfer.connectors.ucx_link import (
    Inbox,
    Incoming,
    LineError,
    Outgoing,
    OutgoingWrite,
)
from isthmus.kvtransfer.connectors.ucx_process import may_use_rdma
from isthmus.kvtransfer.copies import Copies
from isthmus.kvtransfer.interface import (
    CopyOp,
    MemoryRegion,
    PeerName,
    WriteHandle,
    WriteState,
)

# The target reads, so that a writer never touches memory of a target that has closed.
_OPTIONS = {"RNDV_SCHEME": "get_zcopy"}
_log = get_logger("kvtransfer")
_MAX_ROUNDS = 64  # of one call, while something happens in each
_CLOSE_S = 0.5  # for UCX to be done with what was given up


class _Metadata(msgspec.Struct, frozen=True):
    name: str
    host: str
    port: int
    token: bytes


class UcxConnector:
    name = "ucx"
    domain = ""

    def __init__(self, agent_name: str, host: str) -> None:
        """Peers connect to ``host``, an address of this machine."""
        self._me = agent_name
        self._host = host
        self._token = secrets.token_bytes(16)
        self.is_direct = False
        self._worker: Any = None
        self._listener: Any = None
        self._region: MemoryRegion | None = None
        self._inbox: Inbox | None = None
        self._outgoing: dict[PeerName, tuple[Outgoing, UcxLine, MemoryRegion]] = {}
        self._incoming: list[tuple[Incoming, UcxLine]] = []
        self._store: Store | None = None
        self._ended: list[UcxLine] = []  # which UCX may not have finished with
        self._handles = itertools.count(1)
        self._writes: dict[WriteHandle, tuple[Outgoing, OutgoingWrite]] = {}

    def register(self, region: MemoryRegion) -> None:
        if ":" in self._host:
            raise TransferError(
                f"ucx listens on IPv4 addresses alone, and this is {self._host}", stage="register"
            )
        try:
            with line_errors():
                features = (Feature.TAG, Feature.STREAM)
                self._worker = UCXWorker(UCXContext(dict(_OPTIONS), feature_flags=features))
                self._listener = UCXListener.create(self._worker, 0, self._accept)
        except LineError as error:
            raise TransferError(f"UCX does not start here: {error}", stage="register") from error
        self._region = region
        self._store = Store(region)
        self._inbox = Inbox(region.num_bytes, self._token)
        self.is_direct = region.device != "cpu" or may_use_rdma()

    def metadata(self) -> bytes:
        if self._listener is None:
            raise TransferError("no region is registered", stage="register")
        return msgspec.msgpack.encode(
            _Metadata(self._me, self._host, self._listener.port, self._token)
        )

    def add_peer(self, metadata: bytes, region: MemoryRegion) -> PeerName:
        try:
            theirs = msgspec.msgpack.decode(metadata, type=_Metadata)
        except msgspec.DecodeError as error:
            raise HandshakeError("not a ucx connector's metadata", stage="handshake") from error
        if self._store is None:
            raise HandshakeError("no region is registered", stage="handshake")
        peer = PeerName(theirs.name)
        self.remove_peer(peer)
        try:
            with line_errors():
                endpoint = self._worker.create_endpoint_from_hostname(
                    theirs.host, theirs.port, endpoint_error_handling=True
                )
            line = UcxLine(endpoint, self._store)
            try:
                link = Outgoing(line, self._me, theirs.token)
            except LineError:
                self._end(line)
                raise
        except LineError as error:
            raise HandshakeError(
                f"{peer} cannot be reached at {join_address(theirs.host, theirs.port)}: {error}",
                stage="handshake",
            ) from error
        self._outgoing[peer] = link, line, region
        return peer

    def remove_peer(self, peer: PeerName) -> None:
        link, line, _ = self._outgoing.pop(peer, (None, None, None))
        if link is not None and line is not None:
            link.fail()
            self._end(line)

    def post_write(self, peer: PeerName, ops: Sequence[CopyOp], notification: bytes) -> WriteHandle:
        link, _, region = self._outgoing.get(peer, (None, None, None))
        if link is None or region is None or self._region is None:
            raise TransferError(f"{peer} is not a peer", stage="transfer")
        copies = Copies.of(ops)
        check_bounds(copies, self._region, region)
        if not link.is_alive:
            raise TransferError(f"{peer} has ended", stage="transfer")
        write = link.post(copies, notification)
        handle = WriteHandle(next(self._handles))
        self._writes[handle] = link, write
        self.poll(handle)
        return handle

    def poll(self, handle: WriteHandle) -> WriteState:
        link, write = self._writes[handle]
        if write.state is WriteState.IN_PROGRESS:
            self._drive(lambda: (link,))
        return write.state

    def release(self, handle: WriteHandle) -> None:
        del self._writes[handle]

    def take_notifications(self) -> list[tuple[PeerName, bytes]]:
        if self._inbox is None:
            return []
        self._drive(lambda: [link for link, _ in self._incoming])
        self._drop_ended()
        arrived, self._inbox.arrived = self._inbox.arrived, []
        return arrived

    def close(self) -> None:
        for peer in list(self._outgoing):
            self.remove_peer(peer)
        for _, line in self._incoming:
            self._end(line)
        self._incoming.clear()
        self._listener = None
        deadline_s = time.monotonic() + _CLOSE_S
        while self._ended and time.monotonic() < deadline_s:
            self._worker.progress()
            self._ended = [line for line in self._ended if not line.is_settled]
        if self._worker is not None:
            self._worker.cancel_inflight_requests()
        self._worker = self._store = self._inbox = self._region = None
        self._ended.clear()

    # --- inside --------------------------------------------------------------------------------

    def _drive(self, links: Callable[[], Iterable[Outgoing | Incoming]]) -> None:
        """While something happens. Links are looked at between UCX's steps, so that what an
        announced write brings finds its places: else UCX would keep it and copy it later."""
        for _ in range(_MAX_ROUNDS):
            has_moved = self._worker.progress_once()
            for link in links():
                has_moved |= link.advance()
            if not has_moved:
                return

    def _accept(self, request: int) -> None:
        """Inside of the worker's progress, which would only print what is raised."""
        assert self._inbox is not None
        assert self._store is not None
        try:
            with line_errors():
                endpoint = self._listener.create_endpoint_from_conn_request(
                    request, endpoint_error_handling=True
                )
            line = UcxLine(endpoint, self._store)
        except LineError as error:
            _log.warning("nobody could be let in", problem=str(error))
            return
        self._incoming.append((Incoming(line, self._inbox), line))

    def _drop_ended(self) -> None:
        for each in [each for each in self._incoming if not each[1].is_alive]:
            self._incoming.remove(each)
            self._end(each[1])
        self._ended = [line for line in self._ended if not line.is_settled]

    def _end(self, line: UcxLine) -> None:
        """It is kept until UCX has finished with what it was given."""
        line.close()
        self._ended.append(line)
