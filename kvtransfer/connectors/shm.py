"""Processes of one host that map each other's KV: a write is a memmove into the peer's memory.

::

    our store (a memory file) ──memmove──▶ the peer's store, mapped here
    our notifications ────────── socket ──▶ the peer's take_notifications

- Nothing of a write is left when ``post_write`` returns but, while the socket is full, its
  notification: no byte can land later. A stopped peer's memory is written all the same.
- The memory file is sealed against shrinking, so that writing into a dead or malicious peer's
  memory cannot raise SIGBUS; it has no name, so nothing stays behind, however a process ends.
- A peer that has ended shows as a closed socket: what is written then fails, and its store is
  unmapped at the next look for notifications.
- Who may map a store is ``doorman``'s: the same user in the same network namespace.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from isthmus.common.errors import HandshakeError, TransferError
from isthmus.common.shared_memory import cannot_shrink, map_shared_memory
from isthmus.kvtransfer.connectors.copying import copy_rows
from isthmus.kvtransfer.connectors.doorman import Address, Doorman, visit
from isthmus.kvtransfer.connectors.frames import FrameReader, frame
from isthmus.kvtransfer.connectors.host import sharing_domain
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


class _Metadata(msgspec.Struct, frozen=True):
    name: str
    domain: str
    address: Address


@dataclass(slots=True)
class _Target:
    """A peer's store as this process writes to it. ``num_sent`` and ``num_queued`` count bytes of
    notifications since the beginning."""

    region: MemoryRegion
    mapping: mmap.mmap
    base_address: int
    connection: socket.socket
    outbox: bytearray = field(default_factory=bytearray)
    num_sent: int = 0
    is_gone: bool = False

    @property
    def num_queued(self) -> int:
        return self.num_sent + len(self.outbox)

    def flush(self) -> None:
        """Sends what the socket takes, and sees whether the peer has ended: the socket then takes
        nothing, and the peer says nothing after its welcome, so whatever can be read is its end.
        One of the two is asked, since each costs more than all else but the copy."""
        try:
            if not self.outbox:
                self.is_gone = self.is_gone or not self.connection.recv(1)
            while self.outbox:
                count = self.connection.send(self.outbox)
                self.num_sent += count
                del self.outbox[:count]
        except BlockingIOError:
            pass
        except OSError:
            self.is_gone = True

    def close(self) -> None:
        self.is_gone = True
        self.connection.close()
        self.mapping.close()


@dataclass(slots=True)
class _OpenWrite:
    target: _Target
    ends_at: int  # of the target's notification bytes
    state: WriteState = WriteState.IN_PROGRESS


class ShmConnector:
    name = "shm"
    is_direct = False

    def __init__(self, agent_name: str) -> None:
        self.domain = sharing_domain()
        self._me = agent_name
        self._region: MemoryRegion | None = None
        self._doorman: Doorman | None = None
        self._targets: dict[PeerName, _Target] = {}
        self._sources: list[tuple[PeerName, socket.socket, FrameReader]] = []
        self._handles = itertools.count(1)
        self._writes: dict[WriteHandle, _OpenWrite] = {}

    def register(self, region: MemoryRegion) -> None:
        if region.fd < 0:
            raise TransferError(
                "connector shm needs KV that others can map: engine.kv_memory=shared",
                stage="register",
            )
        if not cannot_shrink(region.fd):
            raise TransferError("shared KV must be sealed against shrinking", stage="register")
        self._region = region
        self._doorman = Doorman(region.fd)

    def metadata(self) -> bytes:
        if self._doorman is None:
            raise TransferError("no region is registered", stage="register")
        return msgspec.msgpack.encode(_Metadata(self._me, self.domain, self._doorman.address))

    def add_peer(self, metadata: bytes, region: MemoryRegion) -> PeerName:
        return self.reach(metadata, region).admit()

    def reach(self, metadata: bytes, region: MemoryRegion) -> Reached:
        try:
            theirs = msgspec.msgpack.decode(metadata, type=_Metadata)
        except msgspec.DecodeError as error:
            raise HandshakeError("not a shm connector's metadata", stage="handshake") from error
        if theirs.domain != self.domain:
            raise HandshakeError(
                f"shared memory needs one host, user and network namespace: {self.domain} here, "
                f"{theirs.domain} at {theirs.name}",
                stage="handshake",
            )
        peer = PeerName(theirs.name)
        connection, fd = visit(theirs.address, self._me)
        try:
            mapping = _mapped(fd, region, peer)
        except HandshakeError:
            connection.close()
            raise
        finally:
            os.close(fd)
        target = _Target(region, mapping, _address(mapping), connection)
        return Reached(partial(self._admit, peer, target), target.close)

    def _admit(self, peer: PeerName, target: _Target) -> PeerName:
        if self._doorman is None:
            target.close()
            raise HandshakeError("this end has closed", stage="handshake")
        self.remove_peer(peer)
        self._targets[peer] = target
        return peer

    def remove_peer(self, peer: PeerName) -> None:
        target = self._targets.pop(peer, None)
        if target is None:
            return
        for write in self._writes.values():
            if write.target is target and write.state is WriteState.IN_PROGRESS:
                write.state = WriteState.FAILED
        target.close()

    def post_write(self, peer: PeerName, ops: Sequence[CopyOp], notification: bytes) -> WriteHandle:
        target = self._targets.get(peer)
        if target is None or self._region is None:
            raise TransferError(f"{peer} is not a peer", stage="transfer")
        copies = Copies.of(ops)
        check_bounds(copies, self._region, target.region)
        if target.is_gone:  # as far as is known; the memory of a dead peer can be written
            raise TransferError(f"{peer} has ended", stage="transfer")
        copy_rows(copies.rows, self._region.base_address, target.base_address)
        if notification:
            target.outbox += frame(notification)
        handle = WriteHandle(next(self._handles))
        self._writes[handle] = _OpenWrite(target, target.num_queued)
        self.poll(handle)
        return handle

    def poll(self, handle: WriteHandle) -> WriteState:
        write = self._writes[handle]
        if write.state is WriteState.IN_PROGRESS:
            write.target.flush()
            if write.target.num_sent >= write.ends_at and not write.target.is_gone:
                write.state = WriteState.DONE
            elif write.target.is_gone:
                write.state = WriteState.FAILED
        return write.state

    def release(self, handle: WriteHandle) -> None:
        del self._writes[handle]

    def take_notifications(self) -> list[tuple[PeerName, bytes]]:
        if self._doorman is None:
            return []
        for peer, target in list(self._targets.items()):
            target.flush()
            if target.is_gone:  # its memory would stay allocated as long as it is mapped here
                self.remove_peer(peer)
        while not self._doorman.arrived.empty():
            self._sources.append((*self._doorman.arrived.get(), FrameReader()))
        arrived: list[tuple[PeerName, bytes]] = []
        for source in list(self._sources):
            name, connection, reader = source
            is_open = reader.read(connection)
            arrived.extend((name, payload) for payload in reader.take())
            if not is_open:
                connection.close()
                self._sources.remove(source)
        return arrived

    def close(self) -> None:
        for peer in list(self._targets):
            self.remove_peer(peer)
        if self._doorman is not None:
            self._doorman.close()
            self._doorman = None
        for _, connection, _ in self._sources:
            connection.close()
        self._sources.clear()
        self._region = None


def _mapped(fd: int, region: MemoryRegion, peer: PeerName) -> mmap.mmap:
    size = os.fstat(fd).st_size
    if size < region.num_bytes:
        problem = f"its memory file has {size} bytes, not {region.num_bytes}"
    elif not cannot_shrink(fd):
        problem = "its memory file may shrink"
    else:
        try:
            return map_shared_memory(fd, region.num_bytes)
        except OSError as error:
            problem = f"its memory cannot be mapped: {error}"
    raise HandshakeError(f"shared memory: {peer}: {problem}", stage="handshake")


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))
