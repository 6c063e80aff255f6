"""One Generate stream per decode instance, shared by all requests of this gateway.

``DecodeClient`` owns the streams and who is waiting on them. Everything that arrives goes to the
request's ``GenerationSink`` at once, in the event loop, without a task or queue of its own. When a
stream breaks, each of its requests fails with InstanceLostError at that moment; the stream itself
comes back by its own until ``follow`` says that the instance has gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import grpc.aio

from isthmus.common.clock import NS_PER_S, Clock
from isthmus.common.errors import InstanceLostError, InternalError, IsthmusError
from isthmus.common.ids import InstanceId, RequestId
from isthmus.common.logging import RateLimitedLog, get_logger
from isthmus.common.rpc import create_channel, error_from_rpc
from isthmus.common.tasks import tell_if_broken
from isthmus.common.timeline import Timeline
from isthmus.common.types import (
    FinishReason,
    InstanceRef,
    Request,
    RouteDecision,
    TokenLogprob,
    Usage,
)
from isthmus.gateway.outgoing import Outgoing
from isthmus.protos.convert.decisions import local_reason_from_pb
from isthmus.protos.convert.errors import error_from_pb
from isthmus.protos.convert.requests import (
    finish_reason_from_pb,
    logprob_from_pb,
    timeline_from_pb,
    usage_from_pb,
)
from isthmus.protos.v1 import decode_pb2 as pb
from isthmus.protos.v1 import decode_pb2_grpc

FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 1.0
CONNECT_S = 10.0  # until who is there but says nothing is taken for out of reach

EventT = TypeVar("EventT", pb.Started, pb.TokenDelta, pb.Finished, pb.Failed)

_log = get_logger("decode_client")


class GenerationEnd:
    """How a sequence ended, as the decode instance tells it."""

    __slots__ = (
        "failed_prefills",
        "local_reason",
        "reason",
        "stop_token_id",
        "timeline",
        "transferred_bytes",
        "usage",
    )

    def __init__(self, message: pb.Finished) -> None:
        self.reason = finish_reason_from_pb(message.reason) or FinishReason.ERROR
        self.stop_token_id = message.stop_token_id if message.HasField("stop_token_id") else None
        self.usage: Usage = usage_from_pb(message.usage)
        self.timeline: Timeline = timeline_from_pb(message.timeline)
        self.local_reason = local_reason_from_pb(message.local_reason)
        self.transferred_bytes = message.transferred_bytes
        self.failed_prefills = [InstanceId(name) for name in message.failed_prefills]


class GenerationSink(Protocol):
    """The receiving end of one request. Called in the event loop; must not block."""

    def on_started(self, num_cached_tokens: int, failed_prefills: Sequence[str]) -> None:
        """``failed_prefills``: instances that were asked for the prompt before, in vain."""

    def on_timeline(self, timeline: Timeline) -> None:
        """What has happened on the instance so far; before the tokens it came with."""

    def on_tokens(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob],
        prompt_logprobs: Sequence[TokenLogprob],
    ) -> None: ...

    def on_finished(self, end: GenerationEnd) -> None: ...

    def on_failed(self, error: IsthmusError, failed_instance: str) -> None: ...


class DecodeClient:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._streams: dict[InstanceId, _Stream] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def follow(self, refs: Iterable[InstanceRef]) -> None:
        """Keeps a stream open to each of these; requests on any other fail at once."""
        wanted = {ref.instance_id: ref for ref in refs}
        for instance_id, stream in list(self._streams.items()):
            if wanted.get(instance_id) != stream.ref:
                self._drop(instance_id)
        for ref in wanted.values():
            self._stream(ref)

    def submit(self, request: Request, decision: RouteDecision, sink: GenerationSink) -> None:
        """Raises InstanceLostError when the instance is known to be out of reach."""
        assert decision.decode is not None, "an admitted decision names a decode instance"
        self._stream(decision.decode).submit(request, decision, sink)

    def abort(self, instance_id: InstanceId, request_id: RequestId, reason: str) -> None:
        """The sink hears nothing more; the instance is told."""
        if stream := self._streams.get(instance_id):
            stream.abort(request_id, reason)

    def is_live(self, instance_id: InstanceId) -> bool:
        stream = self._streams.get(instance_id)
        return stream is not None and stream.is_live

    def is_broken(self, instance_id: InstanceId) -> bool:
        """True when a request to it would be refused now. A stream that is not open yet is not."""
        stream = self._streams.get(instance_id)
        return stream is not None and stream.is_broken and not stream.has_stopped

    def silent_s(self, instance_id: InstanceId) -> float:
        """Seconds since anything arrived while requests are waiting for it; 0 with none waiting."""
        stream = self._streams.get(instance_id)
        return stream.silent_s() if stream is not None else 0.0

    def num_requests(self) -> int:
        return sum(stream.num_requests for stream in self._streams.values())

    async def close(self) -> None:
        for instance_id in list(self._streams):
            self._drop(instance_id)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _stream(self, ref: InstanceRef) -> _Stream:
        stream = self._streams.get(ref.instance_id)
        if stream is not None and stream.ref != ref and stream.ref.epoch > ref.epoch:
            message = f"{ref.instance_id} has restarted since it was chosen"
            raise InstanceLostError(message, stage="submit", instance_id=ref.instance_id)
        if stream is not None and (stream.ref != ref or stream.has_stopped):
            self._drop(ref.instance_id)
            stream = None
        if stream is None:
            stream = self._streams[ref.instance_id] = _Stream(ref, self._clock)
        return stream

    def _drop(self, instance_id: InstanceId) -> None:
        stream = self._streams.pop(instance_id)
        task = asyncio.get_running_loop().create_task(stream.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        task.add_done_callback(tell_if_broken(_log, "a stream could not be closed"))


class _Stream:
    """One instance at one epoch: connects, reads, fails all that waits when it breaks, repeats."""

    def __init__(self, ref: InstanceRef, clock: Clock) -> None:
        self.ref = ref
        self.is_live = False
        self._is_broken = False
        self._clock = clock
        self._sinks: dict[str, GenerationSink] = {}
        self._outgoing = Outgoing()
        self._last_message_ns = clock.monotonic_ns()
        self._limited_log = RateLimitedLog(_log)
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(tell_if_broken(_log, "a decode stream stopped for good"))

    @property
    def num_requests(self) -> int:
        return len(self._sinks)

    def silent_s(self) -> float:
        if not self._sinks:
            return 0.0
        return (self._clock.monotonic_ns() - self._last_message_ns) / NS_PER_S

    @property
    def is_broken(self) -> bool:
        return self._is_broken or self.has_stopped

    @property
    def has_stopped(self) -> bool:
        """For good, by a fault of ours: the next request has a stream of its own."""
        return self._task.done()

    def submit(self, request: Request, decision: RouteDecision, sink: GenerationSink) -> None:
        if self.is_broken:
            raise self._lost("is out of reach")
        if not self._sinks:
            self._last_message_ns = self._clock.monotonic_ns()
        self._outgoing.submit(request, decision)
        self._sinks[request.request_id] = sink

    def abort(self, request_id: RequestId, reason: str) -> None:
        if self._sinks.pop(request_id, None) is not None:
            self._outgoing.abort(request_id, reason)

    async def close(self) -> None:
        self._is_broken = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)  # what broke it has been told
        self._fail_all("has left the cluster")

    async def _run(self) -> None:
        channel = create_channel(self.ref.address)
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        backoff_s = FIRST_BACKOFF_S
        try:
            while True:
                cause = await self._serve(stub)
                backoff_s = FIRST_BACKOFF_S if self.is_live else backoff_s
                self.is_live, self._is_broken = False, True
                self._outgoing = Outgoing()
                self._fail_all(cause)
                self._limited_log.warning(
                    "lost", "decode stream broke", instance=self.ref.instance_id, cause=cause
                )
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
        except Exception:
            self._is_broken = True
            self._fail_all("is not listened to any more")  # else they wait for their deadlines
            raise
        finally:
            self.is_live = False
            await channel.close()

    async def _serve(self, stub: decode_pb2_grpc.DecodeServiceStub) -> str:
        """Reads until the stream ends and says why it did."""
        call = stub.Generate()
        writer = asyncio.get_running_loop().create_task(self._write(call))
        try:
            async with asyncio.timeout(CONNECT_S):
                await call.wait_for_connection()
            self.is_live, self._is_broken = True, False
            while True:
                response = await call.read()
                if not isinstance(response, pb.GenerateResponse):
                    return "closed its stream"
                self._last_message_ns = self._clock.monotonic_ns()
                self._dispatch(response)
        except TimeoutError:
            return "could not be reached in time"
        except asyncio.CancelledError:
            if self._task.cancelling():
                raise
            return "could not be written to"  # its writer has broken, and said why
        except grpc.aio.AioRpcError as error:
            told = error_from_rpc(error, peer=self.ref.instance_id, stage="decode")
            is_typed = not isinstance(told, InstanceLostError)
            return told.message if is_typed else "went away: its connection broke"
        finally:
            writer.cancel()
            call.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _write(
        self, call: grpc.aio.StreamStreamCall[pb.GenerateRequest, pb.GenerateResponse]
    ) -> None:
        outgoing = self._outgoing
        try:
            while True:
                await call.write(await outgoing.take())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader says why
        except Exception:  # noqa: BLE001 (all of its requests would wait for their deadlines)
            _log.exception("a decode stream cannot be written to", instance=self.ref.instance_id)
            call.cancel()

    def _dispatch(self, response: pb.GenerateResponse) -> None:
        sinks = self._sinks
        for started in response.started:
            if sink := sinks.get(started.request_id):
                self._deliver(_deliver_started, sink, started)
        for delta in response.deltas:
            if sink := sinks.get(delta.request_id):
                self._deliver(_deliver_tokens, sink, delta)
        for finished in response.finished:
            if sink := sinks.pop(finished.request_id, None):
                self._deliver(_deliver_end, sink, finished)
        for failed in response.failed:
            if sink := sinks.pop(failed.request_id, None):
                self._deliver(_deliver_failure, sink, failed)

    def _deliver(
        self, deliver: Callable[[GenerationSink, EventT], None], sink: GenerationSink, event: EventT
    ) -> None:
        try:
            deliver(sink, event)
        except Exception as error:  # noqa: BLE001 (one request's fault must not end the others)
            _log.exception("request failed in the gateway", request_id=event.request_id)
            self._sinks.pop(event.request_id, None)
            self._outgoing.abort(RequestId(event.request_id), "gateway fault")
            _fail(event.request_id, sink, _as_internal(error), "")

    def _fail_all(self, cause: str) -> None:
        sinks, self._sinks = self._sinks, {}
        for request_id, sink in sinks.items():
            _fail(request_id, sink, self._lost(cause), self.ref.instance_id)

    def _lost(self, cause: str) -> InstanceLostError:
        text = (
            cause if cause.startswith(self.ref.instance_id) else f"{self.ref.instance_id} {cause}"
        )
        return InstanceLostError(text, stage="decode", instance_id=self.ref.instance_id)


def _fail(request_id: str, sink: GenerationSink, error: IsthmusError, instance: str) -> None:
    """Raises nothing: one request's fault must not keep it from the others."""
    try:
        sink.on_failed(error, instance)
    except Exception:  # noqa: BLE001 (its own deadline ends that one)
        _log.exception("request failed in the gateway", request_id=request_id)


def _deliver_started(sink: GenerationSink, started: pb.Started) -> None:
    sink.on_started(started.num_cached_tokens, started.failed_prefills)


def _deliver_tokens(sink: GenerationSink, delta: pb.TokenDelta) -> None:
    if delta.HasField("timeline"):
        sink.on_timeline(timeline_from_pb(delta.timeline))
    logprobs, of_prompt = delta.logprobs, delta.prompt_logprobs
    sink.on_tokens(
        delta.token_ids,
        [logprob_from_pb(item) for item in logprobs] if logprobs else (),
        [logprob_from_pb(item) for item in of_prompt] if of_prompt else (),
    )


def _deliver_end(sink: GenerationSink, finished: pb.Finished) -> None:
    sink.on_finished(GenerationEnd(finished))


def _deliver_failure(sink: GenerationSink, failed: pb.Failed) -> None:
    sink.on_failed(error_from_pb(failed.error), failed.failed_instance)


def _as_internal(error: Exception) -> IsthmusError:
    return InternalError(f"{type(error).__name__}: {error}", stage="gateway")
