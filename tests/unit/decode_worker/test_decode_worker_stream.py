"""A gateway's stream of requests to a decode instance."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

import pytest

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
