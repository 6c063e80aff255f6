"""One write on its way from a session to a peer, and what a sweep of the driver saw of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from isthmus.common.errors import IsthmusError
from isthmus.common.ids import BlockId
from isthmus.kvtransfer.checksums import ChunkContent, Parts
from isthmus.kvtransfer.conversion import Conversion
from isthmus.kvtransfer.copies import Copies
from isthmus.kvtransfer.interface import CopyOp, PeerName, WriteHandle
from isthmus.kvtransfer.link import Departure


class Outcome(Enum):
    DONE = "done"  # all of it is in the peer's memory
    FAILED = "failed"  # any part of it may be there, or still land
    NOT_POSTED = "not_posted"  # none of it was ever sent


class WriteOwner(Protocol):
    @property
    def is_open(self) -> bool:
        """Read from the connector's thread: a write of an ended owner is not posted."""
        ...

    @property
    def num_bytes_left(self) -> int:
        """Read from the connector's thread: what is not yet in the peer's memory."""
        ...

    def write_ended(self, write: Write, outcome: Outcome, error: IsthmusError | None) -> None: ...


class Stage(Protocol):
    """Makes what a write sends, right before it is posted; on the connector's thread."""

    def try_fill(self, copies: Copies) -> Copies | None:
        """``copies`` from where it is staged, which was counted from 0. None while there is no room
        for it: the write then waits for others to end."""
        ...

    def release(self) -> None:
        """The write has ended, posted or not."""
        ...

    def read(self, block_id: BlockId) -> Parts:
        """A ``BlockReader``."""
        ...


@dataclass(slots=True, eq=False)
class Write:
    """One write on its way. ``expires_ns`` is monotonic: it is never posted from then on.

    A ``notification`` that is costly to make is made on the connector's thread, right before the
    write is posted; so is what ``ops`` copy from, where that is a ``conversion`` of the store.
    """

    peer: PeerName
    ops: Sequence[CopyOp]
    notification: bytes | Callable[[], bytes]
    expires_ns: int
    owner: WriteOwner
    is_ready: Callable[[], bool] | None = None
    """Until this says True, on the connector's thread, what is to be written is being computed."""
    rank: int = 0  # of this instance, which posts it
    content: ChunkContent | None = None  # its checksums are to be added to the notification
    conversion: Conversion | None = None
    stage: Stage | None = None  # made of it by the rank that posts
    handle: WriteHandle | None = None
    num_bytes: int = field(init=False)
    queued_ns: int = 0  # from when on it could have been posted
    departure: Departure | None = None

    def __post_init__(self) -> None:
        self.num_bytes = Copies.of(self.ops).num_bytes


@dataclass(slots=True)
class Sweep:
    """What one sweep saw. ``started_ns`` (monotonic) was read before anything else."""

    started_ns: int
    ended: list[tuple[Write, Outcome, IsthmusError | None]] = field(default_factory=list)
    notifications: list[tuple[PeerName, bytes]] = field(default_factory=list)
    num_posted: int = 0
    error: Exception | None = None  # of taking notifications

    @property
    def is_empty(self) -> bool:
        return not (self.ended or self.notifications or self.num_posted)

    def end(self, write: Write, outcome: Outcome, error: IsthmusError | None = None) -> None:
        if write.stage is not None:
            write.stage.release()
        self.ended.append((write, outcome, error))
