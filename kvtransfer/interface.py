"""The connector: the thing that moves KV bytes. One contract suite runs over every one of them.

A connector knows addresses and bytes; sessions, tickets, epochs and deadlines are above it. It is
driven by one thread at a time. ``post_write`` may copy synchronously (shared memory), so callers
keep it off the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol, runtime_checkable

PeerName = NewType("PeerName", str)
WriteHandle = NewType("WriteHandle", int)


class WriteState(Enum):
    IN_PROGRESS = "in_progress"
    DONE = "done"  # every byte is in the peer's memory: nothing of this write can still land
    FAILED = "failed"  # any part of it may have landed, or land until the connection has drained


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    base_address: int
    num_bytes: int
    device: str = "cpu"
    fd: int = -1
    """Of the memory file that this is a mapping of, from its start; −1 where nobody else can map
    it. The region's owner keeps it open."""


@dataclass(frozen=True, slots=True)
class CopyOp:
    """Bytes from the local region to the peer's region; offsets from the regions' bases."""

    source_offset: int
    target_offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Reached:
    """A peer that has answered and is none yet."""

    admit: Callable[[], PeerName]
    """The rest of ``add_peer``, on the connector's thread. Raises HandshakeError."""
    drop: Callable[[], None]
    """Instead of that, from any thread."""


@runtime_checkable
class Reaching(Protocol):
    """A connector whose ``add_peer`` waits for the peer. It also does that in two steps, so that
    meanwhile its thread is there for the others."""

    def reach(self, metadata: bytes, region: MemoryRegion) -> Reached:
        """All that waits, from any thread; raises like ``add_peer``."""
        ...


class Connector(Protocol):
    name: str
    domain: str
    """Ends meet only within one domain; "" = wherever they are."""
    is_direct: bool
    """Devices move the bytes (RDMA, GPU memory), where the other end says so too. Both are true
    from ``register`` on."""

    def register(self, region: MemoryRegion) -> None:
        """Makes the region readable and writable for peers. Called once."""
        ...

    def metadata(self) -> bytes:
        """What a peer needs for ``add_peer``."""
        ...

    def add_peer(self, metadata: bytes, region: MemoryRegion) -> PeerName:
        """Raises HandshakeError when the peer cannot be reached or its metadata is not ours."""
        ...

    def remove_peer(self, peer: PeerName) -> None:
        """Forgets a peer; its open writes become FAILED. Unknown peers are ignored."""
        ...

    def post_write(self, peer: PeerName, ops: Sequence[CopyOp], notification: bytes) -> WriteHandle:
        """Starts a write. When it is DONE all bytes are in the peer's memory and
        ``notification`` will come out of the peer's ``take_notifications``.

        Without ``ops`` only the notification is sent; an empty ``notification`` is not sent.
        Raises TransferError when nothing was started."""
        ...

    def poll(self, handle: WriteHandle) -> WriteState: ...

    def release(self, handle: WriteHandle) -> None:
        """Gives back a handle whose state is DONE or FAILED."""
        ...

    def take_notifications(self) -> list[tuple[PeerName, bytes]]:
        """Notifications that arrived since the last call."""
        ...

    def close(self) -> None: ...
