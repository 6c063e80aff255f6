"""The two ends of a link of connector ucx, over lines that a test holds up, cuts and looks into."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from isthmus.common.errors import TransferError
from isthmus.kvtransfer.connectors import ucx_link
from isthmus.kvtransfer.connectors.headers import rows_to_wire
from isthmus.kvtransfer.connectors.ucx_link import Inbox, Incoming, LineError, Outgoing
from isthmus.kvtransfer.copies import Copies, Rows
from isthmus.kvtransfer.interface import CopyOp, WriteState

NUM_BYTES = 1024
TOKEN = b"let me in"


@dataclass
class Bytes:
    """Bytes on their way in, which are there when the test says so."""

    is_over: bool = True

    def has_landed(self) -> bool:
        return self.is_over


@dataclass
class Line:
    is_alive: bool = True
    inbox: deque[bytes] = field(default_factory=deque)
    other: Line | None = None
    rows_sent: list[tuple[Rows, int]] = field(default_factory=list)
    rows_received: list[tuple[Rows, int]] = field(default_factory=list)
    landing: Bytes = field(default_factory=Bytes)

    def send(self, message: bytes) -> None:
        self._check()
        assert self.other is not None
        self.other.inbox.append(message)

    def take(self) -> list[bytes]:
        self._check()
        return [self.inbox.popleft() for _ in range(len(self.inbox))]

    def send_rows(self, rows: Rows, tag: int) -> None:
        self._check()
        self.rows_sent.append((rows, tag))

    def receive_rows(self, rows: Rows, tag: int) -> Bytes:
        self._check()
        self.rows_received.append((rows, tag))
        return self.landing

    def close(self) -> None:
        self.is_alive = False

    def _check(self) -> None:
        if not self.is_alive:
            raise LineError("it has ended")


class Ends:
    def __init__(self, token: bytes = TOKEN) -> None:
        self.writing, self.landing = Line(), Line()
        self.writing.other, self.landing.other = self.landing, self.writing
        self.inbox = Inbox(NUM_BYTES, TOKEN)
        self.outgoing = Outgoing(self.writing, "writer", token)
        self.incoming = Incoming(self.landing, self.inbox)

    def drive(self) -> None:
        """Until nothing happens any more."""
        while any([self.outgoing.advance(), self.incoming.advance()]):
            pass


COPIES = Copies.of([CopyOp(0, 512, 256), CopyOp(300, 0, 8)])


def test_notification_leaves_when_all_has_landed_and_not_before() -> None:
    ends = Ends()
    ends.landing.landing.is_over = False
    write = ends.outgoing.post(COPIES, b"note")
    ends.drive()
    ((sent, tag),), ((received, of_the_same),) = ends.writing.rows_sent, ends.landing.rows_received
    assert (sent == COPIES.rows).all()
    assert (received == COPIES.rows).all()
    assert tag == of_the_same
    assert (write.state, ends.inbox.arrived) == (WriteState.IN_PROGRESS, [])
    ends.landing.landing.is_over = True
    ends.drive()
    assert (write.state, ends.inbox.arrived) == (WriteState.DONE, [("writer", b"note")])


def test_notification_of_a_write_that_was_given_up_never_comes() -> None:
    """What the target reads of it may be anything by then."""
    ends = Ends()
    ends.landing.landing.is_over = False
    write = ends.outgoing.post(COPIES, b"note")
    ends.drive()
    ends.outgoing.fail()
    ends.landing.landing.is_over = True
    ends.drive()
    assert (write.state, ends.inbox.arrived) == (WriteState.FAILED, [])
    with pytest.raises(TransferError, match="it has ended"):
        ends.outgoing.post(COPIES, b"more")


def test_done_means_that_the_notification_is_there() -> None:
    """A writer may end as soon as it knows."""
    ends = Ends()
    write = ends.outgoing.post(COPIES, b"note")
    ends.incoming.advance()
    assert ends.outgoing.advance()
    assert write.state is WriteState.IN_PROGRESS
    ends.incoming.advance()
    ends.outgoing.advance()
    assert (write.state, ends.inbox.arrived) == (WriteState.DONE, [("writer", b"note")])


def test_notification_alone_waits_for_nobody() -> None:
    ends = Ends()
    ends.landing.landing.is_over = False
    writes = [ends.outgoing.post(COPIES, b""), ends.outgoing.post(Copies.of(()), b"words")]
    ends.drive()
    assert ends.inbox.arrived == [("writer", b"words")]
    ends.landing.landing.is_over = True
    ends.drive()
    assert [write.state for write in writes] == [WriteState.DONE] * 2
    assert ends.inbox.arrived == [("writer", b"words")]


def test_stranger_is_not_let_in() -> None:
    ends = Ends(token=b"please")
    write = ends.outgoing.post(COPIES, b"note")
    ends.drive()
    assert not ends.landing.is_alive
    assert not ends.landing.rows_received
    ends.writing.close()
    ends.drive()
    assert (write.state, ends.inbox.arrived) == (WriteState.FAILED, [])


@pytest.mark.parametrize("row", [(0, NUM_BYTES - 1, 2), (0, -1, 1), (0, 0, 0), (0, 2**62, 2**62)])
def test_write_beyond_the_memory_ends_the_link_before_a_byte_of_it(
    row: tuple[int, int, int],
) -> None:
    ends = Ends()
    rows = np.array([(0, 0, 8), row], dtype=np.int64)
    ends.writing.send(msgspec.msgpack.encode(ucx_link._Header(rows_to_wire(rows))))
    ends.drive()
    assert not ends.landing.is_alive
    assert not ends.landing.rows_received


@pytest.mark.parametrize("message", [b"", b"\xc1", msgspec.msgpack.encode(ucx_link._Ack(0))])
def test_what_is_no_message_ends_the_link(message: bytes) -> None:
    ends = Ends()
    ends.drive()
    ends.writing.send(message)
    ends.drive()
    assert not ends.landing.is_alive


def test_acknowledgement_of_nothing_fails_what_is_open() -> None:
    ends = Ends()
    ends.landing.landing.is_over = False
    write = ends.outgoing.post(COPIES, b"note")
    ends.landing.send(msgspec.msgpack.encode(ucx_link._Ack(7)))
    ends.outgoing.advance()
    assert write.state is WriteState.FAILED
    assert not ends.writing.is_alive


def test_whoever_does_not_say_who_it_is_goes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_link, "GREETING_S", -1.0)
    line = Line()
    Incoming(line, Inbox(NUM_BYTES, TOKEN)).advance()
    assert not line.is_alive


class Chatty(Line):
    """Messages that had come when it was closed can still be taken; then it fails."""

    def take(self) -> list[bytes]:
        return [self.inbox.popleft()] if self.inbox else super().take()


def test_nothing_counts_that_comes_after_what_ended_the_link() -> None:
    inbox, line = Inbox(NUM_BYTES, TOKEN), Chatty()
    incoming = Incoming(line, inbox)
    join = msgspec.msgpack.encode(ucx_link._Join("writer", TOKEN, 1))
    line.inbox += [join, b"\xc1", msgspec.msgpack.encode(ucx_link._Note(b"note"))]
    assert incoming.advance()
    assert not incoming.advance()
    assert not line.is_alive
    assert not incoming.advance()
    assert inbox.arrived == []


def test_a_link_that_broke_under_a_write_is_warned_of_once() -> None:
    ends = Ends()
    ends.landing.landing.is_over = False
    ends.outgoing.post(COPIES, b"note")
    ends.drive()
    ends.landing.is_alive = False
    with capture_logs() as logs:
        for _ in range(3):
            assert not ends.incoming.advance()
    assert [entry["event"] for entry in logs] == ["a link for KV broke"]
