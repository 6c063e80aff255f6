"""A gateway's stream of requests to a decode instance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest

from isthmus.common.types import Request
from isthmus.decode_worker.service import _Stream
from isthmus.decode_worker.worker import DecodeWorker
from isthmus.protos.v1 import decode_pb2 as pb


@pytest.mark.asyncio
async def test_a_message_of_a_newer_gateway_is_passed_over() -> None:
    async def messages() -> AsyncIterator[pb.GenerateRequest]:
        yield pb.GenerateRequest()

    stream = _Stream(cast("DecodeWorker", None))
    await stream.read(messages())
    assert await stream.outbox.take() == []


@pytest.mark.asyncio
async def test_one_message_begins_and_ends_several_requests() -> None:
    class Worker:
        """Runs what it is given until it is aborted."""

        def __init__(self) -> None:
            self.tasks: dict[str, asyncio.Task[None]] = {}

        def submit(self, request: Request, *_: object) -> asyncio.Task[None]:
            task = self.tasks[request.request_id] = asyncio.create_task(self._run())
            return task

        async def _run(self) -> None:
            await asyncio.Event().wait()

        def abort(self, request_ids: list[str]) -> None:
            for request_id in request_ids:
                self.tasks[request_id].cancel()

    async def messages() -> AsyncIterator[pb.GenerateRequest]:
        submits = [{"request": {"request_id": name, "token_ids": [1]}} for name in "abc"]
        yield pb.GenerateRequest(submits=submits, aborts=[{"request_id": name} for name in "bx"])

    worker = Worker()
    stream = _Stream(cast("DecodeWorker", worker))
    await stream.read(messages())
    await asyncio.gather(worker.tasks["b"], return_exceptions=True)
    assert [task.cancelled() for task in worker.tasks.values()] == [False, True, False]
    stream.abort_all()
    assert await stream.outbox.take() == []  # the last of them has ended
