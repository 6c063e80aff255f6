"""Where a router answers, as it stands in the registry."""

from __future__ import annotations

import secrets

import msgspec

ROUTER = "router"
"""What routers lead: the last part of their leader's key."""


class RouterRecord(msgspec.Struct, frozen=True):
    """``incarnation`` tells a process from the one before it under the same name and address."""

    router_id: str
    address: str
    """host:port of its gRPC server"""
    pid: int
    metrics_address: str = ""
    incarnation: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> RouterRecord | None:
        """None for what is not one: a newer version's, say."""
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError:
            return None
