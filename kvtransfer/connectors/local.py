"""Peers in one process: a write is a memmove. For tests and for instances that share a process.

Every connector of the process meets the others in one ``LocalFabric``, under a lock that is held
while bytes move, so a connector that closes is never written to afterwards.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from isthmus.common.errors import HandshakeError, TransferError
from isthmus.kvtransfer.connectors.copying import copy_rows
from isthmus.kvtransfer.connectors.host import process_domain
from isthmus.kvtransfer.copies import Copies
from isthmus.kvtransfer.interface import (
    CopyOp,
    MemoryRegion,
    PeerName,
    WriteHandle,
    WriteState,
)


class _Metadata(msgspec.Struct, frozen=True):
    pid: int
    name: str


@dataclass(slots=True)
class _Mailbox:
    region: MemoryRegion
    notifications: deque[tuple[PeerName, bytes]] = field(default_factory=deque)


class LocalFabric:
    """Who can be reached: name → memory and mailbox."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.mailboxes: dict[PeerName, _Mailbox] = {}


_FEW = 8  # so many copies are looked at faster one by one than as columns
PROCESS_FABRIC = LocalFabric()


class LocalConnector:
    name = "local"
    is_direct = False

    def __init__(self, agent_name: str, fabric: LocalFabric = PROCESS_FABRIC) -> None:
        """``agent_name`` is unique among the fabric's open connectors."""
        self.domain = process_domain()
        self._me = PeerName(agent_name)
        self._fabric = fabric
        self._region: MemoryRegion | None = None
        self._peers: dict[PeerName, MemoryRegion] = {}
        self._handles = itertools.count(1)
        self._states: dict[WriteHandle, WriteState] = {}

    def register(self, region: MemoryRegion) -> None:
        with self._fabric.lock:
            if self._me in self._fabric.mailboxes:
                raise TransferError(f"a connector named {self._me} is open", stage="register")
            self._fabric.mailboxes[self._me] = _Mailbox(region)
        self._region = region

    def metadata(self) -> bytes:
        return msgspec.msgpack.encode(_Metadata(os.getpid(), self._me))

    def add_peer(self, metadata: bytes, region: MemoryRegion) -> PeerName:
        try:
            peer = msgspec.msgpack.decode(metadata, type=_Metadata)
        except msgspec.DecodeError as error:
            raise HandshakeError("not a local connector's metadata", stage="handshake") from error
        name = PeerName(peer.name)
        if peer.pid != os.getpid() or name not in self._fabric.mailboxes:
            raise HandshakeError(
                f"{name} (process {peer.pid}) is not in process {os.getpid()}: the local "
                "connector reaches peers of its own process only",
                stage="handshake",
            )
        self._peers[name] = region
        return name

    def remove_peer(self, peer: PeerName) -> None:
        self._peers.pop(peer, None)

    def post_write(self, peer: PeerName, ops: Sequence[CopyOp], notification: bytes) -> WriteHandle:
        with self._fabric.lock:
            mailbox = self._fabric.mailboxes.get(peer)
            if peer not in self._peers or mailbox is None or self._region is None:
                raise TransferError(f"{peer} is not a peer", stage="transfer")
            check_bounds(ops, self._region, self._peers[peer])
            there, here = self._peers[peer].base_address, self._region.base_address
            copy_rows(Copies.of(ops).rows, here, there)
            if notification:
                mailbox.notifications.append((self._me, notification))
        handle = WriteHandle(next(self._handles))
        self._states[handle] = WriteState.DONE
        return handle

    def poll(self, handle: WriteHandle) -> WriteState:
        return self._states[handle]

    def release(self, handle: WriteHandle) -> None:
        del self._states[handle]

    def take_notifications(self) -> list[tuple[PeerName, bytes]]:
        mailbox = self._fabric.mailboxes[self._me]
        return [mailbox.notifications.popleft() for _ in range(len(mailbox.notifications))]

    def close(self) -> None:
        with self._fabric.lock:
            if self._region is not None:
                del self._fabric.mailboxes[self._me]
        self._region = None


def check_bounds(ops: Sequence[CopyOp], source: MemoryRegion, target: MemoryRegion) -> None:
    """Raises TransferError before the first byte when any copy leaves either region."""
    copies = Copies.of(ops)
    if len(copies) <= _FEW and _are_within(copies, source.num_bytes, target.num_bytes):
        return
    starts, num_bytes = copies.rows[:, :2], copies.rows[:, 2:]
    malformed = (starts < 0).any(axis=1) | (num_bytes[:, 0] < 1)
    leaving = (starts + num_bytes > (source.num_bytes, target.num_bytes)).any(axis=1)
    for index in np.flatnonzero(malformed | leaving)[:1].tolist():
        problem = "is malformed" if malformed[index] else "leaves a region"
        raise TransferError(f"{copies[index]} {problem}", stage="transfer")


def _are_within(copies: Copies, source_bytes: int, target_bytes: int) -> bool:
    for source, target, size in copies.rows.tolist():
        if size < 1 or not (0 <= source <= source_bytes - size):
            return False
        if not 0 <= target <= target_bytes - size:
            return False
    return True
