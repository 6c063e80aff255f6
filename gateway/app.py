"""The HTTP application: routes, errors in OpenAI's shape, and what the routes share."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from isthmus.common.clock import Clock
from isthmus.common.cluster import Role
from isthmus.common.config import ClusterConfig
from isthmus.common.errors import (
    InvalidRequestError,
    IsthmusError,
    MethodNotAllowedError,
    UnknownRouteError,
)
from isthmus.gateway.choice import ChoiceServices
from isthmus.gateway.context import Gateway, id_headers
from isthmus.gateway.decider import Decider
from isthmus.gateway.decode_client import DecodeClient
from isthmus.gateway.direct import DirectRoutes
from isthmus.gateway.error_response import error_response
from isthmus.gateway.goodput import GoodputWindow
from isthmus.gateway.limits import InflightLimiter, KeyRing
from isthmus.gateway.pipeline import Pipeline
from isthmus.gateway.router_client import RouterClient
from isthmus.gateway.routes import completions, models, operations, tokens
from isthmus.gateway.slo import ClassesOfService
from isthmus.gateway.tokenizer import TextTokenizer
from isthmus.gateway.unexpected import UnexpectedErrors
from isthmus.gateway.waiting import WaitingRoom
from isthmus.router.admission import why_nobody
from isthmus.router.router import Router


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    tokenizer: TextTokenizer
    name: str


def build_gateway(
    config: ClusterConfig, model: ModelIdentity, router: Router, decider: Decider, clock: Clock
) -> Gateway:
    """``router`` is this gateway's view of the cluster, ``decider`` who is asked where to send.

    Call inside the running event loop; the caller closes what it gets, and the decider after it.
    """
    router_client = RouterClient(router, clock, decider)
    decode_client = DecodeClient(clock)
    waiting = WaitingRoom(
        lambda: not all(decode_client.is_broken(name) for name in router_client.servers()),
        min(config.gateway.instance_wait_ms, config.gateway.request_timeout_ms),
        lambda: why_nobody(router.cluster.by_role(Role.DECODE, Role.MIXED)),
    )
    goodput = GoodputWindow(clock)
    return Gateway(
        config=config.gateway,
        clock=clock,
        keys=KeyRing(config.gateway.api_keys, config.tenants),
        classes=ClassesOfService(config.slo),
        limiter=InflightLimiter(config.gateway.max_inflight),
        router=router_client,
        decode_client=decode_client,
        pipeline=Pipeline(
            config.gateway,
            model.tokenizer,
            router_client,
            clock,
            served_name=config.model.served_name,
            default_name=model.name,
        ),
        services=ChoiceServices(
            router=router_client,
            decode_client=decode_client,
            tokenizer=model.tokenizer,
            clock=clock,
            on_decode_loss=config.gateway.on_decode_loss,
            waiting=waiting,
            goodput=goodput,
        ),
        goodput=goodput,
        waiting=waiting,
        started_ns=clock.now_ns(),
    )


def create_app(gateway: Gateway) -> ASGIApp:
    app = FastAPI(title="Isthmus", docs_url="/docs", redoc_url=None, redirect_slashes=False)
    app.state.gateway = gateway
    for routes in (completions, models, tokens, operations):
        app.include_router(routes.router)
    app.add_exception_handler(IsthmusError, _typed_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(UnexpectedErrors)
    return DirectRoutes(app, completions.POSTS)


async def _typed_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, IsthmusError), "registered for this type"
    return error_response(error, id_headers(request))


async def _http_error(request: Request, error: Exception) -> Response:
    """The framework's own refusals: no such path, no such method."""
    assert isinstance(error, HTTPException), "registered for this type"
    typed: IsthmusError
    if error.status_code == 404:
        typed = UnknownRouteError(f"there is no {request.url.path}", stage="receive")
    elif error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}"
        typed = MethodNotAllowedError(message, stage="receive")
    else:
        typed = InvalidRequestError(str(error.detail), stage="receive")
    headers = {**(error.headers or {}), **id_headers(request)}
    response = error_response(typed, headers)
    response.status_code = error.status_code
    return response
