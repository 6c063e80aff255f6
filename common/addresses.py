"""Addresses as they are written and listened on, be they IPv4 or IPv6.

A *host* is a name or an IP address without brackets; an *address* is ``host:port``, with an IPv6
host in brackets, as gRPC and URLs write it.
"""

from __future__ import annotations

import socket


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Raises ValueError for what ends without a port, as an IPv6 host without brackets does."""
    host, _, port = address.rpartition(":")
    number = int(port)
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"an IPv6 host stands in brackets before its port: {address!r}")
    return without_brackets(host), number


def without_brackets(host: str) -> str:
    return host.removeprefix("[").removesuffix("]")


def family_of(host: str) -> socket.AddressFamily:
    """IPv4 for a name that has addresses of both, as ``localhost`` has: many connect to that by
    number. Raises OSError for a name that nobody knows."""
    found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    families = [family for family, *_ in found]
    return socket.AF_INET if socket.AF_INET in families else families[0]


def listen_on(host: str, backlog: int | None = None) -> socket.socket:
    """On a free port of one address of this machine. Raises OSError."""
    return socket.create_server((host, 0), family=family_of(host), backlog=backlog)
