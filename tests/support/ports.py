"""Ports that are a test's own."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """A port of the loopback interface that nobody else is given: a socket is bound to it that does
    not listen. Whoever connects is refused, until a server that reuses addresses, as all here do,
    listens there by name; it may stop and come back."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])
