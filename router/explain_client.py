"""Asks whoever decides what they know of a request: for the command line."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc.aio

from isthmus.common.errors import IsthmusError
from isthmus.common.registry import Registry, deciders_prefix, routers_prefix
from isthmus.common.registry.routers import RouterRecord
from isthmus.common.rpc import create_channel, error_from_rpc
from isthmus.protos.v1 import router_pb2, router_pb2_grpc
from isthmus.router.explain import DecisionRecord
from isthmus.router.wire import record_from_pb

CALL_TIMEOUT_S = 3.0


async def find_deciders(registry: Registry, cluster: str) -> list[RouterRecord]:
    """Routers that show themselves now, and gateways that decide by themselves while none leads.

    Raises IsthmusError without a registry.
    """
    prefixes = routers_prefix(cluster), deciders_prefix(cluster)
    found = await asyncio.gather(*(registry.get(prefix) for prefix in prefixes))
    records = (RouterRecord.decode(entry.value) for entries in found for entry in entries)
    return [record for record in records if record is not None]


async def explain(deciders: Iterable[RouterRecord], request_id: str) -> list[DecisionRecord]:
    """What all of them know, oldest first: who leads now may not have decided then.

    Raises IsthmusError when none of them answers.
    """
    asked = [_ask(router, request_id) for router in deciders]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    found: list[DecisionRecord] = []
    failure: IsthmusError | None = None
    for answer in answers:
        if isinstance(answer, IsthmusError):
            failure = answer
        elif isinstance(answer, BaseException):
            raise answer
        else:
            found += answer
    if failure is not None and not any(isinstance(answer, list) for answer in answers):
        raise failure
    return sorted(found, key=lambda record: record.at_ns)


async def _ask(router: RouterRecord, request_id: str) -> list[DecisionRecord]:
    async with create_channel(router.address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        request = router_pb2.ExplainRequest(request_id=request_id)
        try:
            reply = await stub.Explain(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, peer=router.router_id, stage="explain") from error
    return [record_from_pb(item) for item in reply.explanations]
