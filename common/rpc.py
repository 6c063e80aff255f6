"""gRPC in one place: channels, servers, and typed errors across the wire.

An IsthmusError travels as its gRPC status plus an ``ErrorDetail`` in the trailing metadata under
``isthmus-error-bin``; the caller gets the same leaf back from ``error_from_rpc``.
"""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import grpc
import grpc.aio
import msgspec

from isthmus.common.addresses import join_address
from isthmus.common.errors import (
    CancelledError,
    DeadlineError,
    ErrorDetail,
    InstanceLostError,
    InternalError,
    IsthmusError,
    StaleEpochError,
)

ERROR_KEY = "isthmus-error-bin"
MAX_MESSAGE_BYTES = 64 * 2**20
_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A peer that stopped, or vanished without closing its socket, is noticed within 7 to 12 s; one
    # that stalls for a few seconds keeps its streams. The keepalive timeout alone does nothing:
    # what ends the connection is the timeout of any ping, a minute by default.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 7_000),
    ("grpc.http2.ping_timeout_ms", 7_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 4_000),
]


def create_channel(address: str) -> grpc.aio.Channel:
    """A channel that never goes through a proxy of the environment and reconnects quickly."""
    return grpc.aio.insecure_channel(
        address,
        options=[
            *_OPTIONS,
            ("grpc.enable_http_proxy", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1_000),
            # Two channels to one address must not share a broken connection across event loops.
            ("grpc.use_local_subchannel_pool", 1),
        ],
    )


def create_server() -> grpc.aio.Server:
    return grpc.aio.server(options=[*_OPTIONS, ("grpc.so_reuseport", 0)])


async def bind(server: grpc.aio.Server, host: str, port: int) -> str:
    """Binds and returns the address; raises InternalError when the port is taken."""
    wanted = join_address(host, port)
    try:
        bound = server.add_insecure_port(wanted)
    except RuntimeError as error:
        raise InternalError(f"cannot listen on {wanted}: {error}", stage="start") from error
    if bound == 0:
        raise InternalError(f"cannot listen on {wanted}", stage="start")
    return join_address(host, bound)


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: IsthmusError) -> NoReturn:
    """Ends a call with a typed error. Always raises."""
    await context.abort(
        getattr(grpc.StatusCode, error.grpc_status),
        error.message,
        trailing_metadata=((ERROR_KEY, msgspec.msgpack.encode(ErrorDetail.of(error))),),
    )
    raise AssertionError("context.abort always raises")


def error_from_rpc(error: grpc.aio.AioRpcError, *, peer: str = "", stage: str = "") -> IsthmusError:
    """The typed error behind a failed call; a bare status becomes the nearest leaf."""
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_KEY and isinstance(value, bytes):
            return msgspec.msgpack.decode(value, type=ErrorDetail).to_error()
    text = f"{peer or 'peer'}: {error.details() or error.code().name}"
    match error.code():
        case grpc.StatusCode.UNAVAILABLE:
            return InstanceLostError(text, stage=stage, instance_id=peer)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineError(text, stage=stage, instance_id=peer)
        case grpc.StatusCode.CANCELLED:
            return CancelledError(text, stage=stage, instance_id=peer)
        case grpc.StatusCode.UNIMPLEMENTED:
            # Whoever was meant is not there any more: the port is another role's by now.
            text = f"{peer or 'peer'} does not serve such calls: it has another role or version"
            return StaleEpochError(text, stage=stage, instance_id=peer)
        case _:
            return InternalError(text, stage=stage, instance_id=peer)


async def stop_server(server: grpc.aio.Server, grace_s: float) -> None:
    """Stops without ever waiting longer than the grace and a second."""
    try:
        await asyncio.wait_for(server.stop(grace_s), grace_s + 1)
    except TimeoutError:
        return
