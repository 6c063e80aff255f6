"""Messages over a stream: four bytes of length, little-endian, and so many bytes."""

from __future__ import annotations

import socket
import struct

LENGTH = struct.Struct("<I")
_CHUNK_BYTES = 1 << 16
MAX_BYTES = 1 << 24
"""Longest message that is believed; a longer one is another protocol, or damage."""


def frame(payload: bytes) -> bytes:
    return LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Puts together what one connection brings."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def read(self, connection: socket.socket) -> bool:
        """Takes what is there without waiting; False once nothing more can come."""
        try:
            while data := connection.recv(_CHUNK_BYTES, socket.MSG_DONTWAIT):
                self._buffer += data
        except BlockingIOError:
            return not self._is_damaged
        except OSError:
            return False
        return False

    def wait(self, connection: socket.socket) -> bool:
        """Waits for more on a blocking connection; False once nothing more can come."""
        data = connection.recv(_CHUNK_BYTES)
        self._buffer += data
        return bool(data) and not self._is_damaged

    def take(self) -> list[bytes]:
        """Whole messages, in order."""
        messages: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= LENGTH.size and not self._is_damaged_at(start):
            (length,) = LENGTH.unpack_from(self._buffer, start)
            stop = start + LENGTH.size + length
            if stop > len(self._buffer):
                break
            messages.append(bytes(self._buffer[start + LENGTH.size : stop]))
            start = stop
        del self._buffer[:start]
        return messages

    @property
    def _is_damaged(self) -> bool:
        return self._is_damaged_at(0)

    def _is_damaged_at(self, start: int) -> bool:
        if len(self._buffer) - start < LENGTH.size:
            return False
        return bool(LENGTH.unpack_from(self._buffer, start)[0] > MAX_BYTES)
