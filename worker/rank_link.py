"""What the leader of an instance and a follower say to each other, over two TCP connections.

::

    follower   Hello ──▶                        its rank, its pid, the token it was started with
    leader     ◀── Setup                        configuration, and where the ranks meet
    follower   Outcome ──▶                      its part is loaded, or why it cannot be
    leader     ◀── step ◀── step …   ◀── stop   one frame each

A frame is its kind, its length and its bytes. The end of the connection is the end of the other
process: whoever reads it before ``stop`` ends too. One thread sends and one thread receives.

The second connection begins with a Hello as well and is then for transfers alone, so that no step
waits behind them (``isthmus.kvtransfer.port_wire``).
"""

from __future__ import annotations

import select
import socket
import struct
import sys
from contextlib import suppress
from enum import Enum
from typing import TypeVar

import msgspec

from isthmus.common.errors import ErrorDetail, InstanceLostError, InternalError

MessageT = TypeVar("MessageT", bound=msgspec.Struct)

_HEADER = struct.Struct("<cI")
_MAX_FRAME_BYTES = 2**28
_MAX_MESSAGE_BYTES = 2**20  # also of what a stranger sends

# A machine that is gone closes no connection: whoever only listens notices it after a minute.
_PROBE_AFTER_S = 30
_PROBE_EVERY_S = 5
_NUM_PROBES = 6


class FrameKind(Enum):
    MESSAGE = b"m"
    STEP = b"s"
    STOP = b"x"


class Invitation(msgspec.Struct, frozen=True):
    """What a follower is started with."""

    host: str
    port: int
    rank: int
    token: str
    device: str


class Hello(msgspec.Struct, frozen=True):
    rank: int
    pid: int
    token: str
    is_for_transfers: bool = False


class Setup(msgspec.Struct, frozen=True):
    config_json: str
    role: str
    instance_id: str
    store_port: int


class Outcome(msgspec.Struct, frozen=True):
    """Of a follower's start, or of its end when that was a failure."""

    failure: ErrorDetail | None = None
    weight_bytes: int = 0


class RankLink:
    """One end of the connection. Its methods raise InstanceLostError when the other end is gone."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PROBES)
        self._socket = connection

    def fileno(self) -> int:
        return self._socket.fileno()

    def set_timeout(self, timeout_s: float | None) -> None:
        """Longest wait of one call; None = until the other end is gone."""
        self._socket.settimeout(timeout_s)

    def send(self, kind: FrameKind, payload: bytes = b"") -> None:
        try:
            self._socket.sendall(_HEADER.pack(kind.value, len(payload)) + payload)
        except OSError as error:
            raise _gone(error) from error

    def receive(self, max_bytes: int = _MAX_FRAME_BYTES) -> tuple[FrameKind, bytes]:
        """Raises InternalError, before anything is allocated, for what cannot be a frame."""
        kind, length = _HEADER.unpack(self._read(_HEADER.size))
        if length > max_bytes or kind not in {item.value for item in FrameKind}:
            raise InternalError("what came from another rank is no frame", stage="rank")
        return FrameKind(kind), self._read(length)

    def send_message(self, message: msgspec.Struct) -> None:
        self.send(FrameKind.MESSAGE, msgspec.msgpack.encode(message))

    def receive_message(self, kind: type[MessageT]) -> MessageT:
        """Raises InternalError for anything else."""
        frame, payload = self.receive(_MAX_MESSAGE_BYTES)
        if frame is not FrameKind.MESSAGE:
            raise InternalError(f"{kind.__name__} was due, not {frame.name}", stage="rank")
        try:
            return msgspec.msgpack.decode(payload, type=kind)
        except msgspec.MsgspecError as error:
            raise InternalError(f"{kind.__name__} was due: {error}", stage="rank") from error

    def hang_up(self) -> None:
        """Ends the connection and wakes whoever waits for it, here and there. Idempotent."""
        with suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def detach(self) -> socket.socket:
        """The connection, for somebody else to use and close: this end is done with it."""
        connection = socket.socket(fileno=self._socket.detach())
        connection.setblocking(False)
        return connection

    def close(self) -> None:
        """When no thread waits for the connection any more."""
        self.hang_up()
        self._socket.close()

    def _read(self, length: int) -> bytes:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            try:
                count = self._socket.recv_into(view)
            except OSError as error:
                raise _gone(error) from error
            if not count:
                raise InstanceLostError("another rank of this instance ended", stage="rank")
            view = view[count:]
        return bytes(data)


def connect(invitation: Invitation, timeout_s: float) -> RankLink:
    """To the leader. Raises InstanceLostError when it is not there."""
    try:
        connection = socket.create_connection((invitation.host, invitation.port), timeout_s)
    except OSError as error:
        raise _gone(error) from error
    return RankLink(connection)


def wait_for_end(link: RankLink) -> None:
    """Returns when the other end has closed the connection, or this one has."""
    hang_up = select.POLLRDHUP if sys.platform == "linux" else select.POLLHUP
    poller = select.poll()
    poller.register(link.fileno(), hang_up)
    poller.poll()


def _gone(error: OSError) -> InstanceLostError:
    reason = error.strerror or str(error) or type(error).__name__
    return InstanceLostError(f"another rank of this instance is gone: {reason}", stage="rank")
