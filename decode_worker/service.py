"""DecodeService: one Generate stream carries all requests of one gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc.aio

from isthmus.common.errors import IsthmusError
from isthmus.common.ids import RequestId
from isthmus.decode_worker.events import (
    Failed,
    Finished,
    GenerationEvent,
    Outbox,
    Started,
    TokenDelta,
)
from isthmus.decode_worker.worker import DecodeWorker
from isthmus.protos.convert.decisions import decision_from_pb
from isthmus.protos.convert.errors import error_to_pb
from isthmus.protos.convert.requests import (
    finish_reason_to_pb,
    logprob_to_pb,
    request_from_pb,
    timeline_to_pb,
    usage_to_pb,
)
from isthmus.protos.v1 import decode_pb2 as pb
from isthmus.protos.v1 import decode_pb2_grpc

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["DecodeService"].full_name


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    def __init__(self, worker: DecodeWorker) -> None:
        self._worker = worker

    async def Generate(  # noqa: N802
        self,
        request_iterator: AsyncIterator[pb.GenerateRequest],
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
    ) -> AsyncIterator[pb.GenerateResponse]:
        stream = _Stream(self._worker)
        reader = asyncio.create_task(stream.read(request_iterator), name="generate-reader")
        try:
            while events := await stream.outbox.take():
                yield to_response(events)
        finally:
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader
            stream.abort_all()


class _Stream:
    """The requests of one stream. A half-closed stream ends after the last of them."""

    def __init__(self, worker: DecodeWorker) -> None:
        self.outbox = Outbox()
        self._worker = worker
        self._tasks: dict[RequestId, asyncio.Task[None]] = {}
        self._is_half_closed = False

    async def read(self, messages: AsyncIterator[pb.GenerateRequest]) -> None:
        try:
            async for message in messages:
                self._on_message(message)
        finally:
            self._is_half_closed = True
            self._close_if_done()

    def _on_message(self, message: pb.GenerateRequest) -> None:
        for submit in message.submits:
            self._submit(submit)
        for abort in message.aborts:
            request_id = RequestId(abort.request_id)
            if request_id in self._tasks:
                self._worker.abort([request_id])

    def _submit(self, submit: pb.Submit) -> None:
        try:
            request = request_from_pb(submit.request)
            decision = decision_from_pb(submit.decision)
        except IsthmusError as error:
            self.outbox.put(Failed(RequestId(submit.request.request_id), error))
            return
        task = self._worker.submit(request, decision, self.outbox)
        if task is not None:
            self._tasks[request.request_id] = task
            task.add_done_callback(lambda _: self._ended(request.request_id))

    def _ended(self, request_id: RequestId) -> None:
        self._tasks.pop(request_id, None)
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._is_half_closed and not self._tasks:
            self.outbox.close()

    def abort_all(self) -> None:
        self._worker.abort(list(self._tasks))


def to_response(events: list[GenerationEvent]) -> pb.GenerateResponse:
    """One message; the order of one request's events follows from their kinds."""
    response = pb.GenerateResponse()
    for event in events:
        match event:
            case Started():
                response.started.add(
                    request_id=event.request_id,
                    num_cached_tokens=event.num_cached_tokens,
                    failed_prefills=event.failed_prefills,
                )
            case TokenDelta():
                response.deltas.add(
                    request_id=event.request_id,
                    token_ids=event.token_ids,
                    logprobs=[logprob_to_pb(logprob) for logprob in event.logprobs],
                    prompt_logprobs=[logprob_to_pb(logprob) for logprob in event.prompt_logprobs],
                    timeline=timeline_to_pb(event.timeline) if event.timeline else None,
                )
            case Finished():
                response.finished.append(_finished_to_pb(event))
            case Failed():
                response.failed.add(
                    request_id=event.request_id,
                    error=error_to_pb(event.error),
                    failed_instance=event.failed_instance,
                )
    return response


def _finished_to_pb(event: Finished) -> pb.Finished:
    return pb.Finished(
        request_id=event.request_id,
        reason=finish_reason_to_pb(event.reason),
        stop_token_id=event.stop_token_id,
        usage=usage_to_pb(event.usage),
        timeline=timeline_to_pb(event.timeline),
        local_reason=event.local_reason.value,
        transferred_bytes=event.transferred_bytes,
        failed_prefills=event.failed_prefills,
    )
