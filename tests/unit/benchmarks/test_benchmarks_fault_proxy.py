"""The proxy that storms put before instances does what it says, and only that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.fault_proxy import FaultProxy, Frames

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + b"\x00" * 6 + payload


@pytest.mark.parametrize("step", [1, 4, 9, 1000])
def test_frames_are_found_however_the_stream_is_cut(step: int) -> None:
    stream = PREFACE + frame(b"") + frame(b"abc") + frame(b"d" * 40)
    frames = Frames(len(PREFACE))
    starts = [
        place + start
        for place in range(0, len(stream), step)
        for start in frames.begin_in(stream[place : place + step])
    ]
    assert starts == [24, 33, 45]


@asynccontextmanager
async def echo_behind_proxy() -> AsyncIterator[tuple[FaultProxy, asyncio.Server, str, int]]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    proxy = FaultProxy(f"{host}:{port}")
    address = await proxy.start()
    name, _, number = address.rpartition(":")
    try:
        yield proxy, server, name, int(number)
    finally:
        await proxy.close()
        server.close()


@pytest.mark.asyncio
async def test_bytes_pass_until_they_are_garbled_or_cut() -> None:
    async with echo_behind_proxy() as (proxy, _, host, port):
        reader, writer = await asyncio.open_connection(host, port)
        sent = PREFACE + frame(b"abc")
        writer.write(sent)
        assert await asyncio.wait_for(reader.readexactly(len(sent)), 20) == sent
        proxy.corrupt()
        writer.write(frame(b"xyz"))
        assert await asyncio.wait_for(reader.readexactly(12), 20) == b"\xff" * 9 + b"xyz"
        assert proxy.num_corrupted == 1
        proxy.cut()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), 20)
        assert proxy.num_cut == 1
        writer.close()


@pytest.mark.asyncio
async def test_it_listens_only_while_somebody_does_behind_it() -> None:
    async with echo_behind_proxy() as (_, server, host, port):
        server.close()

        async def is_refused() -> bool:
            try:
                _, writer = await asyncio.open_connection(host, port)
            except ConnectionRefusedError:
                return True
            writer.close()
            return False

        for _ in range(1000):
            if await is_refused():
                return
            await asyncio.sleep(0.01)
        pytest.fail("it went on listening")
