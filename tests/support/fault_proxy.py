"""A TCP address in front of another one, that cuts connections and corrupts what they carry.

It knows where HTTP/2 frames begin, and corrupts by overwriting the header of one: a receiver can
see that. Payloads are left alone, because gRPC does not check them: over a network that changes
bytes unseen, TLS has to.

When nobody listens behind it any more it does not listen either, as a dead process's own port.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

_PREFACE_BYTES = 24  # what a client sends before its first frame
_HEADER_BYTES = 9
_LENGTH_BYTES = 3
_CHUNK_BYTES = 64 * 1024


class Frames:
    """Where frames begin in one direction of a connection, fed piece by piece."""

    def __init__(self, num_leading_bytes: int) -> None:
        self._left = num_leading_bytes  # until the next header
        self._header = b""

    def begin_in(self, data: bytes) -> list[int]:
        """Indices in ``data`` at which a frame's header begins."""
        starts = []
        at = 0
        while at < len(data):
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
                at += step
                continue
            if not self._header:
                starts.append(at)
            taken = data[at : at + _HEADER_BYTES - len(self._header)]
            self._header += taken
            at += len(taken)
            if len(self._header) == _HEADER_BYTES:
                self._left = int.from_bytes(self._header[:_LENGTH_BYTES], "big")
                self._header = b""
        return starts


@dataclass(eq=False)
class _Connection:
    writers: list[asyncio.StreamWriter]
    shall_corrupt: bool = field(default=False)


class FaultProxy:
    """Lives on the event loop; ``close`` ends everything."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_cut = 0
        self.num_corrupted = 0

    async def start(self) -> str:
        """Listens; returns ``host:port``."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    def cut(self) -> None:
        """Resets every connection there is."""
        for connection in list(self._connections):
            self.num_cut += 1
            _reset(connection)

    def corrupt(self) -> None:
        """The next frame of each connection, in whichever direction, has a header that is none."""
        for connection in self._connections:
            connection.shall_corrupt = True

    async def close(self) -> None:
        self._stop_listening()
        for connection in list(self._connections):
            _reset(connection)
        while self._tasks:  # one may be accepted yet that came before
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection([writer])
        self._connections.add(connection)
        try:
            behind, onward = await asyncio.open_connection(*self._target)
            connection.writers.append(onward)
            await asyncio.gather(
                self._pump(connection, reader, onward, Frames(_PREFACE_BYTES)),
                self._pump(connection, behind, writer, Frames(0)),
            )
        except ConnectionRefusedError:
            self._stop_listening()
        except OSError:
            pass  # either end went
        finally:
            self._connections.discard(connection)
            _reset(connection)
            for end in connection.writers:
                with suppress(OSError):
                    await end.wait_closed()

    async def _pump(
        self,
        connection: _Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        frames: Frames,
    ) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            starts = frames.begin_in(data)
            if connection.shall_corrupt:
                data = self._corrupted(connection, data, starts)
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()

    def _corrupted(self, connection: _Connection, data: bytes, starts: list[int]) -> bytes:
        for start in starts:
            if start + _LENGTH_BYTES <= len(data):
                connection.shall_corrupt = False
                self.num_corrupted += 1
                end = min(start + _HEADER_BYTES, len(data))
                return data[:start] + b"\xff" * (end - start) + data[end:]
        return data


def _reset(connection: _Connection) -> None:
    for writer in connection.writers:
        writer.transport.abort()
