"""The stream of outcomes to a router: what breaks it, and what does not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from isthmus.common.registry.routers import RouterRecord
from isthmus.common.rpc import bind, create_server, stop_server
from isthmus.gateway.router_link import RouterLink
from isthmus.protos.v1 import router_pb2 as pb
from isthmus.protos.v1 import router_pb2_grpc
from tests.support.poll import poll_until


class HearingServicer(router_pb2_grpc.RouterServiceServicer):
    def __init__(self) -> None:
        self.heard: list[str] = []

    async def ReportOutcome(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.ReportOutcomeRequest], context: Any
    ) -> pb.ReportOutcomeResponse:
        async for message in request_iterator:
            if message.withdrawn_request_id:
                self.heard.append(message.withdrawn_request_id)
        return pb.ReportOutcomeResponse()


@pytest.mark.asyncio
async def test_a_writer_that_breaks_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken() -> pb.ReportOutcomeRequest:
        monkeypatch.undo()
        raise ValueError("a bug")

    servicer, server = HearingServicer(), create_server()
    router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, server)
    address = await bind(server, "127.0.0.1", 0)
    await server.start()
    link = RouterLink(RouterRecord("router-0", address, pid=1), "gateway-0", lambda _: None)
    link.tell(pb.ReportOutcomeRequest(withdrawn_request_id="before"))
    await poll_until(lambda: servicer.heard == ["before"])
    monkeypatch.setattr(link._outcomes, "get", broken)
    for name in ("now", "behind"):
        link.tell(pb.ReportOutcomeRequest(withdrawn_request_id=name))
    await poll_until(lambda: servicer.heard == ["before", "now", "behind"])
    await link.close()
    await stop_server(server, 0)
