"""What one write says to the peer's process once its bytes are there: 40 bytes, little-endian, and
8 more for each block where the ticket asks for checksums.

::

    0      4        6      8             24     28           30          32           36          40
    magic  version  flags  transfer_id   chunk  layer_first  layer_last  first_block  num_blocks  …

A notification names the rectangle it covers, blocks × layers, so that the receiver proves by itself
that every byte has arrived instead of trusting a count. ABORTED carries no rectangle: the sender
has given up; with QUIET it also proves that none of its writes can still land.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import IntFlag

from isthmus.common.ids import TransferId

NOTIFICATION_VERSION = 2
_MAGIC = b"IKVN"
_STRUCT = struct.Struct("<4sHH16sIHHII")
NUM_BYTES = _STRUCT.size
_CHECKSUM_BYTES = 8


class Flags(IntFlag):
    NONE = 0
    LAST = 1  # no chunk has a higher number
    ABORTED = 2  # the sender gave up and will post nothing more
    QUIET = 4  # with ABORTED: each of its writes was done or never posted
    CHECKED = 8  # ``num_blocks`` checksums follow


_KNOWN_FLAGS = int(Flags.LAST | Flags.ABORTED | Flags.QUIET | Flags.CHECKED)


@dataclass(frozen=True, slots=True)
class Notification:
    """``first_block`` indexes the ticket's target blocks; ``layer_last`` is inclusive. With
    ``checksums``, one a block, ``flags`` have CHECKED."""

    transfer_id: TransferId
    chunk: int = 0
    layer_first: int = 0
    layer_last: int = 0
    first_block: int = 0
    num_blocks: int = 0
    flags: Flags = Flags.NONE
    checksums: tuple[int, ...] = ()

    @property
    def layers(self) -> range:
        return range(self.layer_first, self.layer_last + 1)

    def checked(self, checksums: tuple[int, ...]) -> Notification:
        return replace(self, flags=self.flags | Flags.CHECKED, checksums=checksums)

    def encode(self) -> bytes:
        head = _STRUCT.pack(
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
        return head + struct.pack(f"<{len(self.checksums)}Q", *self.checksums)


def decode(payload: bytes) -> Notification | None:
    """None for anything that is not a notification of this version."""
    if len(payload) < NUM_BYTES:
        return None
    magic, version, bits, transfer_id, chunk, first, last, block, count = _STRUCT.unpack_from(
        payload
    )
    if magic != _MAGIC or version != NOTIFICATION_VERSION or bits & ~_KNOWN_FLAGS:
        return None
    flags = Flags(bits)
    num_checksums = count if Flags.CHECKED in flags else 0
    if len(payload) != NUM_BYTES + _CHECKSUM_BYTES * num_checksums:
        return None
    checksums = struct.unpack_from(f"<{num_checksums}Q", payload, NUM_BYTES)
    return Notification(TransferId(transfer_id), chunk, first, last, block, count, flags, checksums)
