"""Calls to prefill instances: one channel per instance and epoch, typed errors, bounded awaits.

A handshake is made once per (instance, epoch), by the first request that needs it; others wait for
that one instead of making their own.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from enum import Enum

import grpc.aio

from isthmus.common.addresses import split_address
from isthmus.common.errors import HandshakeError, InstanceLostError, IsthmusError, StaleEpochError
from isthmus.common.ids import InstanceId, TransferId
from isthmus.common.logging import get_logger
from isthmus.common.prefill import PrefillFailed, PrefillUpdate
from isthmus.common.rpc import create_channel, error_from_rpc
from isthmus.common.tasks import tell_if_broken
from isthmus.common.transfer import TransferTicket
from isthmus.common.types import InstanceRef, Request
from isthmus.kvtransfer.manager import TransferManager
from isthmus.protos.convert.prefill import update_from_pb
from isthmus.protos.convert.requests import request_to_pb
from isthmus.protos.convert.times import ms_left
from isthmus.protos.convert.transfers import offer_from_pb, offer_to_pb, ticket_to_pb
from isthmus.protos.v1 import (
    instance_pb2,
    instance_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    transfer_pb2,
    transfer_pb2_grpc,
)

# How long an abort may take: the sender waits for writes that are under way.
_ABORT_TIMEOUT_S = 10.0
_PROBE_TIMEOUT_S = 1.0
_OLD_CHANNEL_GRACE_S = 5.0
_STREAM_GRACE_S = 5.0

log = get_logger("prefill_client")


class AbortReply(Enum):
    UNANSWERED = "unanswered"
    ENDED = "ended"  # nothing is posted any more; what was posted may still land
    QUIET = "quiet"  # nothing can land any more


@dataclass(frozen=True, slots=True)
class _Peer:
    ref: InstanceRef
    channel: grpc.aio.Channel


class PrefillClient:
    """Owns the channels. Lives on the event loop."""

    def __init__(self, transfers: TransferManager, handshake_timeout_ms: int) -> None:
        self._transfers = transfers
        self._handshake_timeout_s = handshake_timeout_ms / 1000
        self._peers: dict[InstanceId, _Peer] = {}
        self._num_calls: Counter[InstanceId] = Counter()  # Prefill calls under way
        self._handshakes: dict[InstanceRef, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def _channel(self, ref: InstanceRef) -> grpc.aio.Channel:
        """Raises StaleEpochError for an epoch that is over."""
        if self._is_outdated(ref):
            raise StaleEpochError(
                f"{ref.instance_id} of epoch {ref.epoch} has been replaced",
                stage="prefill",
                instance_id=ref.instance_id,
            )
        peer = self._peers.get(ref.instance_id)
        if peer is None or peer.ref != ref:
            if peer is not None:
                self._close_later(peer)
            peer = self._peers[ref.instance_id] = _Peer(ref, create_channel(ref.address))
        return peer.channel

    @asynccontextmanager
    async def _channel_of_any_epoch(self, ref: InstanceRef) -> AsyncIterator[grpc.aio.Channel]:
        """To settle what is left of an epoch, also when it has been replaced."""
        if not self._is_outdated(ref):
            yield self._channel(ref)
            return
        async with create_channel(ref.address) as channel:
            yield channel

    def _is_outdated(self, ref: InstanceRef) -> bool:
        """True when a newer epoch of the instance is known: that process has been replaced."""
        peer = self._peers.get(ref.instance_id)
        return peer is not None and peer.ref.epoch > ref.epoch

    def _close_later(self, peer: _Peer) -> None:
        self.spawn(peer.channel.close(_OLD_CHANNEL_GRACE_S), f"close {peer.ref.instance_id}")

    def idle_peers(self) -> set[InstanceId]:
        """Those that have a channel without a call."""
        return {peer for peer in self._peers if not self._num_calls[peer]}

    async def forget(self, instance_id: InstanceId) -> None:
        """Gives up the channel of an instance that has left."""
        peer = self._peers.pop(instance_id, None)
        if peer is not None:
            self._close_later(peer)

    def spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        """Runs something that outlives its caller, until it ends or this client is closed."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(tell_if_broken(log, f"{name} broke"))

    async def ensure_handshake(self, ref: InstanceRef) -> None:
        """Returns when this very epoch is known to the transfers. Raises HandshakeError,
        LayoutMismatchError, StaleEpochError or InstanceLostError, the same to all who wait."""
        if self._transfers.knows(ref):
            return
        handshake = self._handshakes.get(ref)
        if handshake is None:
            # A task of its own: whoever began it may be cancelled while others wait for it.
            handshake = asyncio.create_task(
                self._shake_hands(ref), name=f"handshake {ref.instance_id}"
            )
            self._handshakes[ref] = handshake
            handshake.add_done_callback(lambda ended: self._handshake_ended(ref, ended))
        await asyncio.shield(handshake)

    def _handshake_ended(self, ref: InstanceRef, handshake: asyncio.Task[None]) -> None:
        del self._handshakes[ref]
        if not handshake.cancelled() and (error := handshake.exception()) is not None:
            log.warning("handshake failed", peer=ref.instance_id, problem=str(error))

    async def _shake_hands(self, ref: InstanceRef) -> None:
        stub = transfer_pb2_grpc.TransferServiceStub(self._channel(ref))
        offer = offer_to_pb(self._transfers.offer())
        try:
            async with asyncio.timeout(self._handshake_timeout_s):
                answer = await stub.Handshake(transfer_pb2.HandshakeRequest(offer=offer))
                await self._transfers.complete(offer_from_pb(answer.offer))
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, peer=ref.instance_id, stage="handshake") from error
        except TimeoutError as error:
            raise HandshakeError(
                f"{ref.instance_id} did not answer within {self._handshake_timeout_s} s",
                stage="handshake",
                instance_id=ref.instance_id,
            ) from error
        log.info("handshake", peer=ref.instance_id, epoch=ref.epoch)

    async def prefill(
        self, ref: InstanceRef, request: Request, ticket: TransferTicket
    ) -> AsyncGenerator[PrefillUpdate, None]:
        """The updates of one call, made again after a handshake where the instance knows nothing of
        one. Raises InstanceLostError when the stream breaks, what the instance says and what
        ``ensure_handshake`` raises. Closing the iterator cancels the call."""
        async with aclosing(self._prefill(ref, request, ticket)) as updates:
            async for update in updates:
                if isinstance(update, PrefillFailed) and isinstance(update.error, HandshakeError):
                    break
                yield update
            else:
                return
        # It has dropped this instance, whose writes did not end or that it missed for too long.
        await self._shake_hands(ref)
        async with aclosing(self._prefill(ref, request, ticket)) as updates:
            async for update in updates:
                yield update

    async def _prefill(
        self, ref: InstanceRef, request: Request, ticket: TransferTicket
    ) -> AsyncGenerator[PrefillUpdate, None]:
        stub = prefill_pb2_grpc.PrefillServiceStub(self._channel(ref))
        call = stub.Prefill(
            prefill_pb2.PrefillRequest(request=request_to_pb(request), ticket=ticket_to_pb(ticket)),
            # However long the prompt waits and is computed: a peer that has stopped or vanished is
            # noticed by the channel's keepalive, and a transfer that stalls by its session.
            timeout=ms_left(ticket.deadline_ns) / 1000 + _STREAM_GRACE_S,
        )
        self._num_calls[ref.instance_id] += 1
        try:
            async for message in call:
                if (update := update_from_pb(message)) is not None:
                    yield update
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, peer=ref.instance_id, stage="prefill") from error
        finally:
            call.cancel()
            self._num_calls[ref.instance_id] -= 1
            if not self._num_calls[ref.instance_id]:
                del self._num_calls[ref.instance_id]

    async def abort(self, ref: InstanceRef, transfer_id: TransferId) -> AbortReply:
        """Ends a transfer at its sender, however it was doing."""
        message = prefill_pb2.AbortRequest(transfer_id=transfer_id, reason="decode ended it")
        try:
            async with self._channel_of_any_epoch(ref) as channel:
                stub = prefill_pb2_grpc.PrefillServiceStub(channel)
                reply = await stub.Abort(message, timeout=_ABORT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.debug("abort unanswered", peer=ref.instance_id, problem=error.details())
            return AbortReply.UNANSWERED
        return AbortReply.QUIET if reply.quiesced else AbortReply.ENDED

    async def is_gone(self, ref: InstanceRef) -> bool:
        """True is a proof that the process behind this epoch has ended: nobody listens at its
        address, or somebody of another epoch does. A process that is only stopped still listens,
        and that a newer epoch exists proves nothing: it may have been started beside a stopped one.
        """
        host, port = split_address(ref.address)
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                _, writer = await asyncio.open_connection(host, port)
                writer.close()
        except ConnectionRefusedError:
            return True
        except (OSError, TimeoutError):
            return False
        try:
            async with self._channel_of_any_epoch(ref) as channel:
                stub = instance_pb2_grpc.InstanceServiceStub(channel)
                reply = await stub.GetInfo(instance_pb2.GetInfoRequest(), timeout=_PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return (reply.info.instance_id, reply.info.epoch) != (ref.instance_id, ref.epoch)

    async def close(self) -> None:
        tasks = [*self._tasks, *self._handshakes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for peer in self._peers.values():
            await peer.channel.close()
        self._peers.clear()


def lost(ref: InstanceRef, problem: str) -> IsthmusError:
    """The stream of ``ref`` did not end as it should."""
    return InstanceLostError(
        f"{ref.instance_id}: {problem}", stage="prefill", instance_id=ref.instance_id
    )
