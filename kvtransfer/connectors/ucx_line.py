"""One connection of connector ``ucx``: messages in order both ways, and bytes beside them.

::

    stream of the endpoint     four bytes of length and so many bytes, as in ``frames``
    tagged messages            the bytes of writes, under a tag that is this line's alone, from and
                               to the places where they lie

All is asked for and looked at, never waited for; it moves while the worker makes progress. UCX
reads and writes what it was given until a request has completed, so a line keeps all of it until
then (``is_settled``), beyond its own end.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from isthmus.kvtransfer.connectors.copying import copy_rows
from isthmus.kvtransfer.connectors.device_bytes import DeviceBytes
from isthmus.kvtransfer.connectors.frames import LENGTH, MAX_BYTES, frame
from isthmus.kvtransfer.connectors.headers import with_packed
from isthmus.kvtransfer.connectors.ucx_library import Array, UCXError, UCXXTag
from isthmus.kvtransfer.connectors.ucx_link import LineError
from isthmus.kvtransfer.copies import Rows
from isthmus.kvtransfer.interface import MemoryRegion

Bytes = npt.NDArray[np.uint8]

# Below it a copy and a share of a larger message cost less than a message of its own.
_ALONE_BYTES = 32 * 2**10
_PIECE_BYTES = 2**20  # of small pieces that travel packed
_CLOSE_NS = 10_000_000  # of waiting for the worker's progress, as many times as said below
_CLOSE_ATTEMPTS = 10


class _Request(Protocol):
    """What is used of ucxx's requests."""

    @property
    def completed(self) -> bool: ...

    def check_error(self) -> None: ...


@contextmanager
def line_errors() -> Iterator[None]:
    """ucxx's errors as ``LineError``."""
    try:
        yield
    except (UCXError, RuntimeError) as error:
        raise LineError(str(error) or repr(error)) from error


class Store:
    """This process's memory as UCX takes it."""

    def __init__(self, region: MemoryRegion) -> None:
        self.base_address = region.base_address
        self._bytes: Bytes | None = None  # of host memory
        if region.device == "cpu":
            there = (ctypes.c_uint8 * region.num_bytes).from_address(region.base_address)
            self._bytes = np.frombuffer(memoryview(there), dtype=np.uint8)

    def at(self, offset: int, num_bytes: int) -> Any:
        if self._bytes is None:
            return Array(DeviceBytes(self.base_address + offset, num_bytes))
        return Array(self._bytes[offset : offset + num_bytes])

    def alone_and_packed(self, rows: Rows) -> tuple[Rows, list[Rows]]:
        """The rows that are messages of their own, and the others as they share messages; both ends
        divide alike. On a device every row is its own."""
        if self._bytes is None:
            return rows, []
        is_alone = rows[:, 2] >= _ALONE_BYTES
        return rows[is_alone], _shared(rows[~is_alone])


def _shared(rows: Rows) -> list[Rows]:
    if not len(rows):
        return []
    piece = (rows[:, 2].cumsum() - 1) // _PIECE_BYTES
    return np.split(rows, np.flatnonzero(np.diff(piece)) + 1)


class _Landing:
    """A write on its way in: where the bytes of its messages go."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.requests: list[_Request] = []
        self.packed: list[tuple[Bytes, Rows]] = []

    @line_errors()
    def has_landed(self) -> bool:
        while self.requests and self.requests[-1].completed:
            self.requests.pop().check_error()
        if self.requests:
            return False
        while self.packed:
            buffer, rows = self.packed.pop()
            copy_rows(with_packed(rows, column=0), buffer.ctypes.data, self._store.base_address)
        return True


class UcxLine:
    """Implements ``ucx_link.Line``. One end decides on the tag."""

    @line_errors()
    def __init__(self, endpoint: Any, store: Store) -> None:
        """Raises LineError."""
        self._endpoint = endpoint
        self._store = store
        self._is_closed = False
        self._failure: LineError | None = None  # of reading
        self._kept: deque[tuple[_Request, object]] = deque()  # what UCX still reads or writes
        self._length = np.empty(LENGTH.size, dtype=np.uint8)
        self._message = self._length  # of which the next bytes are being received
        self._reading = self._read()

    @property
    def is_alive(self) -> bool:
        return not self._is_closed and bool(self._endpoint.alive)

    @property
    def is_settled(self) -> bool:
        """UCX needs nothing of this process's memory for it any more."""
        while self._kept and self._kept[0][0].completed:
            self._kept.popleft()
        return not self._kept and self._reading.completed

    @line_errors()
    def send(self, message: bytes) -> None:
        self._check()
        data = np.frombuffer(frame(message), dtype=np.uint8)
        self._keep(self._endpoint.stream_send(Array(data)), data)

    def take(self) -> list[bytes]:
        messages: list[bytes] = []
        try:
            while self._failure is None and self._reading.completed:
                self._take_part(messages)
        except LineError as error:
            self._failure = error
        if self._failure is not None and not messages:  # what came before it counts
            raise self._failure
        return messages

    @line_errors()
    def send_rows(self, rows: Rows, tag: int) -> None:
        self._check()
        alone, packed = self._store.alone_and_packed(rows)
        for source, _, num_bytes in alone.tolist():
            self._send_bytes(self._store.at(source, num_bytes), tag)
        for part in packed:
            buffer = np.empty(int(part[:, 2].sum()), dtype=np.uint8)
            copy_rows(with_packed(part, column=1), self._store.base_address, buffer.ctypes.data)
            self._send_bytes(Array(buffer), tag)

    @line_errors()
    def receive_rows(self, rows: Rows, tag: int) -> _Landing:
        self._check()
        landing = _Landing(self._store)
        alone, packed = self._store.alone_and_packed(rows)
        for _, target, num_bytes in alone.tolist():
            landing.requests.append(self._receive_bytes(self._store.at(target, num_bytes), tag))
        for part in packed:
            buffer = np.empty(int(part[:, 2].sum()), dtype=np.uint8)
            landing.requests.append(self._receive_bytes(Array(buffer), tag))
            landing.packed.append((buffer, part))
        return landing

    def close(self) -> None:
        """What is still under way is given up."""
        if not self._is_closed:
            self._is_closed = True
            with suppress(UCXError, RuntimeError):  # it has failed already
                self._endpoint.close_blocking(_CLOSE_NS, _CLOSE_ATTEMPTS)

    @line_errors()
    def _take_part(self, messages: list[bytes]) -> None:
        self._reading.check_error()
        if self._message is self._length:
            (num_bytes,) = LENGTH.unpack(self._length.tobytes())
            if not 0 < num_bytes <= MAX_BYTES:
                raise LineError(f"a message of {num_bytes} bytes")
            self._message = np.empty(num_bytes, dtype=np.uint8)
        else:
            messages.append(self._message.tobytes())
            self._message = self._length
        self._reading = self._read()

    def _check(self) -> None:
        """Of an endpoint that has failed a request would never complete."""
        self._endpoint.raise_on_error()

    def _read(self) -> _Request:
        self._check()
        return cast("_Request", self._endpoint.stream_recv(Array(self._message)))

    def _send_bytes(self, there: Any, tag: int) -> None:
        self._keep(self._endpoint.tag_send(there, UCXXTag(tag)), there)

    def _receive_bytes(self, there: Any, tag: int) -> _Request:
        return self._keep(self._endpoint.tag_recv(there, UCXXTag(tag)), there)

    def _keep(self, request: _Request, there: object) -> _Request:
        self._kept.append((request, there))
        return request
