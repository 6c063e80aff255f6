"""The other side of ControlService: how long it waits."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.common.cluster import Role
from isthmus.common.rpc import bind, create_server
from isthmus.controlplane import client
from isthmus.protos.v1 import control_pb2, control_pb2_grpc


class _Servicer(control_pb2_grpc.ControlServiceServicer):
    """Tells how much time the caller gave it, in seconds, as the old number of replicas."""

    async def Scale(  # noqa: N802
        self, request: control_pb2.ScaleRequest, context: Any
    ) -> control_pb2.ScaleResponse:
        return control_pb2.ScaleResponse(old_replicas=round(context.time_remaining()))


@pytest.mark.asyncio
async def test_scaling_waits_for_as_long_as_drains_may_take() -> None:
    server = create_server()
    control_pb2_grpc.add_ControlServiceServicer_to_server(_Servicer(), server)
    address = await bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        for drain_s in (0, 600):
            given_s = await client.scale(address, Role.DECODE, 1, drain_ms=1000 * drain_s)
            assert 2 * drain_s < given_s < 2 * drain_s + 60
    finally:
        await server.stop(0)
