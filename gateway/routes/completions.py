"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from isthmus.common.clock import NS_PER_S
from isthmus.common.errors import IsthmusError
from isthmus.common.timeline import Event, Timeline
from isthmus.common.types import LocalPrefillReason
from isthmus.gateway.accounting import Offer, count_refused
from isthmus.gateway.context import (
    CLASS_KEY,
    Gateway,
    gateway_of,
    id_headers,
    internal_id,
    session_of,
)
from isthmus.gateway.direct import Endpoint
from isthmus.gateway.exchange import Exchange
from isthmus.gateway.formats import AnswerFormat, ChatFormat, CompletionFormat
from isthmus.gateway.headers import headers_of
from isthmus.gateway.limits import Slot, read_body
from isthmus.gateway.measured import promised_ttft_ms
from isthmus.gateway.pipeline import Arrival
from isthmus.gateway.plan import ANONYMOUS, GenerationPlan
from isthmus.gateway.schemas import ChatBody, CompletionBody, GenerationBody
from isthmus.gateway.slo import class_headers
from isthmus.gateway.sse import ClientWatch, EventStreamResponse, RawHeaders, stream_headers
from isthmus.gateway.unexpected import internal_error

router = APIRouter()
BodyT = TypeVar("BodyT", bound=GenerationBody)
Planner = Callable[[BodyT, Arrival], Awaitable[GenerationPlan]]


def _body_schema(model: type[GenerationBody]) -> dict[str, Any]:
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    return {"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}}


@router.post("/v1/chat/completions", openapi_extra=_body_schema(ChatBody))
async def create_chat(request: Request) -> Response:
    gateway = gateway_of(request)
    return await _create(request, gateway, ChatBody, gateway.pipeline.plan_chat, ChatFormat)


@router.post("/v1/completions", openapi_extra=_body_schema(CompletionBody))
async def create_completion(request: Request) -> Response:
    gateway = gateway_of(request)
    planner = gateway.pipeline.plan_completion
    return await _create(request, gateway, CompletionBody, planner, CompletionFormat)


POSTS: dict[str, Endpoint] = {
    "/v1/chat/completions": create_chat,
    "/v1/completions": create_completion,
}


async def _create(
    request: Request,
    gateway: Gateway,
    model: type[BodyT],
    planner: Planner[BodyT],
    form: type[ChatFormat] | type[CompletionFormat],
) -> Response:
    """Admission before the body, the body before the tokens, the tokens before any instance.

    Without anybody to serve it a request waits before work is done for it.
    """
    slot: Slot | None = None
    headers = headers_of(request)
    offer = Offer(gateway.classes.default.class_name, ANONYMOUS)
    try:
        identity = gateway.keys.identify(headers)
        offer = Offer(identity.default_class or offer.slo_class, identity.label)
        slot = gateway.limiter.acquire(identity)
        raw = await read_body(request, gateway.config)
        arrived_ns = gateway.clock.now_ns()
        body = await gateway.pipeline.parse(model, raw)
        gateway.pipeline.check_model(body.model)
        slo = gateway.classes.resolve(body.slo, headers, identity.default_class)
        request.scope[CLASS_KEY] = class_headers(slo)
        offer = Offer(slo.class_name, identity.label)
        offer.count_offered()
        arrival = Arrival(
            request_id=internal_id(request),
            identity=identity,
            slo=slo,
            timeline=Timeline({Event.ARRIVED: arrived_ns}),
            arrived_ns=arrived_ns,
            session=session_of(headers),
        )
        await gateway.waiting.until_served(request.receive)
        plan = await planner(body, arrival)
        answer = form(
            plan.request_id,
            plan.model,
            arrived_ns // NS_PER_S,
            gateway.pipeline.tokenizer,
            usage=body.wants_usage_chunk,
            token_ids=bool(body.return_token_ids),
        )
        exchange = Exchange(plan, gateway.services, arrival.timeline)
    except BaseException as error:
        if slot is not None:
            slot.release()
        if isinstance(error, Exception):
            told = error if isinstance(error, IsthmusError) else internal_error()
            count_refused(internal_id(request), told, offer, gateway.goodput)
        raise
    return await _answer(request, exchange, answer, slot, streams=bool(body.stream))


async def _answer(
    request: Request, exchange: Exchange, answer: AnswerFormat, slot: Slot, *, streams: bool
) -> Response:
    """Waits for the first token (or all) before any header, so that a failure has its status."""
    is_handed_over = False
    watch = ClientWatch(request.receive, exchange)
    try:
        exchange.start()
        # Lets what was sent go out before more is done here, and the watch see a client that left
        # during tokenisation.
        await asyncio.sleep(0)
        if streams:
            opening = _Opening(request, exchange, answer)
            await exchange.wait()
            headers = opening.headers()
            response: Response = EventStreamResponse(exchange, answer, headers, watch, slot.release)
            is_handed_over = True
            return response
        await exchange.wait_all()
        content = orjson.dumps(answer.whole(exchange))
        exchange.mark_flushed(has_content=True)
        headers_of_all = _headers(request, exchange)
        return Response(content, headers=headers_of_all, media_type="application/json")
    except IsthmusError:
        raise
    except Exception:
        exchange.break_off(internal_error())
        raise
    finally:
        if not is_handed_over:
            exchange.close()
            slot.release()
            watch.stop()


class _Opening:
    """The begin of a stream, made while the instances work for it: with the first token it only
    has to be sent. The headers are made anew where that went to other instances than were chosen
    first."""

    def __init__(self, request: Request, exchange: Exchange, answer: AnswerFormat) -> None:
        first = exchange.choices[0]
        self._request, self._exchange = request, exchange
        self._decision, self._local_reason = first.decision, first.local_reason
        self._headers = self._make() if first.decision is not None else None
        answer.prepare(first)

    def headers(self) -> RawHeaders:
        first = self._exchange.choices[0]
        is_as_it_was = first.decision is self._decision and first.local_reason is self._local_reason
        return self._headers if self._headers is not None and is_as_it_was else self._make()

    def _make(self) -> RawHeaders:
        return stream_headers(_headers(self._request, self._exchange))


def _headers(request: Request, exchange: Exchange) -> dict[str, str]:
    """The ids, the class and its targets, and the decision for the first choice: which instances,
    why not two of them, and what was promised."""
    headers = id_headers(request)
    first = exchange.choices[0]
    decision, promised_ms = first.decision, promised_ttft_ms(exchange)
    if decision is not None and promised_ms is not None:
        headers["x-isthmus-predicted-ttft-ms"] = f"{promised_ms:.3f}"
        headers["x-isthmus-predicted-tpot-ms"] = f"{decision.predicted_tpot_ms:.3f}"
        headers["x-isthmus-policy"] = decision.policy
        headers["x-isthmus-admission"] = decision.action.value
    if decision is not None and decision.decode is not None:
        headers["x-isthmus-decode"] = decision.decode.instance_id
    if decision is not None and decision.prefill is not None:
        headers["x-isthmus-prefill"] = decision.prefill.instance_id
    if first.local_reason is not LocalPrefillReason.NONE:
        headers["x-isthmus-local-prefill"] = first.local_reason.value
    return headers
