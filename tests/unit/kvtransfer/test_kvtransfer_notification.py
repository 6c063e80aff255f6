from __future__ import annotations

import pytest

from isthmus.common.ids import TransferId
from isthmus.kvtransfer.notification import NUM_BYTES, Flags, Notification, decode

NOTE = Notification(TransferId(bytes(range(16))), 7, 1, 29, 300, 12, Flags.LAST)


def test_notification_is_forty_bytes_of_fixed_layout() -> None:
    payload = NOTE.encode()
    assert len(payload) == NUM_BYTES == 40
    assert payload.hex() == (
        "494b564e"  # magic
        "0200"  # version
        "0100"  # flags: LAST
        "000102030405060708090a0b0c0d0e0f"
        "07000000"  # chunk
        "01001d00"  # layers 1..29
        "2c0100000c000000"  # blocks 300..311
    )


@pytest.mark.parametrize(
    "flags", [Flags.NONE, Flags.LAST, Flags.ABORTED, Flags.ABORTED | Flags.QUIET]
)
def test_notification_survives_the_wire(flags: Flags) -> None:
    note = Notification(NOTE.transfer_id, 2**32 - 1, 0, 2**16 - 1, 2**32 - 1, 1, flags)
    assert decode(note.encode()) == note


def test_checksums_follow_one_a_block() -> None:
    checked = NOTE.checked(tuple(range(2**64 - 12, 2**64)))
    payload = checked.encode()
    assert len(payload) == NUM_BYTES + 8 * NOTE.num_blocks
    assert payload[NUM_BYTES : NUM_BYTES + 8] == (2**64 - 12).to_bytes(8, "little")
    assert decode(payload) == checked


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        NOTE.encode()[:-1],
        NOTE.encode() + b"\x00",
        b"XXXX" + NOTE.encode()[4:],
        NOTE.encode()[:4] + b"\x01\x00" + NOTE.encode()[6:],
        NOTE.encode()[:6] + b"\x10\x00" + NOTE.encode()[8:],
        NOTE.encode()[:6] + b"\x08\x00" + NOTE.encode()[8:],
        NOTE.checked((1,) * 11).encode(),
    ],
    ids=[
        "empty",
        "short",
        "long",
        "other magic",
        "other version",
        "unknown flag",
        "no checksums",
        "a checksum too few",
    ],
)
def test_what_is_not_a_notification_is_none(payload: bytes) -> None:
    assert decode(payload) is None
