# ruff: noqa: N802  (gRPC names the methods and their arguments)
"""RouterService: a router for gateways of other processes. Translates only; the router decides.

A call of Route lasts as long as its request waits in the router. When the call ends early (its
gateway withdrew the question, or died) the wait ends with it, and a decision that nobody has heard
of is given back: the gateway says so, or its silence does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc.aio

from isthmus.common.errors import IsthmusError, StaleEpochError
from isthmus.common.ids import DecisionId, InstanceId, RequestId
from isthmus.common.rpc import abort_with
from isthmus.common.types import RouteDecision
from isthmus.protos.convert.decisions import decision_to_pb
from isthmus.protos.v1 import router_pb2 as pb
from isthmus.protos.v1 import router_pb2_grpc
from isthmus.router.driver import RouterDriver
from isthmus.router.gateways import OpenDecisions
from isthmus.router.router import Router
from isthmus.router.types import Outcome
from isthmus.router.wire import outcome_from_pb, query_from_pb, record_to_pb

LEAD_GRACE_S = 0.5
if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]


class ExplainServicer(router_pb2_grpc.RouterServiceServicer):
    """Of the service's calls the one that everybody answers who decides anything."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        records = self._router.log.of_request(request.request_id)
        return pb.ExplainResponse(explanations=[record_to_pb(record) for record in records])


class RouterServicer(ExplainServicer):
    """``leads``: set while decisions are this router's to make. ``name`` is for its refusals."""

    def __init__(
        self, router: Router, driver: RouterDriver, name: str, leads: asyncio.Event
    ) -> None:
        super().__init__(router)
        self._driver = driver
        self._name = name
        self._leads = leads
        self.open = OpenDecisions(router)

    async def Route(self, request: pb.RouteRequest, context: Context) -> pb.RouteResponse:
        try:
            await self._check_leading()
            query = query_from_pb(request)
            if request.may_wait:
                decision = await self._driver.decide(query)
            else:
                decision = self._router.route(query)
        except IsthmusError as error:
            await abort_with(context, error)
        return pb.RouteResponse(decision=self._made(request.gateway_id, decision))

    async def Reroute(self, request: pb.RerouteRequest, context: Context) -> pb.RerouteResponse:
        try:
            await self._check_leading()
            query = query_from_pb(request.request)
            failed = InstanceId(request.failed_instance)
            decision = self._router.reroute(query, failed, request.reason)
        except IsthmusError as error:
            await abort_with(context, error)
        gateway_id = request.request.gateway_id
        return pb.RerouteResponse(decision=self._made(gateway_id, decision))

    async def ReportOutcome(
        self, request_iterator: AsyncIterator[pb.ReportOutcomeRequest], context: Context
    ) -> pb.ReportOutcomeResponse:
        gateway_id = ""
        try:
            async for message in request_iterator:
                if message.gateway_id and not gateway_id:
                    gateway_id = message.gateway_id
                    self.open.stream_begins(gateway_id)
                self._take(gateway_id, message)
        finally:
            if gateway_id:
                self.open.stream_ends(gateway_id)
        return pb.ReportOutcomeResponse()

    async def Beat(self, request: pb.BeatRequest, context: Context) -> pb.BeatResponse:
        return pb.BeatResponse()

    async def _check_leading(self) -> None:
        """A gateway may hear of a new leader before that one does."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAD_GRACE_S):
                await self._leads.wait()
        if not self._leads.is_set():
            raise StaleEpochError(f"{self._name} does not lead", stage="route")

    def _made(self, gateway_id: str, decision: RouteDecision) -> pb.RouteDecision:
        self.open.made(gateway_id, decision.decision_id)
        return decision_to_pb(decision)

    def _take(self, gateway_id: str, message: pb.ReportOutcomeRequest) -> None:
        if message.withdrawn_request_id:
            self._withdraw(gateway_id, RequestId(message.withdrawn_request_id))
        elif message.decision_id:
            decision_id = DecisionId(message.decision_id)
            self.open.told(gateway_id, decision_id, outcome_from_pb(message))

    def _withdraw(self, gateway_id: str, request_id: RequestId) -> None:
        """Whether it still waits or its answer is on the way to somebody who has hung up."""
        self._driver.cancel(request_id)
        for record in self._router.log.of_sequence(request_id):
            if record.decision is not None and not record.outcomes:
                self.open.told(gateway_id, record.decision.decision_id, Outcome.cancelled())
