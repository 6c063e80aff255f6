# ruff: noqa: N802, ARG002  (gRPC names the methods and their arguments)
"""The registry over gRPC: served by the process that starts a cluster, used by all others.

Every call has a deadline; a watch lasts until the server goes and then ends with InstanceLostError,
whatever the cause, so that its owner keeps the last view and comes back with ``resume_watch``.
On the wire a message with an empty key separates a watch's present entries from its changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio

from isthmus.common.clock import Clock
from isthmus.common.errors import DeadlineError, InstanceLostError, IsthmusError
from isthmus.common.logging import get_logger
from isthmus.common.registry.base import Entry, Listing, WatchEvent
from isthmus.common.registry.memory import MemoryRegistry
from isthmus.common.rpc import (
    abort_with,
    bind,
    create_channel,
    create_server,
    error_from_rpc,
    stop_server,
)
from isthmus.common.tasks import end_task, tell_if_broken
from isthmus.protos.v1 import registry_pb2 as pb
from isthmus.protos.v1 import registry_pb2_grpc

CALL_TIMEOUT_S = 2.0
if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]
_RequestT = TypeVar("_RequestT")
_ReplyT = TypeVar("_ReplyT")

_log = get_logger("registry")


class RegistryServicer(registry_pb2_grpc.RegistryServiceServicer):
    """``MemoryRegistry`` behind RegistryService. Has no state of its own."""

    def __init__(self, registry: MemoryRegistry) -> None:
        self._registry = registry

    async def Get(self, request: pb.GetRequest, context: Context) -> pb.GetResponse:
        entries = await self._registry.get(request.prefix)
        return pb.GetResponse(entries=[_entry_to_pb(entry) for entry in entries])

    async def Put(self, request: pb.PutRequest, context: Context) -> pb.PutResponse:
        try:
            revision = await self._registry.put(request.key, request.value, request.lease_id)
        except IsthmusError as error:
            await abort_with(context, error)
        return pb.PutResponse(revision=revision)

    async def CompareAndSwap(
        self, request: pb.CompareAndSwapRequest, context: Context
    ) -> pb.CompareAndSwapResponse:
        try:
            is_swapped = await self._registry.compare_and_swap(
                request.key, request.expected_revision, request.value, request.lease_id
            )
        except IsthmusError as error:
            await abort_with(context, error)
        return pb.CompareAndSwapResponse(is_swapped=is_swapped)

    async def Delete(self, request: pb.DeleteRequest, context: Context) -> pb.DeleteResponse:
        await self._registry.delete(request.key)
        return pb.DeleteResponse()

    async def GrantLease(
        self, request: pb.GrantLeaseRequest, context: Context
    ) -> pb.GrantLeaseResponse:
        return pb.GrantLeaseResponse(lease_id=await self._registry.grant_lease(request.ttl_ms))

    async def KeepAlive(
        self, request: pb.KeepAliveRequest, context: Context
    ) -> pb.KeepAliveResponse:
        return pb.KeepAliveResponse(is_alive=await self._registry.keep_alive(request.lease_id))

    async def RevokeLease(
        self, request: pb.RevokeLeaseRequest, context: Context
    ) -> pb.RevokeLeaseResponse:
        await self._registry.revoke_lease(request.lease_id)
        return pb.RevokeLeaseResponse()

    async def Watch(
        self, request: pb.WatchRequest, context: Context
    ) -> AsyncIterator[pb.WatchResponse]:
        listing = await self._registry.list_and_watch(request.prefix)
        try:
            for entry in listing.entries:
                yield _event_to_pb(WatchEvent(entry.key, entry, entry.revision))
            yield pb.WatchResponse()
            async for event in listing.changes:
                yield _event_to_pb(event)
        except InstanceLostError as error:
            await abort_with(context, error)
        finally:
            await listing.changes.aclose()


class RegistryServer:
    """A MemoryRegistry, its lease timer and its gRPC server, started and stopped together."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.registry = MemoryRegistry(clock)
        self._server: grpc.aio.Server | None = None
        self._expiry: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> str:
        """Binds and serves; returns ``host:port``. Raises InternalError when the port is taken."""
        server = create_server()
        registry_pb2_grpc.add_RegistryServiceServicer_to_server(
            RegistryServicer(self.registry), server
        )
        address = await bind(server, host, port)
        await server.start()
        self._server = server
        self._expiry = asyncio.create_task(self.registry.run_expiry(), name="registry-expiry")
        self._expiry.add_done_callback(tell_if_broken(_log, "leases do not end any more"))
        return address

    async def stop(self, grace_s: float = 0.2) -> None:
        """Ends every watch, then the server. Idempotent."""
        self.registry.close()
        await end_task(self._expiry)
        self._expiry = None
        if self._server is not None:
            await stop_server(self._server, grace_s)
            self._server = None


class _RemoteChanges:
    """The changes of one Watch call. Cancels the call when closed."""

    def __init__(self, call: grpc.aio.UnaryStreamCall[pb.WatchRequest, pb.WatchResponse]) -> None:
        self._call = call

    def __aiter__(self) -> _RemoteChanges:
        return self

    async def __anext__(self) -> WatchEvent:
        return _event_from_pb(await self.read())

    async def read(self) -> pb.WatchResponse:
        """The next message as it came. Raises InstanceLostError at any kind of end."""
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            text = f"registry: {error.details() or error.code().name}"
            raise InstanceLostError(text, stage="registry") from error
        if not isinstance(message, pb.WatchResponse):
            raise InstanceLostError("registry: the watch ended", stage="registry")
        return message

    async def aclose(self) -> None:
        self._call.cancel()


class EmbeddedRegistryClient:
    """Implements ``Registry`` against a RegistryServer.

    A failed call raises InstanceLostError (nobody there) or DeadlineError (no answer in
    ``timeout_s``); nothing is retried here. The channel reconnects by itself.
    """

    def __init__(self, address: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._channel = create_channel(address)
        self._stub = registry_pb2_grpc.RegistryServiceStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    async def get(self, prefix: str) -> list[Entry]:
        reply = await self._call(self._stub.Get, pb.GetRequest(prefix=prefix))
        return [_entry_from_pb(entry) for entry in reply.entries]

    async def put(self, key: str, value: bytes, lease_id: int = 0) -> int:
        """Raises StaleEpochError when the lease has expired."""
        request = pb.PutRequest(key=key, value=value, lease_id=lease_id)
        return int((await self._call(self._stub.Put, request)).revision)

    async def compare_and_swap(
        self, key: str, expected_revision: int, value: bytes, lease_id: int = 0
    ) -> bool:
        """Raises StaleEpochError when the lease has expired."""
        request = pb.CompareAndSwapRequest(
            key=key, expected_revision=expected_revision, value=value, lease_id=lease_id
        )
        return bool((await self._call(self._stub.CompareAndSwap, request)).is_swapped)

    async def delete(self, key: str) -> None:
        await self._call(self._stub.Delete, pb.DeleteRequest(key=key))

    async def grant_lease(self, ttl_ms: int) -> int:
        reply = await self._call(self._stub.GrantLease, pb.GrantLeaseRequest(ttl_ms=ttl_ms))
        return int(reply.lease_id)

    async def keep_alive(self, lease_id: int) -> bool:
        reply = await self._call(self._stub.KeepAlive, pb.KeepAliveRequest(lease_id=lease_id))
        return bool(reply.is_alive)

    async def revoke_lease(self, lease_id: int) -> None:
        await self._call(self._stub.RevokeLease, pb.RevokeLeaseRequest(lease_id=lease_id))

    async def watch(self, prefix: str) -> AsyncGenerator[WatchEvent, None]:
        listing = await self.list_and_watch(prefix)
        try:
            for entry in listing.entries:
                yield WatchEvent(entry.key, entry, entry.revision)
            async for event in listing.changes:
                yield event
        finally:
            await listing.changes.aclose()

    async def list_and_watch(self, prefix: str) -> Listing:
        """Raises InstanceLostError or DeadlineError when the entries do not come in time."""
        changes = _RemoteChanges(self._stub.Watch(pb.WatchRequest(prefix=prefix)))
        entries: list[Entry] = []
        is_complete = False
        try:
            async with asyncio.timeout(self._timeout_s):
                while (message := await changes.read()).key:
                    entries.append(_entry_from_pb(message.entry))
            is_complete = True
        except TimeoutError as error:
            text = f"registry: no listing within {self._timeout_s} s"
            raise DeadlineError(text, stage="registry") from error
        finally:
            if not is_complete:
                await changes.aclose()
        return Listing(tuple(entries), changes)

    async def _call(
        self, method: grpc.aio.UnaryUnaryMultiCallable[_RequestT, _ReplyT], request: _RequestT
    ) -> _ReplyT:
        try:
            return await method(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, peer="registry", stage="registry") from error


def _entry_to_pb(entry: Entry) -> pb.RegistryEntry:
    return pb.RegistryEntry(key=entry.key, value=entry.value, revision=entry.revision)


def _entry_from_pb(message: pb.RegistryEntry) -> Entry:
    return Entry(message.key, message.value, message.revision)


def _event_to_pb(event: WatchEvent) -> pb.WatchResponse:
    return pb.WatchResponse(
        key=event.key,
        entry=_entry_to_pb(event.entry) if event.entry else None,
        is_deleted=event.entry is None,
        revision=event.revision,
    )


def _event_from_pb(message: pb.WatchResponse) -> WatchEvent:
    entry = None if message.is_deleted else _entry_from_pb(message.entry)
    return WatchEvent(message.key, entry, message.revision)
