"""The HTTP server of a gateway process: a socket bound by us, uvicorn on it, signals left to us."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from isthmus.common.addresses import family_of, join_address
from isthmus.common.config import GatewayConfig
from isthmus.common.errors import ConfigError
from isthmus.common.logging import RateLimitedLog, get_logger

BACKLOG = 2048
KEEP_ALIVE_S = 75
MAX_REQUEST_LINE = 65_536  # of which that much is waited for before it is parsed as it is


def bind_socket(host: str, port: int, unread_ms: int, *, is_shared: bool = False) -> socket.socket:
    """``unread_ms``: how long a client may leave what it was sent unread before its connection is
    ended. ``is_shared``: with other processes that say so too; the kernel divides new connections
    among them.

    Raises ConfigError with one clear sentence when the address cannot be had."""
    key = "gateway.shared_port" if is_shared else "gateway.port"
    try:
        family = family_of(host)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror}", stage="start") from error
    # asyncio turns Nagle's algorithm off only where the protocol is named; accepted sockets inherit
    # both. A token must not wait for the acknowledgement of the one before it.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # A closed connection keeps its socket for what is still to be sent, and a client that reads
    # nothing would keep it for ever. Accepted sockets inherit this too.
    if sys.platform == "linux":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_ms)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        address = join_address(host, port)
        message = f"cannot listen on {address}: {error.strerror}; choose another {key}"
        raise ConfigError(message, stage="start") from error
    listener.setblocking(False)
    return listener


def bind_sockets(config: GatewayConfig) -> list[socket.socket]:
    """The gateway's own port, and the one that it shares with the others where there is one.

    Raises ConfigError."""
    own = bind_socket(config.host, config.port, config.request_timeout_ms)
    if not config.shared_port:
        return [own]
    try:
        shared = bind_socket(
            config.host, config.shared_port, config.request_timeout_ms, is_shared=True
        )
    except ConfigError:
        own.close()
        raise
    return [own, shared]


class _ServerLog(logging.Handler):
    """What uvicorn logs, in the format of all other lines, and one kind of warning once a while:
    anybody who can connect can make it say "Invalid HTTP request received."."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._log = get_logger("http")
        self._limited = RateLimitedLog(self._log)

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            self._log.error(record.getMessage(), exc_info=record.exc_info)
        else:
            self._limited.warning(str(record.msg), record.getMessage())


class _HttpProtocol(HttpToolsProtocol):
    """uvicorn's fast one, for clients of HTTP/1.1. It sends every stream in chunks, which older
    clients take for a part of the answer: whoever begins with a request of HTTP/1.0 is given to
    uvicorn's other one, for which the end of the connection is the end of such an answer."""

    _begun = b""
    _is_known = False

    def data_received(self, data: bytes) -> None:
        if self._is_known:
            super().data_received(data)
            return
        self._begun += data
        line, line_end, _ = self._begun.partition(b"\n")
        if not line_end and len(line) < MAX_REQUEST_LINE:
            return
        self._is_known, begun, self._begun = True, self._begun, b""
        if line.rstrip(b"\r").endswith(b" HTTP/1.0"):
            self._hand_over(begun)
        else:
            super().data_received(begun)

    def _hand_over(self, begun: bytes) -> None:
        self.connections.discard(self)
        older = H11Protocol(self.config, self.server_state, self.app_state, self.loop)
        older.connection_made(self.transport)
        self.transport.set_protocol(older)
        older.data_received(begun)


class HttpServer(uvicorn.Server):
    """Ends when ``should_exit`` is set; open streams then have ``drain_s`` to finish."""

    def __init__(self, app: ASGIApp, drain_s: float) -> None:
        logger = logging.getLogger("uvicorn.error")
        logger.handlers, logger.propagate = [_ServerLog()], False
        super().__init__(
            uvicorn.Config(
                app,
                http=_HttpProtocol,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # nothing here depends on the client's address
                # Longer than clients keep idle connections, so that they close and not we: a
                # request sent into a closing connection would be lost.
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, round(drain_s)),
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The process handles its own signals: uvicorn would end it with the signal's status."""
        yield
