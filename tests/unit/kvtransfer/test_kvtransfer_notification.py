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
        "0100"  # version
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


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        NOTE.encode()[:-1],
        NOTE.encode() + b"\x00",
        b"XXXX" + NOTE.encode()[4:],
        NOTE.encode()[:4] + b"\x02\x00" + NOTE.encode()[6:],
        NOTE.encode()[:6] + b"\x08\x00" + NOTE.encode()[8:],
    ],
    ids=["empty", "short", "long", "other magic", "other version", "unknown flag"],
)
def test_what_is_not_a_notification_is_none(payload: bytes) -> None:
    assert decode(payload) is None
