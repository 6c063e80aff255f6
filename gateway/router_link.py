"""The connection to one router process: questions, and one stream of outcomes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import grpc
import grpc.aio

from isthmus.common.backoff import Backoff
from isthmus.common.errors import InstanceLostError
from isthmus.common.logging import get_logger
from isthmus.common.registry.routers import RouterRecord
from isthmus.common.rpc import create_channel, error_from_rpc
from isthmus.common.tasks import tell_if_broken
from isthmus.common.types import RouteDecision
from isthmus.gateway.pulse import Pulse
from isthmus.protos.convert.decisions import decision_from_pb
from isthmus.protos.v1 import router_pb2 as pb
from isthmus.protos.v1 import router_pb2_grpc

MAX_OUTCOMES = 10_000
_NO_SIGN = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
ReplyT = TypeVar("ReplyT")
_log = get_logger("router_link")
if TYPE_CHECKING:
    OutcomeCall = grpc.aio.StreamUnaryCall[pb.ReportOutcomeRequest, pb.ReportOutcomeResponse]


class RouterLink:
    """One router at one incarnation. Owns its channel, the task that sends outcomes and the one
    that watches its pulse. ``on_silence``: it is asked, and gives no sign of life any more."""

    def __init__(
        self, record: RouterRecord, gateway_id: str, on_silence: Callable[[RouterLink], None]
    ) -> None:
        self.record = record
        self._gateway_id = gateway_id
        self._channel = create_channel(record.address)
        self._stub = router_pb2_grpc.RouterServiceStub(self._channel)
        self._outcomes: asyncio.Queue[pb.ReportOutcomeRequest] = asyncio.Queue()
        self._next: pb.ReportOutcomeRequest | None = None
        self._pulse = Pulse(self._beat, lambda: on_silence(self))
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._send(), name="router-outcomes"),
            loop.create_task(self._pulse.run(), name="router-pulse"),
        ]
        for task in self._tasks:
            task.add_done_callback(tell_if_broken(_log, "the link to a router broke"))

    @property
    def is_silent(self) -> bool:
        """It is not worth asking."""
        return self._pulse.is_silent

    async def route(self, request: pb.RouteRequest, timeout_s: float) -> RouteDecision:
        """Raises what the router refused it with; InstanceLostError when it is out of reach,
        DeadlineError when it did not answer in time."""
        reply = await self._reply(self._stub.Route(request, timeout=timeout_s))
        return decision_from_pb(reply.decision)

    async def reroute(self, request: pb.RerouteRequest, timeout_s: float) -> RouteDecision:
        """Raises like ``route``."""
        reply = await self._reply(self._stub.Reroute(request, timeout=timeout_s))
        return decision_from_pb(reply.decision)

    def tell(self, message: pb.ReportOutcomeRequest) -> None:
        """In order, as soon as the router can be reached; the newest are lost when too many wait:
        what is not told ends by the router's own clock."""
        if self._outcomes.qsize() < MAX_OUTCOMES:
            self._outcomes.put_nowait(message)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    async def _beat(self, timeout_s: float) -> bool:
        try:
            await self._stub.Beat(pb.BeatRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return error.code() not in _NO_SIGN  # an older version, say, does not know the call
        except grpc.aio.UsageError:  # the channel was closed meanwhile
            return False
        return True

    async def _reply(self, call: Awaitable[ReplyT]) -> ReplyT:
        try:
            with self._pulse.waiting():
                reply = await call
        except grpc.aio.AioRpcError as error:
            if error.code() not in _NO_SIGN:
                self._pulse.heard()
            raise error_from_rpc(error, peer=self.record.router_id, stage="route") from error
        except grpc.aio.UsageError as error:  # the channel was closed meanwhile
            text = f"{self.record.router_id} was given up"
            raise InstanceLostError(text, stage="route") from error
        self._pulse.heard()
        return reply

    async def _send(self) -> None:
        backoff = Backoff(cap_s=1.0)
        while True:
            call = self._stub.ReportOutcome()
            writer = asyncio.get_running_loop().create_task(self._write(call))
            try:
                await call.code()  # when it ends, whatever ended it
            finally:
                writer.cancel()
                call.cancel()
                await asyncio.gather(writer, return_exceptions=True)
            await asyncio.sleep(backoff.next_s())

    async def _write(self, call: OutcomeCall) -> None:
        """What could not be written is the first thing to be written next time."""
        try:
            await call.write(pb.ReportOutcomeRequest(gateway_id=self._gateway_id))
            while True:
                if self._next is None:
                    self._next = await self._outcomes.get()
                await call.write(self._next)
                self._next = None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # ``_send`` notices
        except Exception:  # noqa: BLE001 (no outcome behind it would ever be told)
            _log.exception("an outcome cannot be written")
            self._next = None
            call.cancel()
