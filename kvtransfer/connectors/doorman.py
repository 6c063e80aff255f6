"""Hands this process's memory file to peers that may have it, over a socket that leaves no name.

::

    writer ──connect──▶ doorman          abstract socket: in the network namespace, not in a folder
           ──hello: token, name──▶       the token came with the metadata, over the handshake
           ◀──welcome + descriptor──     or the reason why not
           ──notifications──▶            from then on, read by the connector

The kernel says who has connected; only the same user is let in. A thread of its own answers, since
nobody drives the connector of an idle instance; it sleeps between peers. Callers are served side by
side, so one that says nothing keeps nobody waiting.
"""

from __future__ import annotations

import os
import queue
import secrets
import selectors
import socket
import struct
import threading
import time
from contextlib import suppress

import msgspec

from isthmus.common.errors import HandshakeError
from isthmus.common.logging import get_logger
from isthmus.kvtransfer.interface import PeerName

GREETING_S = 2.0
_BACKLOG = 128
_PAUSE_S = 0.05  # after a failure to let somebody in: too many open files, as a rule
_MAX_GREETING_BYTES = 4096

_log = get_logger("kvtransfer")


class Address(msgspec.Struct, frozen=True):
    """Where a doorman is met, and what lets one in."""

    name: str  # of the abstract socket, without the zero byte before it
    token: bytes


class _Hello(msgspec.Struct, frozen=True):
    token: bytes
    name: str


class _Welcome(msgspec.Struct, frozen=True):
    refusal: str = ""


class Doorman:
    def __init__(self, fd: int) -> None:
        """``fd`` is lent: it stays open until ``close``."""
        self.address = Address(f"isthmus-kv-{secrets.token_hex(8)}", secrets.token_bytes(16))
        self.arrived: queue.SimpleQueue[tuple[PeerName, socket.socket]] = queue.SimpleQueue()
        self._fd = fd
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.address.name)
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kv-doorman", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread
        self._thread.join(GREETING_S + 1)
        self._listener.close()
        while not self.arrived.empty():
            self.arrived.get()[1].close()

    def _serve(self) -> None:
        silent: dict[socket.socket, float] = {}  # and until when each may be, oldest first
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while True:
                patience = min(silent.values()) - time.monotonic() if silent else None
                ready = [key.fileobj for key, _ in selector.select(patience)]
                if self._closing.is_set():
                    break
                if self._listener in ready and (caller := self._accept()) is not None:
                    selector.register(caller, selectors.EVENT_READ)
                    silent[caller] = time.monotonic() + GREETING_S
                now = time.monotonic()
                for caller in [c for c, until in silent.items() if c in ready or now >= until]:
                    selector.unregister(caller)
                    del silent[caller]
                    self._answer(caller)
        for caller in silent:
            caller.close()

    def _accept(self) -> socket.socket | None:
        try:
            caller, _ = self._listener.accept()
        except BlockingIOError:
            return None
        except OSError as error:
            if not self._closing.wait(_PAUSE_S):
                _log.warning("nobody could be let in", problem=str(error))
            return None
        caller.setblocking(False)
        return caller

    def _answer(self, caller: socket.socket) -> None:
        try:
            name = self._greet(caller)
        except (OSError, msgspec.DecodeError):  # it has gone, is silent, or speaks something else
            name = None
        if name is None:
            caller.close()
        else:
            self.arrived.put((name, caller))

    def _greet(self, connection: socket.socket) -> PeerName | None:
        hello = msgspec.msgpack.decode(connection.recv(_MAX_GREETING_BYTES), type=_Hello)
        refusal = _foreign_user(connection)
        if not refusal and not secrets.compare_digest(hello.token, self.address.token):
            refusal = "the token is not this instance's"
        welcome = msgspec.msgpack.encode(_Welcome(refusal))
        if refusal:
            connection.sendall(welcome)
            return None
        socket.send_fds(connection, [welcome], [self._fd])
        return PeerName(hello.name)


def visit(address: Address, my_name: str) -> tuple[socket.socket, int]:
    """The connection, to be written to, and the descriptor of the memory file behind ``address``.

    Raises HandshakeError when nobody is there or it does not let us in.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(GREETING_S)
    try:
        fd = _enter(connection, address, my_name)
    except (OSError, msgspec.DecodeError) as error:
        connection.close()
        raise HandshakeError(
            f"shared memory: nobody answers at {address.name}: {error}", stage="handshake"
        ) from error
    except HandshakeError:
        connection.close()
        raise
    connection.setblocking(False)
    return connection, fd


def _enter(connection: socket.socket, address: Address, my_name: str) -> int:
    connection.connect("\0" + address.name)
    refusal = _foreign_user(connection)
    if not refusal:
        connection.sendall(msgspec.msgpack.encode(_Hello(address.token, my_name)))
        data, fds, _, _ = socket.recv_fds(connection, _MAX_GREETING_BYTES, 1)
        if fds:  # the caller's now: nothing may be raised here
            return fds[0]
        refusal = msgspec.msgpack.decode(data, type=_Welcome).refusal if data else "it hung up"
    raise HandshakeError(
        f"shared memory: not let in: {refusal or 'no memory came'}", stage="handshake"
    )


def _foreign_user(connection: socket.socket) -> str:
    """Why the other end may not share memory with this process; empty when it may."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", packed)
    if uid == os.getuid():
        return ""
    return f"user {uid} there, user {os.getuid()} here"
