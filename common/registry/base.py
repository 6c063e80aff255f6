"""The registry: where instances are found, under leases. Loads and KV events never go through it.

Keys are paths under ``/isthmus/<cluster>``: ``/instances/<id>`` holds an ``InstanceInfo`` message
under a lease, ``/epochs/<id>`` the last epoch given to an instance (no lease), ``/leaders/<what>``
who leads of several that could (under its lease), ``/routers/<id>`` where a router answers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Entry:
    key: str
    value: bytes
    revision: int  # grows with every write of the registry


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """A change under a prefix; ``entry`` is None when the key was deleted or its lease expired."""

    key: str
    entry: Entry | None
    revision: int


class Changes(Protocol):
    """The changes of an open watch; ends like ``Registry.watch`` and must be closed when done."""

    def __aiter__(self) -> AsyncIterator[WatchEvent]: ...

    async def __anext__(self) -> WatchEvent: ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Listing:
    """Everything present at one instant, and every change after it."""

    entries: tuple[Entry, ...]
    changes: Changes


class Registry(Protocol):
    """Implementations: MemoryRegistry (in process), EmbeddedRegistryClient (gRPC), etcd later."""

    async def get(self, prefix: str) -> list[Entry]:
        """All entries whose key begins with ``prefix``, by key."""
        ...

    async def put(self, key: str, value: bytes, lease_id: int = 0) -> int:
        """Writes and returns the revision; with a lease the key ends with the lease."""
        ...

    async def compare_and_swap(
        self, key: str, expected_revision: int, value: bytes, lease_id: int = 0
    ) -> bool:
        """Writes when the key's revision is the expected one (0 = absent).

        With a lease the key ends with the lease; without one it keeps the lease it has.
        """
        ...

    async def delete(self, key: str) -> None: ...

    async def grant_lease(self, ttl_ms: int) -> int: ...

    async def keep_alive(self, lease_id: int) -> bool:
        """Prolongs; False when the lease has already expired (then register again)."""
        ...

    async def revoke_lease(self, lease_id: int) -> None: ...

    def watch(self, prefix: str) -> AsyncIterator[WatchEvent]:
        """First every present entry, then changes.

        Ends with InstanceLostError if the registry goes.
        """
        ...

    async def list_and_watch(self, prefix: str) -> Listing:
        """Like ``watch`` with the present entries apart: what a watcher that comes back needs to
        find the keys that went meanwhile."""
        ...


def instance_key(cluster: str, instance_id: str) -> str:
    return f"/isthmus/{cluster}/instances/{instance_id}"


def instances_prefix(cluster: str) -> str:
    return f"/isthmus/{cluster}/instances/"


def epoch_key(cluster: str, instance_id: str) -> str:
    return f"/isthmus/{cluster}/epochs/{instance_id}"


def leader_key(cluster: str, what: str) -> str:
    return f"/isthmus/{cluster}/leaders/{what}"


def routers_prefix(cluster: str) -> str:
    return f"/isthmus/{cluster}/routers/"


def deciders_prefix(cluster: str) -> str:
    """Of gateways that decide by themselves while no router leads, and can be asked why."""
    return f"/isthmus/{cluster}/deciders/"
