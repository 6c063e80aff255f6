"""torch.distributed's point-to-point operations: gloo between host memories, NCCL between GPUs.

Both ends of such an operation take part, so each direction of a pair has a connection that says
what comes, a group of two ranks of its own for the bytes, and a thread on either side::

    writer's thread                              target's thread
    ──join: name, token──▶                       checks who it is, within seconds
    ──name of the group──▶                       both make the group (first write only)
    ──header: rows, notification──▶              checks the rows against its own memory
    ══ the bytes, packed, in pieces ══▶          receives a piece, copies it to its places
                                ◀──ack──         the notification can be taken

- No process-wide state of torch is used: groups are made and dropped here.
- Bytes land by the target's own thread alone, which stops at ``close``; DONE means acknowledged.
- A peer that ends closes its connection: open writes to it fail. One that stops leaves them in
  progress until the group's timeout fails them.
"""

from __future__ import annotations

import itertools
import secrets
import socket
import time
from collections.abc import Sequence
from functools import partial

import msgspec

from isthmus.common.addresses import join_address, listen_on
from isthmus.common.errors import HandshakeError, TransferError
from isthmus.kvtransfer.connectors.collective_links import (
    Incoming,
    Outgoing,
    OutgoingWrite,
    Receiver,
    serve_store,
)
from isthmus.kvtransfer.connectors.collective_memory import memory_of
from isthmus.kvtransfer.connectors.local import check_bounds
from isthmus.kvtransfer.copies import Copies
from isthmus.kvtransfer.interface import (
    CopyOp,
    MemoryRegion,
    PeerName,
    Reached,
    WriteHandle,
    WriteState,
)

_CONNECT_S = 2.0
_JOIN_S = 2.0  # for all links together: nothing lands any more, whether they end or not
_BACKLOG = 128


class _Metadata(msgspec.Struct, frozen=True):
    name: str
    host: str
    port: int
    store_port: int
    token: bytes


class CollectiveConnector:
    name = "collective"
    is_direct = False

    def __init__(self, agent_name: str, host: str) -> None:
        """Peers connect to ``host``, an address of this machine."""
        self.domain = "cpu"
        self._me = agent_name
        self._host = host
        self._token = secrets.token_bytes(16)
        self._region: MemoryRegion | None = None
        self._mine: Receiver | None = None
        self._listener: socket.socket | None = None
        self._outgoing: dict[PeerName, tuple[Outgoing, MemoryRegion]] = {}
        self._incoming: list[Incoming] = []
        self._handles = itertools.count(1)
        self._writes: dict[WriteHandle, tuple[Outgoing, OutgoingWrite]] = {}

    def register(self, region: MemoryRegion) -> None:
        try:
            self._listener = listen_on(self._host, _BACKLOG)
            store = serve_store(self._host)
        except (OSError, RuntimeError) as error:
            self.close()
            raise TransferError(
                f"collective cannot listen on {self._host}: {error}", stage="register"
            ) from error
        self._listener.setblocking(False)
        self._region = region
        self._mine = Receiver(memory_of(region), self._token, store, self._host)
        self.domain = region.device.partition(":")[0]

    def metadata(self) -> bytes:
        if self._listener is None or self._mine is None:
            raise TransferError("no region is registered", stage="register")
        ports = self._listener.getsockname()[1], self._mine.store.port
        return msgspec.msgpack.encode(_Metadata(self._me, self._host, *ports, self._token))

    def add_peer(self, metadata: bytes, region: MemoryRegion) -> PeerName:
        return self.reach(metadata, region).admit()

    def reach(self, metadata: bytes, region: MemoryRegion) -> Reached:
        mine = self._mine
        try:
            theirs = msgspec.msgpack.decode(metadata, type=_Metadata)
        except msgspec.DecodeError as error:
            raise HandshakeError(
                "not a collective connector's metadata", stage="handshake"
            ) from error
        if mine is None:
            raise HandshakeError("no region is registered", stage="handshake")
        peer = PeerName(theirs.name)
        try:
            connection = socket.create_connection((theirs.host, theirs.port), _CONNECT_S)
            store_address = (theirs.host, theirs.store_port)
            try:
                link = Outgoing(connection, mine, self._me, theirs.token, store_address)
            except OSError:
                connection.close()
                raise
        except OSError as error:
            raise HandshakeError(
                f"{peer} does not answer at {join_address(theirs.host, theirs.port)}: {error}",
                stage="handshake",
            ) from error
        return Reached(partial(self._admit, peer, link, region), link.close)

    def _admit(self, peer: PeerName, link: Outgoing, region: MemoryRegion) -> PeerName:
        if self._mine is None:
            link.close()
            raise HandshakeError("this end has closed", stage="handshake")
        self.remove_peer(peer)
        self._outgoing[peer] = link, region
        return peer

    def remove_peer(self, peer: PeerName) -> None:
        link, _ = self._outgoing.pop(peer, (None, None))
        if link is not None:
            link.close()

    def post_write(self, peer: PeerName, ops: Sequence[CopyOp], notification: bytes) -> WriteHandle:
        link, region = self._outgoing.get(peer, (None, None))
        if link is None or region is None or self._region is None:
            raise TransferError(f"{peer} is not a peer", stage="transfer")
        copies = Copies.of(ops)
        check_bounds(copies, self._region, region)
        if link.has_ended:
            raise TransferError(f"{peer} has ended", stage="transfer")
        handle = WriteHandle(next(self._handles))
        self._writes[handle] = link, link.post(copies, notification)
        return handle

    def poll(self, handle: WriteHandle) -> WriteState:
        link, write = self._writes[handle]
        if write.state is WriteState.IN_PROGRESS:
            link.read_acks()
        return write.state

    def release(self, handle: WriteHandle) -> None:
        del self._writes[handle]

    def take_notifications(self) -> list[tuple[PeerName, bytes]]:
        self._accept()
        self._incoming = [link for link in self._incoming if not link.has_ended]
        if self._mine is None:
            return []
        arrived = self._mine.arrived
        return [arrived.popleft() for _ in range(len(arrived))]

    def close(self) -> None:
        for peer in list(self._outgoing):
            self.remove_peer(peer)
        for link in self._incoming:
            link.shut()
        deadline_s = time.monotonic() + _JOIN_S
        for link in self._incoming:
            link.join(max(0.0, deadline_s - time.monotonic()))
        self._incoming.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._mine = self._region = None

    # --- inside --------------------------------------------------------------------------------

    def _accept(self) -> None:
        while self._listener is not None and self._mine is not None:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # nobody is waiting, or whoever was has gone
                return
            self._incoming.append(Incoming(connection, self._mine))
