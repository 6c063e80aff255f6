"""What the routes of one gateway share, and how a request gets its id."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from starlette.requests import Request

from isthmus.common.clock import Clock
from isthmus.common.config import GatewayConfig
from isthmus.common.errors import InvalidRequestError
from isthmus.common.ids import new_request_id
from isthmus.gateway.choice import ChoiceServices
from isthmus.gateway.decode_client import DecodeClient
from isthmus.gateway.goodput import GoodputWindow
from isthmus.gateway.headers import headers_of
from isthmus.gateway.limits import Identity, InflightLimiter, KeyRing
from isthmus.gateway.pipeline import Pipeline
from isthmus.gateway.router_client import RouterClient
from isthmus.gateway.schemas import MAX_SESSION
from isthmus.gateway.slo import ClassesOfService
from isthmus.gateway.waiting import WaitingRoom

SESSION_HEADER = "x-isthmus-session"
CLASS_KEY = "isthmus.class_headers"
_SCOPE_KEY = "isthmus.request_id"
_INTERNAL_KEY = "isthmus.internal_id"
_CLIENT_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class Gateway:
    config: GatewayConfig
    clock: Clock
    keys: KeyRing
    classes: ClassesOfService
    limiter: InflightLimiter
    router: RouterClient
    decode_client: DecodeClient
    pipeline: Pipeline
    services: ChoiceServices
    goodput: GoodputWindow
    waiting: WaitingRoom
    started_ns: int

    async def close(self) -> None:
        self.waiting.close()
        await self.decode_client.close()
        self.pipeline.close()


def gateway_of(request: Request) -> Gateway:
    return cast("Gateway", request.app.state.gateway)


def admit(request: Request) -> Identity:
    """Checks the request's key. Raises AuthenticationError."""
    return gateway_of(request).keys.identify(headers_of(request))


def request_id_of(request: Request) -> str:
    """As the client knows it: header ``x-request-id``, its own or a new one."""
    known = request.scope.get(_SCOPE_KEY)
    if known is None:
        given = headers_of(request).get("x-request-id", "")
        known = given if _CLIENT_ID.fullmatch(given) else new_request_id()
        request.scope[_SCOPE_KEY] = known
    return cast("str", known)


def internal_id(request: Request) -> str:
    """Unique even if a client uses one id twice; begins with the client's."""
    known = request.scope.get(_INTERNAL_KEY)
    if known is None:
        known = request_id_of(request)
        if headers_of(request).get("x-request-id", "") == known:
            known = f"{known}.{secrets.token_hex(3)}"
        request.scope[_INTERNAL_KEY] = known
    return cast("str", known)


def session_of(headers: Mapping[str, str]) -> str:
    """The conversation that the header ``x-isthmus-session`` names; empty = none.

    Raises InvalidRequestError when it is too long.
    """
    session = headers.get(SESSION_HEADER, "")
    if len(session) > MAX_SESSION:
        message = f"{SESSION_HEADER} must have at most {MAX_SESSION} characters"
        raise InvalidRequestError(message, param=SESSION_HEADER, stage="validate")
    return session


def id_headers(request: Request) -> dict[str, str]:
    """On every answer: the id as the client knows it, and as the logs and `isthmus explain` do;
    and once it is known, the class with its targets."""
    return {
        **request.scope.get(CLASS_KEY, {}),
        "x-request-id": request_id_of(request),
        "x-isthmus-request-id": internal_id(request),
    }
