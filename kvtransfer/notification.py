"""What one write says to the peer's process once its bytes are there: 40 bytes, little-endian.

::

    0      4        6      8             24     28           30          32           36
    magic  version  flags  transfer_id   chunk  layer_first  layer_last  first_block  num_blocks

A notification names the rectangle it covers, blocks × layers, so that the receiver proves by itself
that every byte has arrived instead of trusting a count. ABORTED carries no rectangle: the sender
has given up; with QUIET it also proves that none of its writes can still land.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntFlag

from isthmus.common.ids import TransferId

NOTIFICATION_VERSION = 1
_MAGIC = b"IKVN"
_STRUCT = struct.Struct("<4sHH16sIHHII")
NUM_BYTES = _STRUCT.size


class Flags(IntFlag):
    NONE = 0
    LAST = 1  # no chunk has a higher number
    ABORTED = 2  # the sender gave up and will post nothing more
    QUIET = 4  # with ABORTED: each of its writes was done or never posted


_KNOWN_FLAGS = int(Flags.LAST | Flags.ABORTED | Flags.QUIET)


@dataclass(frozen=True, slots=True)
class Notification:
    """``first_block`` indexes the ticket's target blocks; ``layer_last`` is inclusive."""

    transfer_id: TransferId
    chunk: int = 0
    layer_first: int = 0
    layer_last: int = 0
    first_block: int = 0
    num_blocks: int = 0
    flags: Flags = Flags.NONE

    def encode(self) -> bytes:
        return _STRUCT.pack(
            _MAGIC,
            NOTIFICATION_VERSION,
            self.flags,
            self.transfer_id,
            self.chunk,
            self.layer_first,
            self.layer_last,
            self.first_block,
            self.num_blocks,
        )


def decode(payload: bytes) -> Notification | None:
    """None for anything that is not a notification of this version."""
    if len(payload) != NUM_BYTES:
        return None
    magic, version, flags, transfer_id, chunk, first, last, block, count = _STRUCT.unpack(payload)
    if magic != _MAGIC or version != NOTIFICATION_VERSION or flags & ~_KNOWN_FLAGS:
        return None
    return Notification(TransferId(transfer_id), chunk, first, last, block, count, Flags(flags))
