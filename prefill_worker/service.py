"""PrefillService: messages in, the worker's updates out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc.aio

from isthmus.common.errors import IsthmusError
from isthmus.common.ids import TransferId
from isthmus.common.prefill import PrefillFailed
from isthmus.prefill_worker.worker import PrefillWorker
from isthmus.protos.convert.prefill import update_to_pb
from isthmus.protos.convert.requests import request_from_pb
from isthmus.protos.convert.transfers import ticket_from_pb
from isthmus.protos.v1 import prefill_pb2 as pb
from isthmus.protos.v1 import prefill_pb2_grpc

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["PrefillService"].full_name


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    def __init__(self, worker: PrefillWorker) -> None:
        self._worker = worker

    async def Prefill(  # noqa: N802
        self,
        request: pb.PrefillRequest,
        context: grpc.aio.ServicerContext[pb.PrefillRequest, pb.PrefillResponse],
    ) -> AsyncIterator[pb.PrefillResponse]:
        try:
            domain_request = request_from_pb(request.request)
        except IsthmusError as error:
            yield update_to_pb(PrefillFailed(error, quiesced=True))
            return
        # Closed by hand: an iterator left to the garbage collector would settle much later.
        updates = self._worker.prefill(domain_request, ticket_from_pb(request.ticket))
        async with aclosing(updates):
            async for update in updates:
                yield update_to_pb(update)

    async def Abort(  # noqa: N802
        self,
        request: pb.AbortRequest,
        context: grpc.aio.ServicerContext[pb.AbortRequest, pb.AbortResponse],
    ) -> pb.AbortResponse:
        quiesced = await self._worker.abort(TransferId(request.transfer_id), request.reason)
        return pb.AbortResponse(quiesced=quiesced)
