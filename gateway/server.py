"""The HTTP server of a gateway process: a socket bound by us, uvicorn on it, signals left to us."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from isthmus.common.errors import ConfigError
from isthmus.common.logging import RateLimitedLog, get_logger

BACKLOG = 2048
KEEP_ALIVE_S = 75


def bind_socket(host: str, port: int, unread_ms: int) -> socket.socket:
    """``unread_ms``: how long a client may leave what it was sent unread before its connection is
    ended.

    Raises ConfigError with one clear sentence when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named; accepted sockets inherit
    # both. A token must not wait for the acknowledgement of the one before it.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # A closed connection keeps its socket for what is still to be sent, and a client that reads
    # nothing would keep it for ever. Accepted sockets inherit this too.
    if sys.platform == "linux":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_ms)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        message = f"cannot listen on {host}:{port}: {error.strerror}; choose another gateway.port"
        raise ConfigError(message, stage="start") from error
    listener.setblocking(False)
    return listener


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


class HttpServer(uvicorn.Server):
    """Ends when ``should_exit`` is set; open streams then have ``drain_s`` to finish."""

    def __init__(self, app: FastAPI, drain_s: float) -> None:
        logger = logging.getLogger("uvicorn.error")
        logger.handlers, logger.propagate = [_ServerLog()], False
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
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
