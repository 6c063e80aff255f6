"""One direction of a pair under connector ``ucx``: see there.

Driven by ``advance`` alone, on the connector's thread. What a writer says is checked: a header
whose rows leave the target's memory ends the link before a byte of it has landed.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from isthmus.common.errors import TransferError
from isthmus.common.logging import get_logger
from isthmus.kvtransfer.connectors.headers import rows_from_wire, rows_to_wire
from isthmus.kvtransfer.copies import Copies, Rows
from isthmus.kvtransfer.interface import PeerName, WriteState

GREETING_S = 10.0
"""How long whoever has connected may take to say who it is."""

_log = get_logger("kvtransfer")


class LineError(Exception):
    """A connection has failed, or its other end does not keep to what is agreed."""


class Landing(Protocol):
    def has_landed(self) -> bool:
        """All of it is in its places. Raises LineError when part of it never will be."""
        ...


class Line(Protocol):
    """A connection. What is asked for moves by itself; methods raise LineError once the connection
    has failed, but ``close``."""

    @property
    def is_alive(self) -> bool: ...

    def send(self, message: bytes) -> None: ...

    def take(self) -> list[bytes]:
        """Messages that have come whole, in order."""
        ...

    def send_rows(self, rows: Rows, tag: int) -> None:
        """The bytes at ``rows[:, 0]``, which stay as they are until they have landed."""
        ...

    def receive_rows(self, rows: Rows, tag: int) -> Landing:
        """What the other end sends of the same rows, to ``rows[:, 1]``."""
        ...

    def close(self) -> None:
        """What is still under way is given up."""
        ...


class _Join(msgspec.Struct, frozen=True, tag=True):
    """The first message: who writes, what lets it in, and the tag of its bytes."""

    name: str
    token: bytes
    tag_of_bytes: int


class _Header(msgspec.Struct, frozen=True, tag=True):
    """One write; its bytes come under the link's tag."""

    rows: bytes


class _Note(msgspec.Struct, frozen=True, tag=True):
    payload: bytes


class _Ack(msgspec.Struct, frozen=True, tag=True):
    """Of the writer's headers and notes, counted from 0 in one row: the bytes that it announced
    have landed, or what it says can be taken."""

    number: int


@dataclass(slots=True, eq=False)
class OutgoingWrite:
    notification: bytes  # that is still to be sent
    state: WriteState = WriteState.IN_PROGRESS


class Outgoing:
    """The writer's end."""

    def __init__(self, line: Line, me: str, token: bytes) -> None:
        """Raises LineError."""
        self._line = line
        self._tag = secrets.randbits(64)
        self._numbers = itertools.count()
        self._open: dict[int, OutgoingWrite] = {}  # by the message that is to be acknowledged
        line.send(msgspec.msgpack.encode(_Join(me, token, self._tag)))

    @property
    def is_alive(self) -> bool:
        return self._line.is_alive

    def post(self, copies: Copies, notification: bytes) -> OutgoingWrite:
        """Raises TransferError when nothing was started."""
        write = OutgoingWrite(notification)
        try:
            if copies:
                self._send(_Header(rows_to_wire(copies.rows)), write)
                self._line.send_rows(copies.rows, self._tag)
            elif notification:
                self._send_note(write)
            else:
                write.state = WriteState.DONE
        except LineError as error:
            self.fail()
            raise TransferError(f"the connection broke: {error}", stage="transfer") from error
        return write

    def advance(self) -> bool:
        """Whether anything has happened."""
        if not self._open:
            return False
        try:
            messages = self._line.take()
            for message in messages:
                self._acknowledged(msgspec.msgpack.decode(message, type=_Ack).number)
        except (LineError, msgspec.DecodeError, ValueError) as error:
            if self.is_alive:  # else the peer has ended
                _log.warning("a link for KV broke", problem=str(error))
            self.fail()
            return True
        if not self._line.is_alive:
            self.fail()
        return bool(messages)

    def fail(self) -> None:
        """Open writes have failed; nothing more is sent."""
        for write in self._open.values():
            write.state = WriteState.FAILED
        self._open.clear()
        self._line.close()

    def _acknowledged(self, number: int) -> None:
        write = self._open.pop(number, None)
        if write is None:
            raise ValueError(f"message {number} was acknowledged, which nobody waits for")
        if write.notification:
            self._send_note(write)
        else:
            write.state = WriteState.DONE

    def _send_note(self, write: OutgoingWrite) -> None:
        note = _Note(write.notification)
        write.notification = b""
        self._send(note, write)

    def _send(self, message: _Header | _Note, write: OutgoingWrite) -> None:
        self._open[next(self._numbers)] = write  # first: it fails with the link
        self._line.send(msgspec.msgpack.encode(message))


@dataclass(slots=True)
class Inbox:
    """What all incoming links of a connector share."""

    num_bytes: int  # of this process's memory
    token: bytes
    arrived: list[tuple[PeerName, bytes]] = field(default_factory=list)


class Incoming:
    """The target's end."""

    def __init__(self, line: Line, inbox: Inbox) -> None:
        self._line = line
        self.writer: PeerName | None = None  # until it has said who it is
        self._inbox = inbox
        self._tag = 0
        self._numbers = itertools.count()
        self._landings: deque[tuple[int, Landing]] = deque()  # by header, oldest first
        self._silent_until_s = time.monotonic() + GREETING_S
        self._has_ended = False  # nothing that comes later counts

    def advance(self) -> bool:
        """Whether anything has happened."""
        if self._has_ended:
            return False
        try:
            has_moved = self._read()
            while self._landings and self._landings[0][1].has_landed():
                self._acknowledge(self._landings.popleft()[0])
                has_moved = True
        except (LineError, msgspec.DecodeError, ValueError) as error:
            if self._line.is_alive or self._landings:  # else its writer has ended, in order
                _log.warning("a link for KV broke", writer=self.writer, problem=str(error))
            self._end()
            return False
        if self.writer is None and time.monotonic() > self._silent_until_s:
            self._end()
        return has_moved

    def _end(self) -> None:
        self._has_ended = True
        self._landings.clear()
        self._line.close()

    def _read(self) -> bool:
        has_moved = False
        for message in self._line.take():
            has_moved = True
            if self.writer is None:
                self._greet(msgspec.msgpack.decode(message, type=_Join))
            else:
                self._receive(self.writer, msgspec.msgpack.decode(message, type=_Header | _Note))
        return has_moved

    def _greet(self, join: _Join) -> None:
        if not secrets.compare_digest(join.token, self._inbox.token):
            raise ValueError("a stranger knocked")
        self.writer = PeerName(join.name)
        self._tag = join.tag_of_bytes

    def _receive(self, writer: PeerName, message: _Header | _Note) -> None:
        number = next(self._numbers)
        if isinstance(message, _Note):
            self._inbox.arrived.append((writer, message.payload))
            self._acknowledge(number)
            return
        rows = rows_from_wire(message.rows, self._inbox.num_bytes)
        self._landings.append((number, self._line.receive_rows(rows, self._tag)))

    def _acknowledge(self, number: int) -> None:
        self._line.send(msgspec.msgpack.encode(_Ack(number)))
