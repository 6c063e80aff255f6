"""One direction of a pair under connector ``collective``: see there.

A link's thread ends when its connection does. What either side reads from the other is checked: a
header whose rows leave the target's memory ends the link before a byte of it has landed.
"""

from __future__ import annotations

import queue
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from typing import Any, Protocol, cast

import msgspec
import numpy as np
import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore, Work

from isthmus.common.addresses import listen_on
from isthmus.common.logging import get_logger
from isthmus.kvtransfer.connectors.collective_memory import Memory
from isthmus.kvtransfer.connectors.frames import FrameReader, frame
from isthmus.kvtransfer.connectors.headers import rows_from_wire, rows_to_wire
from isthmus.kvtransfer.copies import Copies, Rows
from isthmus.kvtransfer.interface import PeerName, WriteState

GROUP_TIMEOUT_S = 30.0
"""Longest wait for the other end, while a group is made and for each piece."""
GREETING_S = 10.0
"""How long whoever has connected may take to say who it is."""
_PIECE_BYTES = 4 * 2**20
_WRITER, _TARGET = 0, 1

_log = get_logger("kvtransfer")


class Backend(Protocol):
    """What is used of torch's backends."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work: ...
    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work: ...


class _Join(msgspec.Struct, frozen=True, tag=True):
    """The first message, sent at once: who writes, and what lets it in."""

    name: str
    token: bytes


class _Group(msgspec.Struct, frozen=True, tag=True):
    """The second, before the first write: which group both make."""

    name: str


class _Header(msgspec.Struct, frozen=True, tag=True):
    """One write; its bytes follow over the group."""

    rows: bytes
    notification: bytes


class _Ack(msgspec.Struct, frozen=True, tag=True):
    """The oldest write that was not acknowledged has landed."""


@dataclass(slots=True, eq=False)
class OutgoingWrite:
    copies: Copies
    notification: bytes
    state: WriteState = WriteState.IN_PROGRESS


@dataclass(frozen=True, slots=True, eq=False)
class Receiver:
    """What all incoming links of a connector share."""

    memory: Memory
    token: bytes
    store: TCPStore  # where groups are made whose target this is
    host: str
    arrived: deque[tuple[PeerName, bytes]] = field(default_factory=deque)
    landing: threading.Lock = field(default_factory=threading.Lock)  # held while bytes land


class Outgoing:
    """The writer's end. ``post``, ``read_acks`` and ``close`` belong to the connector's thread.

    Once ``close`` has returned, this process's memory is no longer read."""

    def __init__(
        self,
        connection: socket.socket,
        mine: Receiver,
        me: str,
        token: bytes,
        store_address: tuple[str, int],
    ) -> None:
        """Raises OSError when the peer has gone."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_framed(_Join(me, token)))
        connection.settimeout(None)
        self._connection = connection
        self._sending = connection.dup()  # the thread's own, so that neither closes the other's
        self._memory = mine.memory
        self._host = mine.host
        self._group = _Group(secrets.token_hex(8))
        self._store_address = store_address
        self._reader = FrameReader()
        self._open: deque[OutgoingWrite] = deque()  # posted and not acknowledged, oldest first
        self._jobs: queue.SimpleQueue[OutgoingWrite | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._packing = threading.Lock()  # held while memory is read
        self._is_closed = False

    @property
    def has_ended(self) -> bool:
        self.read_acks()
        return self._is_closed

    def post(self, copies: Copies, notification: bytes) -> OutgoingWrite:
        if self._thread is None:  # the target makes its end of the group when this one does
            self._thread = threading.Thread(target=self._run, name="kv-send", daemon=True)
            self._thread.start()
        write = OutgoingWrite(copies, notification)
        self._open.append(write)
        self._jobs.put(write)
        return write

    def read_acks(self) -> None:
        if self._is_closed:
            return
        is_open = self._reader.read(self._connection)
        for _ in self._reader.take():
            self._open.popleft().state = WriteState.DONE
        if not is_open:
            self.close()

    def close(self) -> None:
        if self._is_closed:
            return
        with self._packing:
            self._is_closed = True
        for write in self._open:
            write.state = WriteState.FAILED
        self._open.clear()
        self._jobs.put(None)
        _shut(self._connection)
        self._connection.close()
        if self._thread is None:
            self._sending.close()

    def _run(self) -> None:
        try:
            self._send(self._group)
            store = _join_store(*self._store_address)
            group = _make_group(store, self._group.name, _WRITER, self._memory.device, self._host)
            with self._memory.in_own_order():
                while (write := self._jobs.get()) is not None:
                    self._write(group, write)
        except (OSError, RuntimeError) as error:
            if not self._is_closed:
                _log.warning("a link for KV broke", problem=str(error).splitlines()[0])
        finally:
            _shut(self._sending)  # whoever polls sees its end
            self._sending.close()

    def _write(self, group: Backend, write: OutgoingWrite) -> None:
        rows = write.copies.rows
        self._send(_Header(rows_to_wire(rows), write.notification))
        for piece in _pieces(rows):
            group.send([self._packed(piece)], _TARGET, 0).wait()
            self._memory.settle(GROUP_TIMEOUT_S)

    def _packed(self, rows: Rows) -> torch.Tensor:
        with self._packing:
            if self._is_closed:  # the blocks may hold something else by now
                raise OSError("closed")
            return self._memory.pack(rows)

    def _send(self, message: msgspec.Struct) -> None:
        self._sending.sendall(_framed(message))


class Incoming:
    """The target's end; all its work is done by its own thread."""

    def __init__(self, connection: socket.socket, mine: Receiver) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._mine = mine
        self._reader = FrameReader()
        self._early: list[bytes] = []  # came together with the greeting
        self._is_shut = False
        self._thread = threading.Thread(target=self._run, name="kv-receive", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def shut(self) -> None:
        """Nothing lands once this has returned."""
        with self._mine.landing:
            self._is_shut = True
        _shut(self._connection)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            with self._connection:
                name = self._greet()
                if name is not None:
                    self._receive_all(name, chain(self._early, self._messages()))
        except (OSError, RuntimeError, ValueError) as error:
            if not self._is_shut:
                _log.warning("a link for KV broke", problem=str(error).splitlines()[0])

    def _greet(self) -> PeerName | None:
        """Who writes; None when the connection ends first. Raises TimeoutError for those who do not
        say it in time, and ValueError for strangers."""
        deadline_s = time.monotonic() + GREETING_S
        while not (messages := self._reader.take()):
            self._connection.settimeout(max(0.0, deadline_s - time.monotonic()))
            try:
                is_open = self._reader.wait(self._connection)
            except BlockingIOError as error:
                raise TimeoutError("whoever connected did not say who it is") from error
            if not is_open:
                return None
        self._connection.settimeout(None)
        join = msgspec.msgpack.decode(messages[0], type=_Join)
        if not secrets.compare_digest(join.token, self._mine.token):
            raise ValueError("a stranger knocked")
        self._early = messages[1:]
        return PeerName(join.name)

    def _receive_all(self, name: PeerName, messages: Iterator[bytes]) -> None:
        first = next(messages, None)
        if first is None:
            return
        mine = self._mine
        described = msgspec.msgpack.decode(first, type=_Group)
        group = _make_group(mine.store, described.name, _TARGET, mine.memory.device, mine.host)
        with mine.memory.in_own_order():
            for message in messages:
                self._receive(group, name, msgspec.msgpack.decode(message, type=_Header))

    def _receive(self, group: Backend, name: PeerName, header: _Header) -> None:
        memory = self._mine.memory
        rows = rows_from_wire(header.rows, memory.num_bytes)
        for piece in _pieces(rows):
            packed = memory.empty(int(piece[:, 2].sum()))
            group.recv([packed], _WRITER, 0).wait()
            # On a device the wait is not over yet; it may be long, and nobody may wait for it.
            memory.settle(GROUP_TIMEOUT_S)
            self._land(packed, piece)
        if header.notification:
            self._mine.arrived.append((name, header.notification))
        self._connection.sendall(_framed(_Ack()))

    def _messages(self) -> Iterator[bytes]:
        """Waits for each; ends with the connection."""
        while self._reader.wait(self._connection):
            yield from self._reader.take()

    def _land(self, packed: torch.Tensor, rows: Rows) -> None:
        with self._mine.landing:
            if self._is_shut:
                raise OSError("closed")
            self._mine.memory.unpack(packed, rows)


def serve_store(host: str) -> TCPStore:
    """Where the two ends of a group find each other; listens on ``host`` alone, on a free port."""
    listener = listen_on(host)
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _join_store(host: str, port: int) -> TCPStore:
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    return TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)


def _make_group(store: Store, name: str, rank: int, device: str, host: str) -> Backend:
    """A group of writer and target on their own; waits for the other. Raises RuntimeError."""
    apart = PrefixStore(name, store)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    if torch.device(device).type == "cuda":
        from torch._C._distributed_c10d import ProcessGroupNCCL  # only builds for CUDA have it

        torch.cuda.set_device(device)
        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        return cast("Backend", ProcessGroupNCCL(apart, rank, 2, options))
    kind: Any = ProcessGroupGloo  # its types know nothing of these options
    options = kind._Options()
    options._devices = [kind.create_device(hostname=host)]
    options._timeout = timeout
    options._threads = 1
    return cast("Backend", kind(apart, rank, 2, options))


def _pieces(rows: Rows) -> Iterator[Rows]:
    """The rows in the same order, in parts of at most ``_PIECE_BYTES``; both ends cut alike."""
    part: list[tuple[int, int, int]] = []
    room = _PIECE_BYTES
    for source, target, num_bytes in rows.tolist():
        done = 0
        while done < num_bytes:
            size = min(num_bytes - done, room)
            part.append((source + done, target + done, size))
            done += size
            room -= size
            if room == 0:
                yield np.array(part, dtype=np.int64)
                part, room = [], _PIECE_BYTES
    if part:
        yield np.array(part, dtype=np.int64)


def _framed(message: msgspec.Struct) -> bytes:
    return frame(msgspec.msgpack.encode(message))


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
