from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from isthmus.common.errors import (
    DeadlineError,
    InstanceLostError,
    InternalError,
    IsthmusError,
    OutOfBlocksError,
    StaleEpochError,
)
from isthmus.common.rpc import (
    abort_with,
    bind,
    create_channel,
    create_server,
    error_from_rpc,
    stop_server,
)
from tests.support.ipv6 import needs_ipv6

Handler = Callable[[bytes, grpc.aio.ServicerContext], Awaitable[bytes]]


@asynccontextmanager
async def serving(handler: Handler, host: str = "127.0.0.1") -> AsyncIterator[str]:
    server = create_server()
    method = grpc.unary_unary_rpc_method_handler(handler)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("t", {"Call": method})])
    address = await bind(server, host, 0)
    await server.start()
    try:
        yield address
    finally:
        await stop_server(server, 0.1)


async def failure(address: str, timeout_s: float = 5.0) -> IsthmusError:
    async with create_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/t/Call")(b"", timeout=timeout_s)
    return error_from_rpc(caught.value, peer="decode-0", stage="admit")


@pytest.mark.asyncio
async def test_typed_error_crosses_the_wire() -> None:
    async def refuse(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await abort_with(context, OutOfBlocksError("full", retry_after_ms=7))

    async with serving(refuse) as address:
        error = await failure(address)
    assert type(error) is OutOfBlocksError
    assert (error.message, error.retry_after_ms) == ("full", 7)


@pytest.mark.asyncio
async def test_bug_of_a_peer_is_an_internal_error_that_names_it() -> None:
    async def fail(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        raise ZeroDivisionError

    async with serving(fail) as address:
        error = await failure(address)
    assert type(error) is InternalError
    assert error.instance_id == "decode-0"


@pytest.mark.asyncio
async def test_peer_that_is_not_there_is_lost(free_port: int) -> None:
    assert type(await failure(f"127.0.0.1:{free_port}")) is InstanceLostError


@pytest.mark.asyncio
async def test_late_answer_is_a_deadline() -> None:
    import asyncio

    async def wait(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await asyncio.Event().wait()
        return b""

    async with serving(wait) as address:
        assert type(await failure(address, timeout_s=0.05)) is DeadlineError


@pytest.mark.asyncio
async def test_taken_port_is_one_sentence() -> None:
    async def echo(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return request

    async with serving(echo) as address:
        host, _, port = address.rpartition(":")
        second = create_server()
        with pytest.raises(InternalError, match=f"cannot listen on {address}"):
            await bind(second, host, int(port))
        await stop_server(second, 0)


@pytest.mark.asyncio
async def test_whoever_serves_no_such_call_is_not_who_was_meant() -> None:
    """An instance that came back with another role, say."""
    server = create_server()
    address = await bind(server, "127.0.0.1", 0)
    await server.start()
    error = await failure(address, timeout_s=20)
    assert type(error) is StaleEpochError
    assert error.retryable
    assert error.message.startswith("decode-0 does not serve such calls")
    await stop_server(server, 0)


@needs_ipv6
@pytest.mark.asyncio
async def test_an_ipv6_host_is_listened_on_and_its_address_can_be_reached() -> None:
    async def echo(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return request

    async with serving(echo, "::1") as address, create_channel(address) as channel:
        assert address.startswith("[::1]:")
        assert await channel.unary_unary("/t/Call")(b"hello", timeout=20) == b"hello"
