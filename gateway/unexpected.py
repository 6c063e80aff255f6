"""The process edge: an exception that nobody expected costs its own request and nothing else.

It is logged once, with its traceback and the request's id, and the client is told without either.
The framework's own last resort would pass it on to the server, which logs it a second time.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from isthmus.common.errors import InternalError
from isthmus.common.logging import get_logger
from isthmus.gateway.context import id_headers, request_id_of
from isthmus.gateway.error_response import error_response

_log = get_logger("gateway")


def internal_error() -> InternalError:
    """What clients and metrics are told of a fault of the gateway's own."""
    return InternalError("internal error", stage="gateway")


def log_unexpected(error: Exception, request_id: str) -> None:
    _log.error("unexpected error", request_id=request_id, exc_info=error)


class UnexpectedErrors:
    """ASGI middleware. An answer that has begun is cut off, so that nobody takes it for whole."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if scope["type"] != "http":
                raise
            request = Request(scope)
            log_unexpected(error, request_id_of(request))
            if not has_begun:
                response = error_response(internal_error(), id_headers(request))
                await response(scope, receive, send)
